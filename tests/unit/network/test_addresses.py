"""Multiaddresses: which are accepted, which are refused and with what message, and how they are printed."""

import socket
import threading
import time

import pytest

from recipe.errors import InputError
from swarm.network.addresses import (
    EXAMPLE,
    check_port_free,
    check_reachable,
    classify,
    closed_ports,
    farthest_first,
    host_and_port,
    household,
    join_commands,
    parse_initial_peers,
    parse_own_address,
    reachable,
)
from swarm.network.known_peers import usable
from tests.helpers.programs.ports import free_port

RSA_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ED25519_ID = "12D3KooWJ4h25QzeTZ85zXdNp9a4QgFm7gQVk1KNdcfcHdQLKPmh"


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def local(port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{RSA_ID}"


@pytest.mark.parametrize(
    "address",
    [
        EXAMPLE,
        f"/ip4/10.0.0.7/tcp/4001/p2p/{ED25519_ID}",
        f"/ip6/2001:db8::1/tcp/65535/p2p/{RSA_ID}",
        f"/dns/peer.example.org/tcp/1/p2p/{RSA_ID}",
        f"/dns4/localhost/tcp/31337/p2p/{RSA_ID}",
        f"/dns6/a-b.example/tcp/31337/p2p/{RSA_ID}",
        f"/ip4/203.0.113.5/udp/31337/quic-v1/p2p/{RSA_ID}",
        f"/ip4/203.0.113.5/tcp/31337/p2p/{RSA_ID}/p2p-circuit/p2p/{ED25519_ID}",
    ],
)
def test_good_addresses_come_back_unchanged(address):
    assert parse_initial_peers([address], {}) == [address]


def test_separators_duplicates_quotes_and_ipfs():
    first, second, third = local(1), local(2), local(3)
    values = [f"{first},{second}", f"'{first}'", f"[{third.replace('/p2p/', '/ipfs/')}]"]
    assert parse_initial_peers(values, {"INITIAL_PEERS": "ignored"}) == [first, second, third]
    assert parse_initial_peers(None, {"INITIAL_PEERS": f" {second}, {first}\n{second} "}) == [second, first]


def test_a_peer_gives_no_addresses_of_other_peers():
    own, other = f"/ip4/10.0.0.7/tcp/4001/p2p/{ED25519_ID}", local(1)
    assert usable([f"{other},{own}", f"{own} {other}", other], ED25519_ID) == [own]
    assert usable([f"{other},{own}", 7]) == [other, own]


def test_nothing_given_starts_a_swarm():
    assert parse_initial_peers(None, {}) == []


@pytest.mark.parametrize(
    ("values", "environment", "sentence"),
    [
        ([], {}, "The address is empty: give the address of a running peer, or a join line. `swarm start` begins"),
        (["", " ,"], {"INITIAL_PEERS": local(1)}, "The address is empty: "),
        (None, {"INITIAL_PEERS": ""}, "INITIAL_PEERS is empty: give the address of a running peer, or a join"),
        (None, {"INITIAL_PEERS": "  "}, "INITIAL_PEERS is empty: "),
    ],
)
def test_an_empty_option_or_variable_starts_nothing(values, environment, sentence):
    with pytest.raises(InputError) as caught:
        parse_initial_peers(values, environment)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("/ip4/203.0.113.5/tcp/31337", "/p2p/PEER_ID is missing"),
        ("/ip4/203.0.113.5/tcp/31337/p2p", "is not a whole peer id"),
        (EXAMPLE[:-3], "is not a whole peer id"),
        (EXAMPLE[:-1] + "0", "is not a whole peer id"),
        (f"/ip4/203.0.113.5/tcp/31337/p2p/{46 * '1'}", "is not a whole peer id"),
        (f"/ip4/203.0.113.5/tcp/31337/p2p/{39 * '1'}2", "is not a whole peer id"),
        (f"/ip4/203.0.113.5/tcp/31337/p2p/1{ED25519_ID}", "is not a whole peer id"),
        (46 * "1", "does not start with /ip4"),
        (f"/ip4/203.0.113.5/tcp/99999/p2p/{RSA_ID}", "the port 99999 is not"),
        (f"/ip4/203.0.113.5/tcp/0/p2p/{RSA_ID}", "the port 0 is not"),
        (f"/ip4/203.0.113.5/tcp/p2p/{RSA_ID}", "the port p2p is not"),
        (f"/ip4/203.0.113.5/udp/31337/quic/p2p/{RSA_ID}", "write /quic-v1"),
        (f"/ip4/203.0.113.5/udp/31337/p2p/{RSA_ID}", "/quic-v1 has to follow"),
        (f"/ip4/203.0.113.5/p2p/{RSA_ID}", "/tcp/PORT is missing"),
        (f"/ip4/203.0.113.500/tcp/31337/p2p/{RSA_ID}", "is not an IPv4 address"),
        (f"/ip4/2001:db8::1/tcp/31337/p2p/{RSA_ID}", "is not an IPv4 address"),
        (f"/ip6/fe80::1%eth0/tcp/31337/p2p/{RSA_ID}", "is not an IPv6 address"),
        (f"/ip4/0.0.0.0/tcp/31337/p2p/{RSA_ID}", "only says where a peer listens"),
        (f"/dns/bad-/tcp/31337/p2p/{RSA_ID}", "is not a host name"),
        (f"/dns/my_peer/tcp/31337/p2p/{RSA_ID}", "is not a host name"),
        (f"/ip5/1.2.3.4/tcp/31337/p2p/{RSA_ID}", "/ip5 is not one of"),
        (f"/ip4/1.2.3.4/tcp/31337/ws/p2p/{RSA_ID}", "/ws is not understood"),
        (f"{EXAMPLE}/p2p-circuit", "/p2p/PEER_ID is missing"),
        (f"{EXAMPLE}/more", "/more is not understood"),
        (f"{EXAMPLE}/", "/ is not understood"),
        (f"/{EXAMPLE}", "is not one of"),
        ("http://203.0.113.5:31337", "web address"),
        ("203.0.113.5:31337", "host:port"),
        ("peer.example.org:31337", "host:port"),
        (RSA_ID, "a peer id without the host"),
        ("--initial_peers", "it is an option"),
        (EXAMPLE[1:], "does not start with /ip4"),
        ("/", "is not one of"),
    ],
)
def test_bad_addresses_are_named_with_the_reason_and_an_example(address, reason):
    for values, environment, source in [
        ([local(1), address], {}, ""),
        (None, {"INITIAL_PEERS": address}, "INITIAL_PEERS: "),
    ]:
        with pytest.raises(InputError) as caught:
            parse_initial_peers(values, environment)
        sentence = str(caught.value)
        assert sentence.startswith(f"{source}`{address}` cannot be used, ")
        assert reason in sentence
        assert sentence.endswith(f"an address looks like {EXAMPLE}.")


