"""Peers that call back: what they do, what they refuse, and what the caller concludes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hivemind.p2p import P2P

from recipe.presets import preset
from swarm.membership.run_manifest import PROTOCOL, RunManifest, publish_manifest
from swarm.network import reachability
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht, visible_addresses
from swarm.network.reachability import (
    CALLS_OF_A_HOST,
    CALLS_OF_A_PEER,
    CALLS_PER_MINUTE,
    NONCE_BYTES,
    Called,
    CallMe,
    Reachability,
    ReachabilityService,
    conclusion,
    measure_reachability,
)
from swarm.network.signed_records import peer_of, prepare_identity
from swarm.peer.role import measured
from tests.helpers.cli import START_SECONDS, PeerProgram, reaping, summary_of
from tests.helpers.owners import subkey_of
from tests.helpers.programs.ports import free_port

pytestmark = pytest.mark.timeout(300)
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
NONCE = bytes(range(NONCE_BYTES))
IMPATIENT = "tests.helpers.programs.impatient_peer"


@pytest.fixture(scope="module")
def dht() -> Iterator:
    """The DHT of a server-mode peer, without training."""
    started = start_dht(NetworkOptions(host_maddrs=LOOPBACK))
    yield started
    stop_dht(started)


@pytest.fixture(scope="module")
def address(dht) -> str:
    return visible_addresses(dht)[0]


def test_a_running_peer_calls_back(address):
    port = free_port()
    found = measure_reachability([address], port)
    assert (found.mode, found.host) == ("server-mode", "127.0.0.1")
    said = f"Reachability: server-mode peer, because 1 peer could call this machine at 127.0.0.1 port {port}."
    assert str(found) == said


def measure_often(address: str, key: Path) -> None:
    """Measure several times: on a busy machine, the asked peer learns the address of a new peer a little later."""
    for _ in range(20):
        measure_reachability([address], free_port(), key)


def test_an_identity_in_use_is_refused(address, dht, tmp_path):
    options = NetworkOptions(host_maddrs=LOOPBACK, initial_peers=(address,), identity_path=tmp_path / "a.key")
    running = start_dht(options)
    try:
        assert running.peer_id == prepare_identity(tmp_path / "a.key")
        with pytest.raises(ValueError, match="uses the identity"):
            measure_often(address, tmp_path / "a.key")
    finally:
        stop_dht(running)


def test_what_is_said_counts(address):
    forced, options = measured(NetworkOptions(initial_peers=(address,), client_mode=True))
    assert (forced.mode, options.client_mode) == ("client-mode", True)
    assert "--client-mode was given" in forced.reason
    told, options = measured(NetworkOptions(initial_peers=(address,), host_maddrs=LOOPBACK))
    assert (told.mode, options.client_mode) == ("server-mode", False)
    first, _ = measured(NetworkOptions())
    assert "first peer" in first.reason


def test_what_was_measured_is_used(address):
    found, options = measured(NetworkOptions(initial_peers=(address,)))
    assert found.mode == "server-mode"
    assert options.port > 0
    assert not options.client_mode
    assert options.public_ip is None, "its own address needs no other announcement"


@pytest.mark.parametrize(
    ("answers", "mode", "reason"),
    [
        ([], "client-mode", "no peer answered"),
        ([Called("192.0.2.1", True)], "server-mode", "1 peer could call this machine at 192.0.2.1 port 7"),
        ([Called("192.0.2.1", True)] * 3, "server-mode", "3 peers could"),
        ([Called("192.0.2.1", True), Called("198.51.100.1", False)], "client-mode", "1 of 2 peers"),
        ([Called("8.8.8.8", True), Called("9.9.9.9", True)], "client-mode", "2 peers see this machine at different"),
        ([Called("8.8.8.8", True), *[Called("9.9.9.9", True)] * 2], "server-mode", "call this machine at 9.9.9.9"),
        ([Called("192.168.1.7", True), Called("8.8.8.8", True)], "server-mode", "could call this machine at 8.8.8.8"),
    ],
)
def test_conclusions(answers, mode, reason):
    found = conclusion(answers, 7)
    assert isinstance(found, Reachability)
    assert found.mode == mode
    assert reason in found.reason


def test_a_machine_with_several_addresses_is_called_at_each_of_them(monkeypatch):
    monkeypatch.setattr(reachability, "own_addresses", lambda: ["127.0.0.1", "192.168.1.7"])
    found = conclusion([Called("127.0.0.1", True), Called("192.168.1.7", True)], 7)
    assert (found.mode, found.host) == ("server-mode", "127.0.0.1")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        bytes(1000),
        CallMe(80, NONCE).SerializeToString()[:-1],
        CallMe(0, NONCE).SerializeToString(),
        CallMe(65536, NONCE).SerializeToString(),
        CallMe(80, b"short").SerializeToString(),
        CallMe("80", NONCE).SerializeToString(),  # type: ignore[arg-type]
    ],
)
def test_questions_that_make_no_sense_are_refused(data):
    with pytest.raises(ValueError, match=r"."):
        CallMe.FromString(data)


@pytest.mark.parametrize("answer", [Called("nobody's", True), Called("1.2.3.4\n", True), Called("1.2.3.4", 1)])
def test_answers_that_make_no_sense_are_refused(answer):
    with pytest.raises(ValueError, match=r"."):
        Called.FromString(answer.SerializeToString())


def test_only_the_nonce_counts_and_only_so_often():
    """The server of another machine behind the same router is not this peer."""

    async def ask() -> list[bool]:
        async def greet(_reader, writer):
            writer.write(os.urandom(NONCE_BYTES))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        asked = await P2P.create(host_maddrs=LOOPBACK, startup_timeout=60)
        asker = await P2P.create(await asked.get_visible_maddrs(), host_maddrs=LOOPBACK, startup_timeout=60)
        service = ReachabilityService(asked)
        await service.add_p2p_handlers(asked)
        stub = ReachabilityService.get_stub(asker, asked.peer_id)
        try:
            return [await stub.rpc_call_back(CallMe(port, NONCE), timeout=20) for _ in range(CALLS_OF_A_PEER + 1)]
        finally:
            await asker.shutdown()
            await asked.shutdown()
            server.close()

    *answers, refused = asyncio.run(ask())
    assert set(answers) == {Called("127.0.0.1", False)}
    assert refused == Called("", False)


def test_one_outsider_does_not_use_up_what_is_for_all():
    peers = [peer_of(subkey_of(f"{number}")) for number in range(200)]
    service = ReachabilityService(None)

    def is_called(peer, host: str) -> bool:
        return service.may_ask(peer) and service.may_call(host)

    assert [is_called(peers[0], "127.0.0.1") for _ in range(CALLS_OF_A_PEER + 1)][-2:] == [True, False]
    called = sum(is_called(peer, "203.0.113.5") for peer in peers)
    assert called == CALLS_OF_A_HOST, "the limit holds for any number of names"
    others = [is_called(peer_of(subkey_of(f"honest {host}")), f"198.51.100.{host}") for host in range(10)]
    assert all(others)
    called += sum(others) + CALLS_OF_A_PEER
    called += sum(is_called(peer, f"192.0.2.{number}") for number, peer in enumerate(peers[100:]))
    assert called == CALLS_PER_MINUTE


def test_two_outbound_only_peers_alone_are_told_what_is_missing(dht, address, tmp_path):
    """The only reachable process of the swarm is a DHT node that does not train."""
    assert publish_manifest(dht, RunManifest(PROTOCOL, "alone", replace(preset("digits"), total_steps=10**6)))
    with reaping() as programs:
        names = ("ada", "ben")
        options = ["--initial-peers", address, "--client-mode"]
        peers = [PeerProgram(tmp_path, "alone", name, *options, module=IMPATIENT) for name in names]
        programs += peers
        assert [peer.wait(START_SECONDS) for peer in peers] == [2, 2]
    for peer in peers:
        error = next(line for line in peer.output.splitlines() if line.startswith("error: "))
        # The one that leaves last may see no record any more.
        assert re.search("client-mode peers cannot average with each other|No record of any peer arrives", error), error
        assert "--port 31337" in error
        assert "Traceback" not in peer.output
        updates = summary_of(peer.folder)["updates"]  # some, if the other comes late
        assert (peer.folder.checkpoints / "last.ckpt").exists() == (updates > 0), (
            "without one it has no weights to keep"
        )
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
