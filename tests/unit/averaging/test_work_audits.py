"""Members compute each other's work again, by lot; only the computing and the network are left out."""

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hivemind.p2p import PeerID

from swarm.averaging.audit import work_audits as module
from swarm.averaging.audit.proofs import short_name
from swarm.averaging.audit.work_audits import (
    HINTED_AUDITS,
    MAX_HINTS,
    MAX_REFUSALS,
    SUSPECT_AUDITS,
    WorkAudits,
)
from swarm.protocol.messages import Blame, Group, Ticket
from swarm.protocol.wire import MAX_SAMPLES, to_wire
from swarm.protocol.work import (
    MAX_LINES,
    MAX_POSITION,
    NUM_PLACES,
    Assignment,
    Line,
    OwnWork,
    WorkList,
    WorkVerdict,
    name_of,
    shortened,
)
from swarm.training.audit.lot import chance_of_an_audit

LIAR, *HONEST = PEERS = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(5)]
MICRO_BATCHES, SAMPLES = 8, 16


def true_numbers(peer: PeerID, position: int) -> tuple[float, ...]:
    """The numbers that come out if this micro-batch is computed."""
    return tuple(float(hash((peer.to_bytes(), position, place)) % 1000) for place in range(NUM_PLACES))


def work_of(peer: PeerID, step: int, computes=lambda number: True, samples: int = SAMPLES) -> WorkList:
    """The list of a member for one update. Where the member does not compute, it makes the numbers up."""
    positions = range(step * MICRO_BATCHES * samples, (step + 1) * MICRO_BATCHES * samples, samples)
    made_up = (1.0,) * NUM_PLACES
    return WorkList(
        "",
        [
            Line(position, samples, true_numbers(peer, position) if computes(number) else made_up)
            for number, position in enumerate(positions)
        ],
    )


@dataclass
class Member:
    """One member: what its trainer has found, and the peers that its averaging process leaves out."""

    audits: WorkAudits
    verdict: WorkVerdict | None = None
    computed: int = 0
    left_out: dict[PeerID, tuple[Blame, int]] | None = None


class Members:
    """All members of one group. They ask each other directly.

    Args:
        chance: chance with which each member looks at another one
        computes: whether the liar computes the micro-batch of this number
        largest: most samples of a micro-batch in this run
    """

    def __init__(
        self, chance: float | None = None, computes=lambda number: number % 2 == 0, largest: int = MAX_SAMPLES
    ):
        self.step, self.deaf, self.computes = 0, set(), computes
        self.chance = chance_of_an_audit(MICRO_BATCHES) if chance is None else chance
        self.chances: dict[PeerID, float] = {}
        """Chances of the members that look more often or less."""
        self.members = {
            peer: Member(WorkAudits(peer, lambda other, request, most, me=peer: self.ask(me, other, request), largest))
            for peer in PEERS
        }
        self.claims: dict[PeerID, str] = {}
        """The peer that a member says that it doubts, whatever it has found."""
        self.shown: dict[PeerID, bytes] = {}
        """What a member shows in place of its list."""
        self.silent: set[PeerID] = set()
        """Members that name no list."""
        self.gives_nothing: set[PeerID] = set()
        self.has_slices, self.has_earlier, self.shown_kind, self.num_before = False, False, "", 0
        self.client_modes: set[PeerID] = set()
        self.samples = dict.fromkeys(PEERS, SAMPLES)

    async def ask(self, me, other, request):
        if other in self.deaf:
            raise OSError("nothing")
        return self.shown.get(other) or self.members[other].audits.answer(me, self.group.group_id)

    async def round(self) -> None:
        listed, tickets = {}, []
        for peer, member in self.members.items():
            computes = self.computes if peer == LIAR else lambda number: True
            listed[peer] = work_of(peer, self.step, computes, self.samples[peer])
            if peer == LIAR:
                listed[peer] = replace(listed[peer], kind=self.shown_kind, num_before=self.num_before)
            data = listed[peer].to_bytes()
            chance = self.chances.get(peer, self.chance)
            own = OwnWork(data, chance, self.samples[peer], self.has_slices, "", member.verdict, self.has_earlier)
            member.audits.take(own, self.step)
            member.verdict = None
            for found, what in member.audits.found().items():
                member.left_out = {found: (what, self.step)} | (member.left_out or {})
            name = b"" if peer in self.silent else name_of(data)
            ticket = Ticket(self.step, listed[peer].samples, peer in self.client_modes, 1.0, bytes(16), work=name)
            if peer in self.gives_nothing:
                ticket = replace(ticket, samples=0)
            ticket = member.audits.with_doubt(ticket)
            doubts = self.claims.get(peer)
            tickets.append(ticket if doubts is None else replace(ticket, doubts=short_name(doubts)))
        self.group = Group.close(self.step.to_bytes(16, "big"), tuple(PEERS), tuple(tickets))
        for member in self.members.values():
            member.audits.begin(self.group)
        for member in self.members.values():
            if (assignment := await member.audits.assign()) is not None:
                member.computed += 1
                member.verdict = self.compute(assignment)
        self.step += 1

    @staticmethod
    def compute(assignment: Assignment) -> WorkVerdict:
        said = assignment.line
        return WorkVerdict(assignment.peer, said.numbers == true_numbers(assignment.peer, said.first_position))

    async def until(self, condition, most: int) -> bool:
        while not condition() and self.step < most:
            await self.round()
        return condition()

    @property
    def who_left_out(self) -> dict[PeerID, set[PeerID]]:
        """For each member that has left out any peer: the peers that it has left out."""
        return {peer: set(member.left_out) for peer, member in self.members.items() if member.left_out}