def test_own_addresses_need_no_peer_id_and_may_listen_anywhere():
    assert parse_own_address("/ip4/0.0.0.0/tcp/0", "--host-maddrs").port == 0
    with pytest.raises(InputError, match="--announce-maddrs: `nonsense`"):
        parse_own_address("nonsense", "--announce-maddrs")


def test_reachable_says_why_not(listener):
    assert reachable(local(listener), 5) is None
    assert reachable(local(listener).replace("/ip4/127.0.0.1", "/dns/localhost"), 5) is None
    assert reachable(local(free_port()), 5) == "connection refused"
    assert reachable(f"/dns/nobody.invalid/tcp/1/p2p/{RSA_ID}", 5) == "name not found"
    assert reachable(f"/ip4/127.0.0.1/udp/9/quic-v1/p2p/{RSA_ID}", 5) is None


def test_a_reachable_peer_has_to_greet_first():
    """p2pd greets each caller. For a frozen peer, its system only takes the connection."""
    said: list[bytes] = [b"\x13/multistream/1.0.0\n", b""]

    def serve(server: socket.socket) -> None:
        for words in said:
            with server.accept()[0] as connection:
                connection.sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = local(server.getsockname()[1])
        assert reachable(address, 0.3, is_greeted=True) == "timed out", "no process has accepted"
        server.settimeout(10)
        server.accept()[0].close()
        serving = threading.Thread(target=serve, args=(server,))
        serving.start()
        assert [reachable(address, 5, is_greeted=True) for _ in said] == [None, "hung up"]
        serving.join()


def test_slow_addresses_time_out_together(monkeypatch, listener):
    """One after the other they would take a minute."""
    test_is_over = threading.Event()

    def never(host, *_):
        test_is_over.wait(100)
        raise OSError("never found")

    alive, slow = local(listener), [f"/dns/slow{i}.example/tcp/1/p2p/{RSA_ID}" for i in range(50)]
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest: (never if "slow" in host else real)(host, *rest))
    start = time.monotonic()
    assert check_reachable([slow[0], alive, *slow[1:]], timeout_seconds=0.2) == [alive]
    with pytest.raises(InputError, match=r"slow0\.example:1 \(timed out\), slow1"):
        check_reachable(slow, timeout_seconds=0.2)
    assert time.monotonic() - start < 14
    test_is_over.set()


