"""The division of the numbers among the reducers, and the means of one share, whichever members are lost."""

import asyncio

import pytest
import torch
from hivemind.p2p import PeerID

from swarm.averaging.compression.codec import CODECS
from swarm.averaging.robust_mean import Combination
from swarm.averaging.shares import (
    BURST_BYTES,
    MAX_PART_BYTES,
    MAX_SHOWN_BYTES,
    PartReducer,
    part_size_bytes,
    partition,
    stripes_of,
)
from swarm.protocol.messages import ExchangeBroken, Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES

PEERS = [PeerID(bytes([number])) for number in range(7)]
A, B, C = PEERS[:3]
MEAN = Combination()


def group_of(size: int, line_kbps: int = 0) -> Group:
    """A group of members that can all be called and say the same of their lines."""
    ticket = Ticket(3, 8, False, 1.0, bytes(LINEAGE_BYTES), line_kbps=line_kbps)
    return Group(bytes(16), tuple(PEERS[:size]), (ticket,) * size)


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
@pytest.mark.parametrize("line_kbps", [0, 100_000])
@pytest.mark.parametrize(("size", "reducers", "stripes"), [(1, 1, 1), (5, 7, 1), (50_000, 3, 1), (3_000_017, 4, 2)])
def test_each_number_has_one_place_and_all_have_as_many(size, reducers, stripes, line_kbps, codec):
    vector = torch.arange(float(size))
    shares = partition(vector, group_of(reducers, line_kbps), stripes, CODECS[codec]())
    assert [*shares] == PEERS[:reducers]
    parts = [part for of_reducer in shares.values() for part in of_reducer]
    assert torch.equal(torch.cat([part.numbers for part in parts]), vector)
    assert all(torch.equal(vector[part.offset : part.offset + len(part.numbers)], part.numbers) for part in parts)
    assert all(part.numbers.data_ptr() == vector[part.offset :].data_ptr() for part in parts), "a copy takes memory"
    lengths = [sum(len(part.numbers) for part in of_reducer) for of_reducer in shares.values()]
    assert max(lengths) - min(lengths) <= 1
    ratio = {"none": 1.0, "fp16": 0.5, "int8": 0.26}[codec]
    assert all(ratio * part.numbers.nbytes <= (MAX_PART_BYTES if line_kbps else BURST_BYTES) for part in parts)


@pytest.mark.parametrize(("size", "num_buffers"), [(50_000, 100), (50_000, 30_000), (50_000, 0), (5, 5), (5, 1)])
@pytest.mark.parametrize("stripes", [1, 3])
def test_buffers_travel_in_parts_of_their_own(size, num_buffers, stripes):
    vector = torch.arange(float(size))
    found = {True: [torch.empty(0)], False: [torch.empty(0)]}
    for stretch in stripes_of(size, num_buffers, stripes):
        numbers = vector[stretch.begin : stretch.end]
        shares = partition(numbers, group_of(3), stripes, CODECS["none"](), False, stretch.num_buffers)
        for part in (part for of_reducer in shares.values() for part in of_reducer):
            assert torch.equal(numbers[part.offset : part.offset + len(part.numbers)], part.numbers)
            found[part.is_of_buffers].append(part.numbers)
    assert torch.equal(torch.cat(found[False]), vector[: size - num_buffers])
    assert torch.equal(torch.cat(found[True]), vector[size - num_buffers :])


def test_parts_are_as_large_as_the_slowest_line_allows():
    large, reducers, stripes, members = 10**9, 5, 2, 5
    streams = stripes * (reducers - 1)
    unknown, slow, usual, fast, fastest = (
        part_size_bytes(large, reducers, stripes, members, line_kbps) for line_kbps in (0, 1, 10_000, 20_000, 10**6)
    )
    assert unknown == slow == usual == BURST_BYTES // streams, "no peer makes parts small with a line that it invents"
    assert fast == 2 * usual
    assert fastest == MAX_PART_BYTES


def test_parts_that_many_members_gave_can_be_shown():
    members = 200
    size = part_size_bytes(10**9, 9, 1, members, 10**6)
    assert size == BURST_BYTES // 8, "no smaller than over slow lines"
    assert members // 4 * part_size_bytes(10**9, 9, 1, members // 4, 10**6) <= MAX_SHOWN_BYTES


def test_averages_of_a_share_come_back_while_later_parts_are_on_their_way():
    for stripes, parts in ((1, 4), (2, 2), (8, 2)):
        shares = partition(torch.zeros(100_000), group_of(2, 10**6), stripes, CODECS["none"]())
        assert [len(of_reducer) for of_reducer in shares.values()] == [parts, parts]


async def mean_of(reducer: PartReducer, gifts: dict[PeerID, tuple[float, float]]) -> list[torch.Tensor]:
    """The means that the members get. Each member gives one value in all places, with one weight."""
    gives = [reducer.mean_with(peer, torch.full((4,), value), weight) for peer, (value, weight) in gifts.items()]
    return await asyncio.gather(*gives)


def test_means_are_weighted_and_come_part_after_part():
    async def test():
        reducer = PartReducer([MEAN, MEAN], [A, B])
        for value in (1.0, 2.0):
            assert reducer.awaited_from(A) == reducer.awaited_from(B) == value - 1
            one, other = await mean_of(reducer, {A: (value, 10), B: (5 * value, 30)})
            assert one is other
            assert one.unique().tolist() == [4 * value]
        assert reducer.is_finished
        assert reducer.awaited_from(A) is None

    asyncio.run(test())