def run(scenario, **options) -> Members:
    members = Members(**options)
    asyncio.run(scenario(members))
    return members


ALL_LEAVE_OUT_THE_LIAR = {peer: {LIAR} for peer in HONEST}


def test_a_member_that_computes_half_is_found_by_all_soon_after_one_has_found_it():
    async def scenario(members):
        await members.until(lambda: bool(members.who_left_out), 400)
        first = members.step
        # Once in a thousand runs a member follows two hints in vain, and gets the next one 50 updates later.
        assert await members.until(lambda: members.who_left_out == ALL_LEAVE_OUT_THE_LIAR, first + 250)

    members = run(scenario)
    for peer in HONEST:
        assert members.members[peer].left_out[LIAR][0] is Blame.MADE_UP_WORK


@pytest.mark.slow
def test_a_member_that_computes_half_is_nearly_always_found_within_a_hundred_updates():
    async def scenario(members):
        await members.until(lambda: bool(members.who_left_out), 100)

    found = sum(bool(run(scenario).who_left_out) for _ in range(40))
    assert found >= 34, "0.98 by computation: fewer come of chance in one of a million runs"


def test_no_member_is_left_out_where_all_are_honest():
    async def scenario(members):
        await members.until(lambda: False, 60)

    members = run(scenario, chance=1.0, computes=lambda number: True)
    assert not members.who_left_out
    assert all(member.computed == 60 for member in members.members.values()), "they did check, once an update"


def test_one_difference_is_not_enough():
    """A bit may have flipped in the memory of an honest peer."""

    async def scenario(members):
        await members.round()
        members.computes = lambda number: True
        await members.until(lambda: False, 30)

    members = run(scenario, chance=1.0, computes=lambda number: False)
    assert not members.who_left_out


def test_honesty_for_a_while_after_a_question_does_not_help_a_liar():
    async def scenario(members):
        while members.step < 250 and not members.who_left_out:
            members.computes = lambda number: members.step % 9 != 0
            await members.round()

    assert run(scenario, chance=1.0).who_left_out


def test_an_accuser_is_not_believed_and_costs_little():
    async def scenario(members):
        members.claims = {LIAR: HONEST[0]}
        await members.until(lambda: False, 200)

    members = run(scenario, chance=0.0, computes=lambda number: True)
    assert not members.who_left_out
    for peer in HONEST[1:]:
        assert members.members[peer].computed == HINTED_AUDITS, "and then it is not listened to for a minute"
    assert members.members[HONEST[0]].computed == 0


def test_an_accuser_that_names_two_members_by_turns_costs_no_more():
    async def scenario(members):
        while members.step < 200:
            members.claims = {LIAR: HONEST[members.step % 2]}
            await members.round()

    members = run(scenario, chance=0.0, computes=lambda number: True)
    assert not members.who_left_out
    for peer in HONEST[2:]:
        assert members.members[peer].computed == HINTED_AUDITS