def test_some_or_none_reachable(listener):
    dead = local(free_port())
    assert check_reachable([]) == []
    assert check_reachable([dead, local(listener)]) == [local(listener)]
    with pytest.raises(InputError, match=r"127\.0\.0\.1:\d+ \(connection refused\); check that the peer still runs"):
        check_reachable([dead])


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("ip4/127.0.0.1", "loopback"),
        ("ip4/127.8.8.8", "loopback"),
        ("ip6/::1", "loopback"),
        ("ip6/::ffff:127.0.0.1", "loopback"),
        ("dns/localhost", "loopback"),
        ("ip4/10.1.2.3", "private"),
        ("ip4/172.17.0.1", "private"),
        ("ip4/192.168.0.2", "private"),
        ("ip4/169.254.1.1", "private"),
        ("ip4/100.64.0.1", "private"),
        ("ip6/fe80::1", "private"),
        ("ip6/fd00::2", "private"),
        ("dns/nas.local", "private"),
        ("ip4/1.1.1.1", "public"),
        ("ip4/100.128.0.1", "public"),
        ("ip6/2606:4700::1111", "public"),
        ("dns4/peer.example.org", "public"),
    ],
)
def test_classify(host, kind):
    assert classify(f"/{host}/tcp/31337/p2p/{RSA_ID}") == kind


def test_the_public_address_is_among_the_eight_that_are_kept():
    near = ["/ip4/127.0.0.1/tcp/1", *(f"/ip4/172.{number}.0.1/tcp/1" for number in range(17, 27))]
    assert farthest_first([*near, "/ip4/8.8.8.8/tcp/1"])[:3] == ["/ip4/8.8.8.8/tcp/1", *near[1:3]]
    assert farthest_first(near)[-1] == near[0]


def test_a_host_and_a_port():
    assert host_and_port("203.0.113.5", 80) == "203.0.113.5:80"
    assert host_and_port("2001:db8::1", 80) == "[2001:db8::1]:80"


def test_a_household_with_many_addresses_has_one_limit():
    assert household("2001:db8::1") == household("2001:db8::ffff:1") != household("2001:db8:0:1::1")
    assert household("203.0.113.5") == household("::ffff:203.0.113.5") != household("203.0.113.6")
    assert household("testclient") == "testclient"


def test_join_commands_by_network():
    here, lan, wan = (f"/ip4/{ip}/tcp/31337/p2p/{RSA_ID}" for ip in ("127.0.0.1", "192.168.0.2", "1.1.1.1"))
    assert join_commands([wan, here, lan]).splitlines() == [
        "# on this machine",
        f"swarm join {here}",
        "# on the local network",
        f"swarm join {lan}",
        "# over the internet",
        f"swarm join {wan}",
    ]
    assert join_commands([wan, wan], program="join").splitlines()[1:] == [f"join {wan} {wan}"]
    assert join_commands([]) == ""


def test_a_warning_says_when_the_internet_cannot_come_in():
    lan = f"/ip4/192.168.0.2/tcp/31337/p2p/{RSA_ID}"
    warning = closed_ports([lan])
    assert "forward TCP port 31337" in warning
    assert "--public-ip" in warning
    assert "over the internet" in join_commands([lan], public_ip="192.168.0.2")


def test_a_person_with_a_public_address_by_ipv6_alone_is_told_which_peers_can_join():
    lan, wan = (f"{host}/tcp/31337/p2p/{RSA_ID}" for host in ("/ip4/192.168.0.2", "/ip6/2606:4700::1111"))
    warning = closed_ports([lan, wan])
    assert "Only peers with IPv6 can join, if your router lets them in" in warning
    assert "forward TCP port 31337" in warning
    assert closed_ports([wan], public_ip="2606:4700::1111") == "", "that is what she says"


def test_port_in_use_out_of_range_or_foreign(listener):
    check_port_free(0)
    check_port_free(free_port())
    with pytest.raises(InputError, match=f"Port {listener} is in use"):
        check_port_free(listener)
    with pytest.raises(InputError, match="--port 70000 does not exist"):
        check_port_free(70000)
    with pytest.raises(InputError, match="cannot listen on 203"):
        check_port_free(0, "203.0.113.5")
