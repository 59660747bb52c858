"""A round that is given up when the vector already holds its average has not failed."""

import asyncio
from concurrent.futures import Future
from pathlib import Path

import torch
from hivemind.p2p import P2P

from swarm.averaging.rounds import Rounds
from tests.helpers.averaging_rounds import network, nothing, options_for, order_for, rounds_on


async def peer_on(p2p: P2P, value: float) -> tuple[Rounds, torch.Tensor]:
    """A peer that answers others, and its vector."""
    options = options_for(torch.zeros(1000))
    options.vector.fill_(value)
    return await rounds_on(p2p, options), options.vector


async def average_and_give_up(folder: Path) -> tuple[Future, torch.Tensor]:
    """Two peers average, and one of them gives the round up while it keeps the average."""
    here = await network(folder / "here")
    there = await network(folder / "there", here)
    try:
        peers = [await peer_on(p2p, value) for p2p, value in ((here, 1.0), (there, 3.0))]
        (first, vector), (second, _) = peers
        orders = [order_for([here, there]) for _ in peers]

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