def test_an_accuser_that_has_named_an_absent_member_is_heard_about_others():
    me, accuser, gone = HONEST[:3]

    async def show(peer, request, most):
        return listed[peer]

    audits, looked_at, verdict = WorkAudits(me, show), Counter(), None
    for step in range(60):
        peers = (me, accuser, LIAR, gone)[: 3 + (step == 0)]
        listed = {peer: work_of(peer, step).to_bytes() for peer in peers}
        doubts = {accuser: short_name(gone if step == 0 else LIAR)}
        audits.take(OwnWork(listed[me], 0.0, SAMPLES, verdict=verdict), step)
        tickets = tuple(
            Ticket(
                *(step, MICRO_BATCHES * SAMPLES, False, 1.0, bytes(16)),
                work=name_of(listed[peer]),
                doubts=doubts.get(peer, b""),
            )
            for peer in peers
        )
        audits.begin(Group.close(step.to_bytes(16, "big"), peers, tickets))
        verdict = None
        if step > 0 and (assignment := asyncio.run(audits.assign())) is not None:
            looked_at[assignment.peer] += 1
            verdict = WorkVerdict(assignment.peer, True)
    assert looked_at == {LIAR: HINTED_AUDITS}


@pytest.mark.slow
def test_a_hundred_accusers_cost_no_more_than_a_few():
    """Names cost nothing in an open run. Each time another peer accuses another peer."""
    me, *others = peers = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(100)]
    updates = 100

    async def show(peer, request, most):
        return listed[peer]

    audits = WorkAudits(me, show)
    asked = 0
    for step in range(updates):
        listed = {peer: work_of(peer, step).to_bytes() for peer in peers}
        audits.take(OwnWork(listed[me], 0.0, SAMPLES), step)
        samples = MICRO_BATCHES * SAMPLES
        tickets = tuple(
            Ticket(
                *(step, samples, False, 1.0, bytes(16)),
                work=name_of(listed[peer]),
                doubts=short_name(others[(number + step) % len(others)]),
            )
            for number, peer in enumerate(peers)
        )
        audits.begin(Group.close(step.to_bytes(16, "big"), tuple(peers), tickets))
        if (assignment := asyncio.run(audits.assign())) is not None:
            asked += 1
            audits.take(OwnWork(verdict=WorkVerdict(assignment.peer, True)), step)
    assert asked <= HINTED_AUDITS * (MAX_HINTS + updates * module.HINTS_PER_UPDATE)


def test_a_member_that_shows_nothing_is_left_out_after_some_times():
    async def scenario(members):
        members.deaf.add(LIAR)
        await members.until(lambda: members.who_left_out == ALL_LEAVE_OUT_THE_LIAR, 60)

    members = run(scenario, chance=1.0, computes=lambda number: True)
    assert members.who_left_out == ALL_LEAVE_OUT_THE_LIAR
    for peer in HONEST:
        what, step = members.members[peer].left_out[LIAR]
        assert what is Blame.HIDES_ITS_WORK
        assert step >= MAX_REFUSALS


def test_a_member_that_does_not_answer_now_and_then_is_not_left_out():
    async def scenario(members):
        while members.step < 60:
            members.deaf = set() if members.step % 10 else {LIAR}
            await members.round()

    assert not run(scenario, chance=1.0, computes=lambda number: True).who_left_out


def test_a_member_that_answers_only_where_it_has_nothing_to_hide_is_left_out():
    async def scenario(members):
        while members.step < 60:
            members.deaf = {LIAR} if members.step % 4 else set()
            await members.round()

    assert run(scenario, chance=1.0, computes=lambda number: True).who_left_out == ALL_LEAVE_OUT_THE_LIAR


def test_a_list_that_its_ticket_does_not_name_is_held_against_it_at_once():
    async def scenario(members):
        members.shown[LIAR] = work_of(LIAR, 77).to_bytes()
        await members.until(lambda: members.who_left_out == ALL_LEAVE_OUT_THE_LIAR, 60)

    members = run(scenario, chance=1.0, computes=lambda number: True)
    assert members.members[HONEST[0]].left_out[LIAR][0] is Blame.HIDES_ITS_WORK