def test_a_lost_member_is_not_waited_for_and_what_it_gave_counts():
    async def test():
        reducer = PartReducer([MEAN, MEAN], [A, B, C])
        giving = asyncio.ensure_future(mean_of(reducer, {A: (1.0, 10), B: (4.0, 10)}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (reducer.awaited_from(A), reducer.awaited_from(C)) == (None, 0)
        reducer.lose(B)
        assert not giving.done()
        reducer.lose(C)
        assert [mean.unique().tolist() for mean in await giving] == [[2.5], [2.5]]
        assert [mean.unique().tolist() for mean in await mean_of(reducer, {A: (3.0, 10)})] == [[3.0]]
        for peer in (B, C):
            with pytest.raises(ExchangeBroken):
                await reducer.mean_with(peer, torch.ones(4), 1.0)

    asyncio.run(test())


def test_a_member_that_gives_a_part_twice_is_refused_and_its_part_counts_once():
    async def test():
        reducer = PartReducer([MEAN], [A, B])
        first = asyncio.ensure_future(reducer.mean_with(A, torch.ones(2), 10))
        await asyncio.sleep(0)
        with pytest.raises(ExchangeBroken):
            await reducer.mean_with(A, torch.full((2,), 100.0), 10)
        await reducer.mean_with(B, torch.full((2,), 3.0), 10)
        assert (await first).tolist() == [2.0, 2.0]

    asyncio.run(test())


def test_a_member_that_hangs_up_takes_the_mean_from_no_other_and_closing_ends_all_waits():
    async def test():
        reducer = PartReducer([MEAN, MEAN], [A, B])
        hanging_up = asyncio.ensure_future(reducer.mean_with(A, torch.ones(2), 10))
        await asyncio.sleep(0)
        hanging_up.cancel()
        assert (await reducer.mean_with(B, torch.full((2,), 3.0), 10)).tolist() == [2.0, 2.0]
        waiting = asyncio.ensure_future(reducer.mean_with(B, torch.ones(2), 10))
        await asyncio.sleep(0)
        reducer.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(ExchangeBroken):
            await reducer.mean_with(A, torch.ones(2), 10)

    asyncio.run(test())


def test_there_is_no_mean_of_members_that_have_computed_nothing():
    async def test():
        reducer = PartReducer([MEAN], [A, B])
        listening = asyncio.ensure_future(reducer.mean_with(A, torch.zeros(2), 0))
        await asyncio.sleep(0)
        reducer.lose(B)
        with pytest.raises(asyncio.CancelledError):
            await listening

    asyncio.run(test())


@pytest.mark.parametrize("rule", [MEAN, Combination(clips=True), Combination(clips=True, local_steps=4)])
def test_a_helper_that_reduces_changes_no_bit_of_the_mean(rule):
    """One of the three members is a liar, so there is something to clip, and their median is not the median of four."""
    generator = torch.Generator().manual_seed(0)
    gifts = {peer: torch.randn(50, generator=generator) * scale for peer, scale in ((A, 1), (B, 1), (C, 100))}

    async def mean(*helpers: PeerID) -> torch.Tensor:
        reducer = PartReducer([rule], [*helpers, *gifts])
        giving = [reducer.mean_with(peer, torch.zeros(50), 0.0) for peer in helpers]
        giving += [reducer.mean_with(peer, part, weight) for weight, (peer, part) in enumerate(gifts.items(), 8)]
        return (await asyncio.gather(*giving))[0]

    assert torch.equal(asyncio.run(mean()), asyncio.run(mean(PEERS[3])))


def test_the_mean_depends_on_the_order_of_members_and_not_on_the_order_of_arrival():
    parts = {
        peer: torch.randn(1000, generator=torch.Generator().manual_seed(number)) for number, peer in enumerate(PEERS)
    }

    async def mean(arrivals) -> torch.Tensor:
        reducer = PartReducer([MEAN], PEERS)
        found = await asyncio.gather(*(reducer.mean_with(peer, parts[peer], 3.0) for peer in arrivals))
        return found[0]

    one, other = asyncio.run(mean(PEERS)), asyncio.run(mean(PEERS[::-1]))
    assert torch.equal(one, other)
    total = sum(parts[peer].double() for peer in PEERS) / len(PEERS)
    torch.testing.assert_close(one.double(), total, rtol=0, atol=1e-6)


def test_a_reducer_counts_the_parts_in_which_a_member_was_far_from_the_others():
    async def test():
        reducer = PartReducer([Combination(clips=True)] * 3, [A, B, C])
        for far in (100.0, 1.0, 100.0):
            gifts = {A: (0.9, 10), B: (1.1, 10), C: (far, 10)}
            means = await mean_of(reducer, gifts)
            assert 0.9 <= means[0][0] <= 1.3
        assert (reducer.parts_combined, reducer.outside) == (3, {C: 2})

    asyncio.run(test())


def test_an_error_in_a_rule_reaches_all_members_that_wait():
    class Broken(Combination):
        def combine(self, parts, weights, samples=()):
            raise RuntimeError("no memory")

    async def test():
        reducer = PartReducer([Broken()], [A, B])
        found = await asyncio.gather(
            *(reducer.mean_with(peer, torch.ones(2), 1.0) for peer in (A, B)), return_exceptions=True
        )
        assert [str(error) for error in found] == ["no memory"] * 2
        assert reducer.is_finished

    asyncio.run(test())
