"""In a swarm of short steps a leader holds its group open for a joiner right behind it. Strangers cannot abuse this."""

import asyncio
import time
from collections.abc import Collection
from functools import partial
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from swarm.averaging.meeting import matchmaking
from swarm.averaging.meeting.joiner_grace import MAX_HOLDS, WITHIN_SECONDS
from swarm.averaging.meeting.lobby import MAX_PURSUERS
from swarm.averaging.meeting.matchmaking import STRANGER_SECONDS, STRANGER_SHARE, Matchmaking
from swarm.averaging.meeting.matchmaking_messages import to_knock
from swarm.membership.backoff import Backoff
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import MAX_GROUP_SIZE, Group, Member, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from swarm.runtime.token_bucket import TokenBucket
from tests.helpers.virtual_time import run_in_virtual_time

ME, FRIEND, JOINER, *STRANGERS = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(3 + 2 * MAX_PURSUERS)]
PATIENCE_SECONDS, COMPUTE_SECONDS = 1.0, 0.5
HOLD_SECONDS = DEFAULT_TIMEOUTS.hold_seconds


def ticket(step: int, samples: int = 64) -> Ticket:
    """The ticket of a peer with the weights that the swarm has at this step."""
    return Ticket(step, samples, False, 1.0, step.to_bytes(LINEAGE_BYTES, "big"))


def stranger(number: int) -> PeerID:
    """One of as many names as there are numbers."""
    return PeerID(bytes([18, 32]) + number.to_bytes(32, "big"))


@pytest.fixture(autouse=True)
def patience_in_virtual_time(monkeypatch):
    monkeypatch.setattr(matchmaking, "TokenBucket", partial(TokenBucket, clock=lambda: time.monotonic()))