def test_a_member_that_claims_earlier_weights_where_no_member_keeps_them_is_left_out():
    """No member could compute its work again."""

    async def scenario(members):
        members.num_before = MICRO_BATCHES
        await members.until(lambda: members.who_left_out == ALL_LEAVE_OUT_THE_LIAR, 60)

    members = run(scenario, chance=1.0, computes=lambda number: True)
    assert members.members[HONEST[0]].left_out[LIAR][0] is Blame.HIDES_ITS_WORK


def test_a_member_that_computes_on_earlier_weights_where_all_keep_them_is_not_left_out():
    async def scenario(members):
        members.num_before, members.has_earlier = MICRO_BATCHES, True
        while members.step < 30:
            await members.round()

    assert not run(scenario, chance=1.0, computes=lambda number: True).who_left_out


def test_members_announce_a_removal_before_they_act_on_it():
    """A group would come apart if its members left a peer out at different times."""

    async def scenario(members):
        members.chances = {HONEST[0]: 1.0}
        await members.until(lambda: members.who_left_out == ALL_LEAVE_OUT_THE_LIAR, 60)

    members = run(scenario, chance=0.0, computes=lambda number: False)
    steps = {members.members[peer].left_out[LIAR][1] for peer in HONEST}
    assert len(steps) == 1, "together, though three of them would not have looked by themselves"
    assert all(module.DIFFERENCES <= members.members[peer].computed <= module.DIFFERENCES + 2 for peer in HONEST[1:])


def test_a_member_that_names_no_list_for_its_samples_is_left_out_by_all_at_the_same_step():
    """A free rider could say that it was unable to name a list.

    No lot is drawn for that, so nothing is left to chance.
    """

    async def scenario(members):
        members.silent.add(LIAR)
        await members.until(lambda: members.who_left_out == ALL_LEAVE_OUT_THE_LIAR, 60)

    members = run(scenario, chance=0.0, computes=lambda number: True)
    left_out = [members.members[peer].left_out[LIAR] for peer in HONEST]
    assert set(left_out) == {(Blame.NAMES_NO_WORK, math.ceil(MAX_REFUSALS) + module.SAY_UPDATES)}


def test_a_member_that_gives_no_samples_needs_no_list():
    """Such members are a helper, a listener, and a peer on probation."""

    async def scenario(members):
        members.silent.add(LIAR)
        members.gives_nothing = {LIAR}
        await members.until(lambda: False, 30)

    assert not run(scenario, chance=1.0, computes=lambda number: True).who_left_out


def test_a_list_now_and_then_is_not_enough_and_a_list_that_is_missing_now_and_then_does_no_harm():
    async def scenario(members, listed_in_four: int):
        for _ in range(48):
            members.silent = {LIAR} if members.step % 4 >= listed_in_four else set()
            await members.round()

    for listed_in_four, found in ((2, ALL_LEAVE_OUT_THE_LIAR), (1, ALL_LEAVE_OUT_THE_LIAR)):
        assert run(partial(scenario, listed_in_four=listed_in_four), chance=0.0).who_left_out == found

    async def rarely(members):
        for _ in range(90):
            members.silent = {LIAR} if members.step % 9 == 0 else set()
            await members.round()

    assert not run(rarely, chance=0.0).who_left_out


def test_a_helper_counts_missing_lists_too():
    """It computes nothing again, but it may lead. Then the other members meet only the peers that the helper meets."""

    async def never(*_):
        raise AssertionError("nobody is asked")

    helper, silent, *others = PEERS
    audits, left_out = WorkAudits(helper, never), {}
    for step in range(20):
        audits.take(OwnWork(), step)
        left_out |= audits.found()
        tickets = [Ticket(step, 0, False, 1.0, bytes(16)), Ticket(step, 8, False, 1.0, bytes(16))]
        tickets += [Ticket(step, 8, False, 1.0, bytes(16), work=bytes(16)) for _ in others]
        tickets[2:] = [replace(ticket, doubts=short_name(silent)) for ticket in tickets[2:]]
        audits.begin(Group.close(step.to_bytes(16, "big"), tuple(PEERS), tuple(tickets)))
        assert asyncio.run(audits.assign()) is None
    assert left_out == {silent: Blame.NAMES_NO_WORK}


