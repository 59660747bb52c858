"""A peer that answers is waited for, however long it takes; a peer that does not is dropped."""

import asyncio
from dataclasses import replace

import pytest
import torch
from hivemind.p2p import P2P

from swarm.membership import failure_detector as detector
from swarm.protocol.messages import Behind, RoundFailed
from swarm.runtime import fault_injection as faults
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from tests.helpers.averaging_rounds import averager_for, introduce, meet_everyone, run_round, say_goodbye
from tests.helpers.swarm_peers import Peers, running_dht

pytestmark = pytest.mark.timeout(120)
SIZE = 200_000
FROZEN_STEP = 3
IN_A_HURRY = replace(DEFAULT_TIMEOUTS, look_seconds=0.05, first_silence_seconds=3.0)


class FailureDetector(detector.FailureDetector):
    """Receives the question and never answers, as a frozen process does."""

    async def answer(self) -> None:
        self.rpc_here = lambda request, context: asyncio.Event().wait()
        await super().answer()


async def two(answering: type, timeouts: Timeouts = IN_A_HURRY) -> tuple[detector.FailureDetector, P2P, P2P]:
    """Return a detector of one peer, and the network of both; the other peer answers as the given class does."""
    here = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    there = await P2P.create(
        host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=await here.get_visible_maddrs(), dht_mode="server"
    )
    await answering(there, "run").answer()
    return detector.FailureDetector(here, "run", timeouts), here, there


async def watch(answering: type, happens, timeouts: Timeouts = IN_A_HURRY) -> None:
    asking, here, there = await two(answering, timeouts)
    lost = asyncio.create_task(asking.lost(there.peer_id, can_be_called=True))
    try:
        await happens(asking, lost, there)
        await asyncio.wait_for(lost, 30)
    finally:
        await here.shutdown()
        await there.shutdown()


def test_a_peer_that_answers_is_kept_and_a_killed_one_is_lost():
    async def killed(_, lost, there):
        await asyncio.wait([lost], timeout=2)
        assert not lost.done(), "it has answered for two seconds"
        there._child.kill()  # its p2pd

    asyncio.run(watch(detector.FailureDetector, killed))


def test_a_peer_that_does_not_answer_is_kept_as_long_as_it_sends():
    timeouts = replace(IN_A_HURRY, doubt_seconds=0.5, silence_seconds=3.0, first_silence_seconds=3.0)

    async def sends(asking, lost, there):
        for _ in range(80):
            asking.heard(there.peer_id)
            await asyncio.sleep(0.05)
        assert not lost.done(), "longer than its patience"

    asyncio.run(watch(FailureDetector, sends, timeouts))


def test_a_client_mode_peer_is_not_lost_for_want_of_answers():
    async def main():
        asking, here, there = await two(detector.FailureDetector)
        await there.shutdown()
        lost = asyncio.create_task(asking.lost(there.peer_id, can_be_called=False))
        await asyncio.wait([lost], timeout=2)
        assert not lost.done()
        lost.cancel()
        await here.shutdown()

    asyncio.run(main())


def test_patience_is_learnt():
    asking = detector.FailureDetector(None, "run")
    assert asking.patience_seconds == DEFAULT_TIMEOUTS.first_silence_seconds
    asking.exchange_took(1.0, [])
    assert asking.patience_seconds == DEFAULT_TIMEOUTS.silence_seconds
    for seconds in (4.0, 4.0, 100.0):
        asking.exchange_took(seconds, [])
    assert asking.patience_seconds == 8.0


def rounds(name, initial_peers, line, fault, client_mode):
    """Run rounds until two meet without the third. Returns ([(the vector's values, how many met), ...], lost, c)."""
    with running_dht(initial_peers, line, client_mode=client_mode) as dht:
        vector = torch.full((SIZE,), float(ord(name)))
        faults.plan(fault)
        averager = averager_for(vector, dht, "none")
        averager.set_step(0)
        members = meet_everyone(line, dht)
        seen, lost, num_met = [], set(), 3
        while num_met == 3 or len(seen) <= FROZEN_STEP:
            try:
                report = run_round(averager, members, vector, 1, len(seen))
                num_met = len(report.group.peer_ids)
                lost |= report.lost
            except RoundFailed as error:
                lost |= error.lost
            except Behind as error:  # on a busy machine the others have dropped this peer too early
                seen += [(set(), 2)] * (error.args[0] - len(seen))
                continue
            seen.append((set(averager.vector.tolist()), num_met))
        say_goodbye(line, averager)
        return seen, lost, members[2].peer_id


def two_rounds(name, initial_peers, line, fault):
    """Run two rounds of peers whose seniority is in the order of their names. Returns the seconds of each meeting."""
    with running_dht(initial_peers, line) as dht:
        faults.plan(fault)
        vector = torch.zeros(SIZE)
        averager = averager_for(vector, dht, "none")
        averager.set_step(0)
        members = [replace(member, since=float(place)) for place, member in enumerate(meet_everyone(line, dht))]
        reports = [run_round(averager, members, vector, 1, step) for step in range(2)]
        line.put([len(report.group.peer_ids) for report in reports])
        line.get()
        averager.shutdown()
        return [report.meeting_seconds for report in reports]


def test_two_silent_seniors_are_dropped():
    """Both are dropped together, as `test_silent_seniors.py` shows in virtual time."""
    with Peers(timeout_seconds=90) as peers:
        for name in "abc":
            peers.start(name, two_rounds, "" if name == "c" else "freeze meeting 1")
        introduce(peers)
        peers["a"].killed = peers["b"].killed = True  # as good as killed: they send nothing more
        assert peers.message("c") == [3, 1]
        peers["c"].tell("go on")
        _, seconds = peers.results()["c"]
    assert seconds >= DEFAULT_TIMEOUTS.silence_seconds


@pytest.mark.parametrize("client_mode", [True, False], ids=["a sender", "a reducer"])
def test_a_peer_that_freezes_in_an_exchange_is_dropped(client_mode):
    """Without a pulse no peer would be lost: a round would only lack the parts of one.

    The first of the two that drops it sends the other one what that one waits for, so not both need to lose it.
    """
    with Peers(timeout_seconds=90) as peers:
        for name in "abc":
            fault = f"freeze exchanging {FROZEN_STEP}" if name == "c" else ""
            peers.start(name, rounds, fault, client_mode and name == "c")
        introduce(peers)
        assert [peers.message(name) for name in "ab"] == ["done", "done"]
        peers["c"].killed = True  # as good as killed: it sends nothing more
        for name in "ab":
            peers[name].tell("go on")
        found = peers.results()
    (a, a_lost, frozen), (b, b_lost, _) = found["a"], found["b"]
    assert a_lost | b_lost == {frozen}
    assert len(a) == len(b)
    assert a[-1] == b[-1] == ({97.5}, 2)
    for (here, _), (there, _) in zip(a, b, strict=True):
        if client_mode:
            assert here == there
            assert here <= {97.5, 98.0}  # with and without what it had sent
        else:
            assert here in ({97.5}, {98.0}, {97.0}), "nothing is lost by it"
            assert there in ({97.5}, {98.0}), "nothing is lost by it"
