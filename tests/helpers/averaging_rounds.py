"""Rounds on loopback, between processes or in one: what the peers of a test do, and what the test tells them."""

import math
from concurrent.futures import Future
from pathlib import Path

import torch
from hivemind.p2p import P2P
from hivemind.utils.crypto import RSAPrivateKey

from swarm.averaging.averager import SwarmAverager
from swarm.averaging.commands import RunRound
from swarm.averaging.compression.codec import Codec
from swarm.averaging.compression.fragments import Fragments
from swarm.averaging.rounds import AveragingOptions, Rounds, RoundSignals
from swarm.network.peer_service import PeerService
from swarm.network.signed_records import prepare_identity
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Member, RoundFailed, Ticket
from swarm.protocol.round_report import RoundReport
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.line_use import LineUse
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from tests.helpers.swarm_peers import Line, Peers, running_dht

NAMES = ("a", "b", "c")
NO_TARGET = BatchTarget(0)
PATIENCE_SECONDS, TIMEOUT_SECONDS = 10.0, 30.0


def contribution(name: str, size: int, step: int) -> tuple[torch.Tensor, int]:
    """Return what a peer brings to a round: a vector of widely spread numbers, and its weight."""
    generator = torch.Generator().manual_seed(1000 * NAMES.index(name) + step)
    scale = 10.0 ** torch.randint(-3, 2, (size,), generator=generator)
    return scale * torch.randn(size, generator=generator), int(torch.randint(1, 500, (), generator=generator))


def meet_everyone(line: Line, dht) -> list[Member]:
    """Introduce this peer to the test, and receive the list of all members."""
    line.put(Member(dht.peer_id, 0.0, dht.client_mode))
    return line.get()


def introduce(peers: Peers) -> None:
    members = [peers.message(name) for name in peers.peers]
    for peer in peers.peers.values():
        peer.tell(members)


def say_goodbye(line: Line, *averagers: SwarmAverager) -> None:
    """Close the averagers once no peer receives from them any more."""
    line.put("done")
    line.get()
    for averager in averagers:
        averager.shutdown()


def dismiss(peers: Peers) -> dict:
    """The other side of `say_goodbye`. Returns the results."""
    assert {peers.message(name) for name in peers.peers} == {"done"}
    for peer in peers.peers.values():
        peer.tell("go on")
    return peers.results()


def run_round(
    averager: SwarmAverager,
    members,
    vector: torch.Tensor,
    samples: int,
    step: int,
    lineage=bytes(LINEAGE_BYTES),
    patience_seconds: float = PATIENCE_SECONDS,
) -> RoundReport:
    averager.vector.copy_(vector)
    ticket = Ticket(step, samples, averager.client_mode, float(step), lineage)
    order = RunRound(ticket, members, NO_TARGET, patience_seconds=patience_seconds, timeout_seconds=TIMEOUT_SECONDS)
    return averager.run_round(order).result(TIMEOUT_SECONDS + 5)


def options_for(vector: torch.Tensor, namespace: str = "run", **others) -> AveragingOptions:
    """Return options to average such vectors; `others` are fields of `AveragingOptions`."""
    wire = torch.zeros_like(vector).share_memory_()
    return AveragingOptions(namespace, wire, Fragments.of([vector.numel()]), **others)


def averager_for(
    vector: torch.Tensor, dht, codec: str, timeouts: Timeouts = DEFAULT_TIMEOUTS, line: LineUse | None = None
) -> SwarmAverager:
    """Start an averager for such vectors. PowerSGD takes them for a matrix of 200 rows."""
    shapes = [(200, len(vector) // 200)] if codec == "powersgd" else []
    options = options_for(vector, codec=Codec(codec, 4), shapes=shapes, line=line or LineUse(), timeouts=timeouts)
    averager = SwarmAverager(dht, options, lambda: ({}, []))
    averager.start()
    return averager


def one_round(name, initial_peers, line, vector, samples, client_mode=False, codec="none", max_upload_mbps=math.inf):
    """Run a peer that takes part in one round with that vector. Returns (its vector then, report or error)."""
    with running_dht(initial_peers, line, client_mode=client_mode) as dht:
        averager = averager_for(vector, dht, codec, line=LineUse(max_upload_mbps))
        members = meet_everyone(line, dht)
        try:
            outcome = run_round(averager, members, vector, samples, 7)
        except RoundFailed as error:
            outcome = error
        say_goodbye(line, averager)
        return averager.vector.clone(), outcome


def run_one_round(contributions: dict, function=one_round) -> dict:
    with Peers(timeout_seconds=80) as peers:
        for name, arguments in contributions.items():
            peers.start(name, function, *arguments)
        introduce(peers)
        return dismiss(peers)


# ---- in one process -------------------------------------------------------------------------------------------------


async def nothing(*_) -> None:
    """What a peer does that keeps no averages for others, and shows none."""


async def network(identity: Path, *others: P2P) -> P2P:
    """A connection to the network, and to these others."""
    prepare_identity(identity)
    addresses = [address for other in others for address in await other.get_visible_maddrs()]
    return await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"], identity_path=str(identity), initial_peers=addresses)


async def rounds_on(p2p: P2P, options: AveragingOptions) -> Rounds:
    """The rounds of a peer that answers others."""
    rounds = Rounds(p2p, RSAPrivateKey(), options, RoundSignals())
    join, aggregate = rounds.rpc_join_group, rounds.groups.rpc_aggregate_part
    service = PeerService(options.namespace, join, aggregate, nothing, nothing, rounds.rpc_show_evidence)
    await service.answer(p2p)
    await rounds.detector.answer()
    return rounds


def order_for(members: list[P2P]) -> RunRound:
    """A member's order for a round of all these members."""
    return RunRound(
        Ticket(0, 8, False, 1.0, bytes(LINEAGE_BYTES)),
        [Member(p2p.peer_id, float(place), False) for place, p2p in enumerate(members)],
        NO_TARGET,
        patience_seconds=PATIENCE_SECONDS,
        timeout_seconds=TIMEOUT_SECONDS,
        future=Future(),
    )