def test_micro_batches_far_larger_than_its_own_are_computed_by_a_peer_only_in_slices():
    async def scenario(members, has_slices: bool):
        members.has_slices = has_slices
        members.samples[LIAR] = module.LARGEST * SAMPLES + 1
        await members.until(lambda: bool(members.who_left_out), 60)

    assert not run(partial(scenario, has_slices=False), chance=1.0, computes=lambda number: False).who_left_out
    assert run(partial(scenario, has_slices=True), chance=1.0, computes=lambda number: False).who_left_out


def test_micro_batches_that_are_larger_than_an_update_are_held_against_a_member_at_once():
    """Otherwise a member could claim a micro-batch that no peer has the time to compute again."""

    async def scenario(members, samples: int):
        members.samples[LIAR] = samples
        await members.until(lambda: members.who_left_out == ALL_LEAVE_OUT_THE_LIAR, 60)

    options = {"chance": 1.0, "computes": lambda number: True, "largest": 512}
    assert not run(partial(scenario, samples=512), **options).who_left_out
    members = run(partial(scenario, samples=513), **options)
    assert members.members[HONEST[0]].left_out[LIAR][0] is Blame.HIDES_ITS_WORK


def test_a_suspect_with_expensive_work_does_not_hold_up_all_members():
    """The suspect has left a question unanswered. It is honest in micro-batches that are a thousand times as large."""

    async def scenario(members):
        members.has_slices, members.samples[LIAR] = True, 1024 * SAMPLES
        members.deaf.add(LIAR)
        for _ in range(int(MAX_REFUSALS) - 1):
            await members.round()
        members.deaf.clear()
        members.chance = 0.0  # from now on the members look at suspects alone
        before = sum(members.members[peer].computed for peer in HONEST)
        for _ in range(SUSPECT_AUDITS):
            await members.round()
        members.computed = sum(members.members[peer].computed for peer in HONEST) - before

    members = run(scenario, chance=1.0, computes=lambda number: True)
    assert members.computed < SUSPECT_AUDITS, "a peer that suspects it would compute that often"
    assert not members.who_left_out


def test_a_kind_of_device_that_no_peer_has_turns_no_audit_off():
    """In a model without dropout, all devices compute the same."""

    async def scenario(members):
        members.shown_kind = "cuda of my own"
        await members.until(lambda: members.who_left_out == ALL_LEAVE_OUT_THE_LIAR, 60)

    members = run(scenario, chance=1.0, computes=lambda number: True)
    assert members.members[HONEST[0]].left_out[LIAR][0] is Blame.HIDES_ITS_WORK


def test_two_members_are_too_few_to_tell_which_of_them_lies():
    async def scenario(audits):
        listed = {peer: work_of(peer, 0) for peer in PEERS[:2]}
        audits.take(OwnWork(listed[PEERS[0]].to_bytes(), 1.0, SAMPLES), 0)
        tickets = tuple(
            Ticket(0, work.samples, False, 1.0, bytes(16), work=name_of(work.to_bytes())) for work in listed.values()
        )
        audits.begin(Group.close(bytes(16), tuple(PEERS[:2]), tickets))
        return await audits.assign()

    async def never(*_):
        raise AssertionError("nobody is asked")

    assert asyncio.run(scenario(WorkAudits(PEERS[0], never))) is None


def test_a_peer_that_asks_again_and_again_gets_nothing():
    async def scenario(members):
        await members.round()

    members = run(scenario, chance=0.0)
    audits, name = members.members[HONEST[0]].audits, members.group.group_id
    for _ in range(module.MOST_SHOWN):
        assert audits.answer(LIAR, name)
    with pytest.raises(ValueError, match="has seen"):
        audits.answer(LIAR, name)
    assert audits.answer(HONEST[2], name)
    with pytest.raises(ValueError, match="not known"):
        audits.answer(HONEST[1], bytes(16))


def lines(*said: tuple, num_before: int = 0) -> bytes:
    """Encode lines of (first position, samples, numbers), or with a number of micro-batches before the numbers."""
    return to_wire("", num_before, [list(line if len(line) != 3 else (*line[:2], 1, line[2])) for line in said])


