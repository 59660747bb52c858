"""Looking at a swarm from outside: whether a peer answers at an address, what is trained there, and what that costs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import hivemind
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time

from swarm.enrolment.join_line import JoinLine
from swarm.membership.progress_store import progress_records
from swarm.membership.run_manifest import RunManifest, choose_manifest, read_manifests
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht
from swarm.network.dht_process import SwarmDHT
from swarm.network.known_peers import peer_of_address
from swarm.training.averaging_mode import Averaging

ANSWER_SECONDS = 5.0


@contextlib.contextmanager
def looking_at(
    given: Sequence[str], line: JoinLine | None, run_id: str | None, also: Sequence[str] = ()
) -> Iterator[tuple[SwarmDHT, RunManifest]]:
    """A connection to a swarm without taking part in it, and the run that is meant, until the block ends.

    Args:
        given: addresses of peers
        line: the join line that the addresses are from, or None; it names the run and its organiser
        run_id: name of the run where there is no join line; None for the only run there
        also: addresses of more peers to connect to; unlike those in `given`, they are not trusted where peers disagree
            on what the run is

    Raises:
        InputError: no peer answers, or the run is not known there
    """
    run_id, organiser = (run_id, b"") if line is None else (line.run_id, line.organiser)
    dht = start_dht(NetworkOptions(initial_peers=(*given, *also), client_mode=True))
    try:
        yield dht, choose_manifest(read_manifests(dht, given, run_id, organiser), run_id, organiser)
    finally:
        stop_dht(dht)


@dataclass(frozen=True)
class ProbeResult:
    """What happened at one address.

    Args:
        address: multiaddress
        trouble: why there was no answer, or None
        round_trip_seconds: time that one call took
        clock_ahead_seconds: how far this machine's clock is ahead of the peer's, to within half a round trip
    """

    address: str
    trouble: str | None
    round_trip_seconds: float = 0.0
    clock_ahead_seconds: float = 0.0


def probe(address: str) -> ProbeResult:
    """Connect to a peer with a new identity and ask it for the time, without becoming part of the DHT."""
    return asyncio.run(_probe(address))


async def _probe(address: str) -> ProbeResult:
    try:
        p2p = await P2P.create(
            [address], dht_mode="client", no_listen=True, host_maddrs=None, startup_timeout=30, auto_nat=False
        )
    except P2PDaemonError:
        return ProbeResult(address, "no peer with this id answers")
    try:
        # DHTProtocol's own get_stub needs a DHT node, which is not there: take that of its base class
        stub = super(DHTProtocol, DHTProtocol).get_stub(p2p, PeerID.from_base58(peer_of_address(address)))
        asked, began = get_dht_time(), time.perf_counter()
        answer = await stub.rpc_ping(dht_pb2.PingRequest(), timeout=ANSWER_SECONDS)
        seconds = time.perf_counter() - began
        return ProbeResult(address, None, seconds, asked + seconds / 2 - answer.dht_time)
    except (TimeoutError, P2PDaemonError, P2PHandlerError):
        return ProbeResult(address, "it is no peer of a Hivemind swarm, or too busy to answer")
    finally:
        await p2p.shutdown()


@dataclass(frozen=True)
class Traffic:
    """What taking part in a run costs.

    Args:
        num_peers: peers that train now
        samples_per_second: of all these peers together
        updates_per_hour: at that pace
        bytes_per_update: bytes that a server-mode peer sends for an update; it receives about as many
        is_chosen: the swarm chooses codec and local steps while it trains (`--averaging auto`); the numbers are for its
            first choice, which takes the most bytes
    """

    num_peers: int
    samples_per_second: float
    updates_per_hour: float
    bytes_per_update: int
    is_chosen: bool = False

    @property
    def gigabytes_per_hour(self) -> float:
        """Traffic in each direction, in 10^9 bytes per hour."""
        return self.updates_per_hour * self.bytes_per_update / 1e9

    def __str__(self) -> str:
        return self._now + "; that is at the start, and less where lines are slow" * self.is_chosen

    @property
    def _now(self) -> str:
        if not self.updates_per_hour:
            return f"{self.bytes_per_update / 1e6:,.1f} MB each way per update; updates an hour: not known yet"
        return (
            f"up to {self.gigabytes_per_hour:,.2f} GB an hour each way "
            f"({self.bytes_per_update / 1e6:,.1f} MB per update, "
            f"{self.updates_per_hour:,.0f} updates an hour by {self.num_peers} peer{'s' * (self.num_peers != 1)} now)"
        )


def expected_traffic(dht: hivemind.DHT, manifest: RunManifest, shapes: Sequence[Sequence[int]]) -> Traffic:
    """What taking part would cost one more peer, by the run manifest and the peers' progress records.

    The newcomer is taken for a server-mode peer, which sends and receives more than a client-mode one.

    Args:
        shapes: of the trained parameters

    Raises:
        TimeoutError: the swarm does not list its peers in time
    """
    records = progress_records(dht, manifest).values()
    num_full = 1 + sum(not record.client_mode for record in records)
    rate = sum(record.rate for record in records)
    averaging = Averaging.of(manifest.recipe)
    fragments = averaging.local_steps.fragments if averaging.local_steps is not None else 1
    payload = averaging.codec.payload_bytes(shapes) / fragments  # an update averages one of them
    sent = vectors_sent(len(records) + 1, num_full) * payload
    updates_per_hour = 3600 * rate / manifest.recipe.target_batch_size
    return Traffic(len(records), rate, updates_per_hour, round(sent), averaging.auto)


def vectors_sent(num_peers: int, num_full: int) -> float:
    """Vectors that a server-mode peer sends, and receives, for one average; a client-mode peer sends and receives one.

    Server-mode peers divide the vector into shares. Each sends the other shares to their reducers, and its own averaged
    share to every peer. Where all peers are in server mode, that is the 2 (N - 1) / N of a butterfly all-reduce
    (Patarasuk and Yuan 2009).

    Args:
        num_peers: all peers
        num_full: server-mode peers among them
    """
    return (num_full - 1) / num_full + (num_peers - 1) / num_full
