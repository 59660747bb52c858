"""A round that is given up when the vector already holds its average has not failed."""

import asyncio
from concurrent.futures import Future
from pathlib import Path

import torch
from hivemind.p2p import P2P
from hivemind.utils.crypto import RSAPrivateKey

from swarm.averaging.commands import RunRound
from swarm.averaging.rounds import Rounds, RoundSignals
from swarm.network.peer_service import PeerService
from swarm.network.signed_records import prepare_identity
from swarm.protocol.messages import Member, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from tests.helpers.averaging_rounds import NO_TARGET, PATIENCE_SECONDS, TIMEOUT_SECONDS, options_for

NAMESPACE = "run"


async def nothing(*_) -> None:
    """What a peer does that keeps no averages for others, and shows none."""


async def peer_on(p2p: P2P, value: float) -> tuple[Rounds, torch.Tensor]:
    """A peer that answers others, and its vector."""
    options = options_for(torch.zeros(1000), NAMESPACE)
    options.vector.fill_(value)
    rounds = Rounds(p2p, RSAPrivateKey(), options, RoundSignals())
    join, aggregate = rounds.rpc_join_group, rounds.groups.rpc_aggregate_part
    await PeerService(NAMESPACE, join, aggregate, nothing, nothing, rounds.rpc_show_evidence).answer(p2p)
    await rounds.detector.answer()
    return rounds, options.vector


async def network(identity: Path, *others: P2P) -> P2P:
    """A connection to the network, and to these others."""
    prepare_identity(identity)
    addresses = [address for other in others for address in await other.get_visible_maddrs()]
    return await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"], identity_path=str(identity), initial_peers=addresses)


async def average_and_give_up(folder: Path) -> tuple[Future, torch.Tensor]:
    """Two peers average, and one of them gives the round up while it keeps the average."""
    here = await network(folder / "here")
    there = await network(folder / "there", here)
    try:
        peers = [await peer_on(p2p, value) for p2p, value in ((here, 1.0), (there, 3.0))]
        (first, vector), (second, _) = peers
        members = [Member(p2p.peer_id, float(place), False) for place, p2p in enumerate((here, there))]
        orders = [
            RunRound(
                Ticket(0, 8, False, 1.0, bytes(LINEAGE_BYTES)),
                members,
                NO_TARGET,
                patience_seconds=PATIENCE_SECONDS,
                timeout_seconds=TIMEOUT_SECONDS,
                future=Future(),
            )
            for _ in peers
        ]

        async def keep(*_) -> None:
            first.cancel()
            await asyncio.sleep(0)

        await asyncio.gather(first.run(orders[0], keep), second.run(orders[1], nothing))
        return orders[0].future, vector
    finally:
        await there.shutdown()
        await here.shutdown()


def test_a_round_that_is_given_up_while_its_average_is_kept_has_not_failed(tmp_path):
    future, vector = asyncio.run(asyncio.wait_for(average_and_give_up(tmp_path), 60))
    assert torch.equal(vector, torch.full_like(vector, 2.0))
    assert len(future.result(timeout=0).group.peer_ids) == 2