LARGEST = 64
NUMBERS = bytes(4 * NUM_PLACES)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 100,
        to_wire("", 0, []),
        to_wire("", [[0, 8, 1, NUMBERS]]),
        to_wire("x" * 65, 0, [[0, 8, 1, NUMBERS]]),
        to_wire(7, 0, [[0, 8, 1, NUMBERS]]),
        lines((0, 8, NUMBERS), num_before=-1),
        lines((0, 8, NUMBERS), num_before=MAX_LINES + 1),
        lines((0, 8, 0, NUMBERS)),
        lines((0, 8, 2, NUMBERS)),
        lines((0, LARGEST + 1, NUMBERS)),
        lines((0, 8, NUMBERS[1:])),
        lines((0, 8, NUMBERS + b"\0")),
        lines((-1, 8, NUMBERS)),
        lines((MAX_POSITION + 1, 8, NUMBERS)),
        lines((0, 0, NUMBERS), (0, 8, NUMBERS)),
        lines((0, -8, NUMBERS), (0, 16, NUMBERS)),
        lines((0, 2**40, NUMBERS)),
        lines((0.5, 8, NUMBERS)),
        lines((0, "8", NUMBERS)),
        lines((0, 8)),
        lines((0, 4, NUMBERS), (0, 4, NUMBERS)),
        lines((4, 4, NUMBERS), (0, 4, NUMBERS)),
        lines((0, 4, NUMBERS), (3, 4, NUMBERS)),
        lines((0, 4, NUMBERS), (17, 4, NUMBERS)),
        lines(*[(1437 * number, 1, NUMBERS) for number in range(8)]),
        lines((0, 8, WorkList("", [Line(0, 8, (math.nan,) * NUM_PLACES)]).to_bytes()[-4 * NUM_PLACES :])),
        lines((0, 8, WorkList("", [Line(0, 8, (math.inf,) * NUM_PLACES)]).to_bytes()[-4 * NUM_PLACES :])),
        lines(*[(number, 1, NUMBERS) for number in range(MAX_LINES + 1)]),
        lines((0, 7, NUMBERS)),
    ],
)
def test_a_list_that_no_honest_peer_sends_is_refused(data):
    samples = LARGEST + 1 if data == lines((0, LARGEST + 1, NUMBERS)) else 8
    with pytest.raises(
        ValueError, match=r"it has to be|cannot be read|other samples|come twice|sizes|finite|far apart"
    ):
        WorkList.from_bytes(data, name_of(data), samples, LARGEST)


def test_a_list_comes_back_as_it_was_sent():
    said = work_of(LIAR, 3)
    data = said.to_bytes()
    assert WorkList.from_bytes(data, name_of(data), said.samples) == said
    with pytest.raises(ValueError, match="another list"):
        WorkList.from_bytes(data, bytes(16), said.samples)
    with pytest.raises(ValueError, match="other samples"):
        WorkList.from_bytes(data, name_of(data), said.samples + 1)


def test_samples_that_were_dropped_in_between_leave_a_gap():
    """This happens where a failed round gives its samples back, and the samples after that were of no use."""
    data = lines((0, 4, NUMBERS), (16, 4, NUMBERS))
    assert [one.first_position for one in WorkList.from_bytes(data, name_of(data), 8).lines] == [0, 16]


def test_more_micro_batches_than_a_list_has_lines_go_into_fewer():
    one = tuple(float(place) for place in range(NUM_PLACES))
    said = [Line(4 * number, 4, one) for number in range(MAX_LINES + 3)]
    said[100:] = [replace(line, first_position=line.first_position + 4) for line in said[100:]]  # after a gap
    for most in (MAX_LINES, MAX_LINES // 2):
        shorter = shortened(said, most)
        assert len(shorter) <= most
        assert sum(line.samples for line in shorter) == 4 * len(said)
        assert [line.samples // line.micro_batches for line in shorter] == [4] * len(shorter)
        assert sum(line.numbers[5] for line in shorter) == 5 * len(said)
        data = WorkList("", shorter).to_bytes()
        assert WorkList.from_bytes(data, name_of(data), 4 * len(said)).lines == shorter
    assert shortened(said, len(said)) == said
    assert Line(0, 4, one).with_next(Line(4, 8, one)) is None, "of another size"
    assert Line(0, 4, one).with_next(Line(5, 4, one)) is None
