"""Homes: behind a router that opens a port, with IPv6 alone, and behind a router that opens none.

DHT processes of forked peers, in network namespaces with a real miniupnpd; nothing is trained.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest

from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht, visible_addresses
from swarm.peer.role import measured
from tests.helpers.homes.nat import (
    HOME_IP,
    HOME_IPV6,
    INTERNET_IP,
    INTERNET_IPV6,
    ROUTER_IP,
    enter,
    home_behind_router,
    two_by_ipv6,
    why_not,
)
from tests.helpers.swarm_peers import Peers

REASON = why_not()
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(REASON is not None, reason=str(REASON))]
needs_miniupnpd = pytest.mark.skipif(shutil.which("miniupnpd") is None, reason="install miniupnpd-nftables")

PORT = 31337


@dataclass(frozen=True)
class Found:
    """What a volunteer's peer finds out.

    Args:
        said: the text that it prints
        addresses: the addresses that it announces
    """

    said: str
    addresses: tuple[str, ...]


def out_there(_name, initial_peers, line, place, host, port):
    """Run a server-mode peer on the internet until it is told to end."""
    enter(place)
    dht = start_dht(NetworkOptions(initial_peers, port=port))
    line.announce(next(address for address in visible_addresses(dht) if host in address))
    line.get()
    stop_dht(dht)


def caller(_name, _initial_peers, line, place, address):
    """Join by one address alone, on which a peer has to answer."""
    enter(place)
    dht = start_dht(NetworkOptions((address,), client_mode=True))
    stop_dht(dht)
    return True


def volunteer(_name, initial_peers, line, place, ask_router):
    """Begin as `swarm join` does, and run until the test ends it."""
    enter(place)
    found, network = measured(NetworkOptions(initial_peers, port=PORT), ask_router=ask_router)
    dht = start_dht(network)
    line.put(Found(str(found), () if network.client_mode else tuple(visible_addresses(dht))))
    line.get()
    stop_dht(dht)


def first(_name, _initial_peers, line, place):
    """Begin as `swarm start` does: there is no peer to ask, but the router."""
    enter(place)
    found, network = measured(NetworkOptions(port=PORT), ask_router=True)
    dht = start_dht(network)
    line.announce(next(address for address in visible_addresses(dht) if ROUTER_IP in address))
    line.put((str(found), dht.opened.open_same(PORT + 1)))
    line.get()
    stop_dht(dht)


def end(peers: Peers, *names: str) -> None:
    for name in names:
        peers[name].tell("end")
    peers.results(*names)


@needs_miniupnpd
@pytest.mark.parametrize(
    ("protocol", "ports", "outside"), [("upnp", "1024-65535", PORT), ("natpmp", "31400-65535", 31400)]
)
def test_the_router_opens_a_port_for_as_long_as_the_peer_runs(tmp_path, protocol, ports, outside):
    with home_behind_router() as net, net.opens_ports(tmp_path, protocol, ports), Peers(timeout_seconds=60) as peers:
        peers.start("out-there", out_there, net.internet, INTERNET_IP, 31000)
        peers.start("at-home", volunteer, net.home, True)
        found = peers.message("at-home")
        assert f"server-mode peer, because 1 peer could call this machine at {ROUTER_IP} port {outside}." in found.said
        assert f"Your router opened port {outside} for this peer until it ends." in found.said
        assert net.opened() == [(str(outside), f"{HOME_IP}:{PORT}")]
        address = next(address for address in found.addresses if f"/{ROUTER_IP}/tcp/{outside}/" in address)
        assert any(f"/{HOME_IP}/tcp/{PORT}/" in address for address in found.addresses), "for the neighbours"
        peers.start("caller", caller, net.internet, address)
        assert peers.results("caller") == {"caller": True}
        end(peers, "at-home", "out-there")
        assert net.opened() == []


@needs_miniupnpd
def test_the_first_peer_takes_its_routers_word_and_says_so(tmp_path):
    with home_behind_router() as net, net.opens_ports(tmp_path, "upnp"), Peers(timeout_seconds=60) as peers:
        peers.start("first", first, net.home)
        said, opens_another = peers.message("first")
        assert (
            f"opened port {PORT} of {ROUTER_IP} for this peer until it ends; no other peer is there to test it" in said
        )
        assert opens_another
        assert sorted(net.opened()) == [(str(port), f"{HOME_IP}:{port}") for port in (PORT, PORT + 1)]
        peers.start("caller", caller, net.internet, peers["first"].address)
        assert peers.results("caller") == {"caller": True}
        end(peers, "first")
        assert net.opened() == []


@needs_miniupnpd
def test_a_router_that_may_not_be_asked_opens_nothing(tmp_path):
    with home_behind_router() as net, net.opens_ports(tmp_path, "upnp"), Peers(timeout_seconds=60) as peers:
        peers.start("out-there", out_there, net.internet, INTERNET_IP, 31000)
        peers.start("at-home", volunteer, net.home, False)
        found = peers.message("at-home")
        assert found.said == (
            f"Reachability: client-mode peer, because 0 of 1 peer could call this machine at {ROUTER_IP} port {PORT}."
        )
        assert net.opened() == []
        end(peers, "at-home", "out-there")


def test_behind_a_symmetric_router_that_opens_nothing_it_is_outbound_only():
    with home_behind_router("masquerade fully-random") as net, Peers(timeout_seconds=60) as peers:
        peers.start("out-there", out_there, net.internet, INTERNET_IP, 31000)
        peers.start("at-home", volunteer, net.home, True)
        found = peers.message("at-home")
        assert "client-mode peer, because 0 of 1 peer could call this machine" in found.said
        assert "router" not in found.said
        end(peers, "at-home", "out-there")


def test_with_ipv6_alone_it_is_a_full_peer():
    with two_by_ipv6() as net, Peers(timeout_seconds=60) as peers:
        peers.start("out-there", out_there, net.internet, INTERNET_IPV6, 31000)
        peers.start("at-home", volunteer, net.home, True)
        found = peers.message("at-home")
        assert f"server-mode peer, because 1 peer could call this machine at {HOME_IPV6} port {PORT}." in found.said
        address = next(address for address in found.addresses if address.startswith(f"/ip6/{HOME_IPV6}/tcp/{PORT}/"))
        peers.start("caller", caller, net.internet, address)
        assert peers.results("caller") == {"caller": True}
        end(peers, "at-home", "out-there")
