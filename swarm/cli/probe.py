"""Looking at a swarm from outside: who answers at an address, what is trained there, and by whom."""

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
    """A connection to a swarm that takes no part in it, and the run that is asked for; the connection ends with the
    block.

    Args:
        given: addresses of peers
        line: join line that they are from, if they are from one; it names the run, and its organiser
        run_id: else; None for the only run there
        also: addresses of more peers, whose word on the runs there counts no more than others'

    Raises:
        InputError: nobody answers, or the run is not known there
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
        round_trip_seconds: of one call
        clock_ahead_seconds: this machine's clock before the peer's, to half a round trip
    """

    address: str
    trouble: str | None
    round_trip_seconds: float = 0.0
    clock_ahead_seconds: float = 0.0


def probe(address: str) -> ProbeResult:
    """Connect to a peer under another identity and ask for the time; nobody takes notice."""
    return asyncio.run(_probe(address))


async def _probe(address: str) -> ProbeResult:
    try:
        p2p = await P2P.create(
            [address], dht_mode="client", no_listen=True, host_maddrs=None, startup_timeout=30, auto_nat=False
        )
    except P2PDaemonError:
        return ProbeResult(address, "no peer with this id answers")
    try:
        # DHTProtocol's own get_stub needs a node
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
        num_peers: who train now
        samples_per_second: of all of them
        updates_per_hour: at that pace
        bytes_per_update: that a server-mode peer sends, and about as many that it receives
        is_chosen: by the swarm while it trains (`--averaging auto`): these are the most, with which it begins
    """

    num_peers: int
    samples_per_second: float
    updates_per_hour: float
    bytes_per_update: int
    is_chosen: bool = False

    @property
    def gigabytes_per_hour(self) -> float:
        """Each way, in 10^9 bytes."""
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
    """From the run manifest and the progress records of those who train.

    The newcomer is taken for a server-mode peer, which is the more that is asked of it.
    """
    records = progress_records(dht, manifest).values()
    num_full = 1 + sum(not record.client_mode for record in records)
    rate = sum(record.rate for record in records)
    averaging = Averaging.of(manifest.recipe)
    payload = averaging.codec.payload_bytes(shapes)
    sent = vectors_sent(len(records) + 1, num_full) * payload
    updates_per_hour = 3600 * rate / manifest.recipe.target_batch_size
    return Traffic(len(records), rate, updates_per_hour, round(sent), averaging.auto)


def vectors_sent(num_peers: int, num_full: int) -> float:
    """Vectors that a server-mode peer sends, and receives, for one average; a client-mode one sends and receives one.

    Server-mode peers share the vector: each sends the shares of the others, and its own averaged share to every peer.
    Where all are in server mode, that is the 2 (N - 1) / N of a butterfly all-reduce (Patarasuk and Yuan 2009).
    """
    return (num_full - 1) / num_full + (num_peers - 1) / num_full