class Leader:
    """A leader that has the target's samples by itself, and expects no peer.

    Args:
        known: peers that have averaged with the leader; all others are strangers
        usual_seconds: usual seconds of an exchange
    """

    def __init__(self, known: Collection[PeerID] = (JOINER, FRIEND), usual_seconds: float = 0.0):
        self.lost: set[PeerID] = set()
        detector = SimpleNamespace(usual_seconds=usual_seconds, doubts=lambda peer: False, lost=self._lost)
        self.meeting = Matchmaking(SimpleNamespace(peer_id=ME), "run", b"", BatchTarget(64), detector, Backoff())
        self.meeting.met(known)

    async def _lost(self, peer: PeerID, can_be_called: bool) -> None:
        while peer not in self.lost:
            await asyncio.sleep(0.1)

    async def lead(self, step: int) -> tuple[Group, float]:
        """Lead the group of this step. Return the group, and how long it was held open."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        group = await self.meeting.meet(ticket(step), [Member(ME, 0.0, False)], PATIENCE_SECONDS, began + 1000)
        return group, loop.time() - began

    async def knock(self, peer: PeerID, step: int) -> int:
        """The first answer to a peer that asks to join this step and does not wait there."""
        guest = self.come(peer, step)
        code = (await anext(guest)).code
        await guest.aclose()
        return code

    def come(self, peer: PeerID, step: int):
        """The stream of answers to a peer that asks to join this step."""
        request = averaging_pb2.JoinRequest(schema_hash=b"", gather=to_knock(ticket(step).to_bytes()))
        return self.meeting.lobby.serve(request, SimpleNamespace(remote_id=peer))


@pytest.mark.parametrize("lacks", [1, 2], ids=["the average that is being made", "one more"])
def test_a_group_is_held_open_for_a_joiner_that_is_right_behind(lacks, monkeypatch):
    """Each step is over before the joiner has caught up with the one before.

    Without the hold it would never be in a group.
    """

    async def steps() -> None:
        leader = Leader()
        await leader.lead(4)
        assert await leader.knock(JOINER, 5 - lacks) == averaging_pb2.CANCELLED, "it is told that it is too late"
        leading = asyncio.ensure_future(leader.lead(5))
        await asyncio.sleep(0.5 * HOLD_SECONDS)  # the joiner takes over what it has missed
        assert not leading.done()
        guest = leader.come(JOINER, 5)
        assert (await anext(guest)).code == averaging_pb2.ACCEPTED
        group, seconds = await leading
        assert set(group.peer_ids) == {ME, JOINER}
        assert seconds == pytest.approx(0.5 * HOLD_SECONDS, abs=0.1), "and no longer"
        await guest.aclose()

    run_in_virtual_time(steps, monkeypatch)


@pytest.mark.parametrize("usual_seconds", [0.0, 60.0])
def test_a_group_is_held_open_for_some_seconds_or_a_share_of_an_exchange(usual_seconds, monkeypatch):
    async def steps() -> None:
        leader = Leader(usual_seconds=usual_seconds)
        await leader.lead(4)
        await leader.knock(JOINER, 4)
        group, seconds = await leader.lead(5)
        assert group.peer_ids == (ME,)
        assert seconds == pytest.approx(max(HOLD_SECONDS, 0.3 * usual_seconds), abs=0.1)
        assert (await leader.lead(6))[1] == 0.0, "once, for one knock"

    run_in_virtual_time(steps, monkeypatch)


def test_a_group_is_not_held_open_for_a_joiner_that_has_gone(monkeypatch):
    async def steps() -> None:
        leader = Leader()
        await leader.lead(4)
        await leader.knock(JOINER, 4)
        leader.lost.add(JOINER)
        assert (await leader.lead(5))[1] < 0.5

    run_in_virtual_time(steps, monkeypatch)


def test_some_of_many_late_peers_are_waited_for(monkeypatch):
    """Names cost nothing, and the leader would have to watch each of them."""

    async def steps() -> None:
        leader, lobby = (leader := Leader()), leader.meeting.lobby
        await leader.lead(4)
        for stranger in STRANGERS:
            await leader.knock(stranger, 4)
        lobby.set_step(5, ticket(5).lineage)
        assert lobby.grace.awaited(()) == set(STRANGERS[:MAX_PURSUERS])

    run_in_virtual_time(steps, monkeypatch)


def test_strangers_that_come_too_late_take_no_place_of_a_known_peer(monkeypatch):
    async def steps() -> None:
        leader, lobby = (leader := Leader()), leader.meeting.lobby
        await leader.lead(4)
        for stranger in STRANGERS:
            await leader.knock(stranger, 4)
        await leader.knock(JOINER, 4)
        lobby.set_step(5, ticket(5).lineage)
        assert lobby.grace.awaited(()) == {*STRANGERS[:MAX_PURSUERS], JOINER}

    run_in_virtual_time(steps, monkeypatch)


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_strangers_that_use_up_all_holds_take_none_of_a_known_peer(behind, monkeypatch):
    """Names cost nothing: each of more than a thousand comes once, an update behind."""

    async def steps() -> None:
        leader, lobby = (leader := Leader()), leader.meeting.lobby
        await leader.lead(6)
        for number in range(MAX_GROUP_SIZE + 1):
            last = stranger(number)
            await leader.knock(last, 5)
        await leader.knock(JOINER, 6 - behind)
        lobby.set_step(7, ticket(7).lineage)
        awaited = lobby.grace.awaited(())
        assert JOINER in awaited
        assert last not in awaited, "strangers have a limit of their own"

    run_in_virtual_time(steps, monkeypatch)


@pytest.mark.parametrize("behind", [0, 1], ids=["as a pursuer", "as one who is behind"])
def test_a_member_that_comes_too_late_again_and_again_is_waited_for_a_few_times(behind, monkeypatch):
    async def steps() -> None:
        leader, held, step, began = Leader(), [], 4, asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < WITHIN_SECONDS - 2 * HOLD_SECONDS:
            _, seconds = await leader.lead(step)
            held += [seconds] if seconds else []
            await leader.knock(JOINER, step - behind)
            await asyncio.sleep(COMPUTE_SECONDS)
            step += 1
        each = HOLD_SECONDS - behind * COMPUTE_SECONDS  # a pursuer has what it lacks when the step is over
        assert held == pytest.approx([each] * MAX_HOLDS, abs=0.1)
        assert step > 50, "the swarm goes on"

    run_in_virtual_time(steps, monkeypatch)


def test_strangers_hold_a_swarm_up_for_a_small_share_of_its_time(monkeypatch):
    """Each stranger has a new name, so the leader has waited for none of them before."""

    async def steps() -> None:
        leader, step, held_seconds, loop = Leader(known=[FRIEND]), 4, 0.0, asyncio.get_running_loop()
        began = loop.time()
        for number in range(600):
            held_seconds += (await leader.lead(step))[1]
            await leader.knock(stranger(number), step)
            await asyncio.sleep(COMPUTE_SECONDS)
            step += 1
        allowed_seconds = STRANGER_SECONDS + STRANGER_SHARE * (loop.time() - began)
        assert 0.5 * allowed_seconds < held_seconds < 1.1 * allowed_seconds

    run_in_virtual_time(steps, monkeypatch, seconds=2000)
