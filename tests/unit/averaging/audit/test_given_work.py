"""What a member gives is compared with its list; only the network between members is left out."""

import asyncio
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations

import pytest
import torch
from hivemind.p2p import PeerID

from swarm.averaging.audit import work_audits
from swarm.averaging.audit.audits import Audits
from swarm.averaging.audit.given_work import GivenWork
from swarm.averaging.audit.proofs import guilty, of_other_work
from swarm.averaging.audit.seals import Seals
from swarm.averaging.compression.error_feedback import ErrorFeedback
from swarm.membership.backoff import BlameBackoff
from swarm.protocol.messages import NOWHERE, Blame, Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.protocol.work import NUM_PLACES, Line, OwnWork, WorkList, name_of, places_in_vector
from tests.helpers.attacks.sealed_exchange import Exchange
from tests.helpers.attacks.sealed_rounds import SIZE, judge_of, key, peer, sealed_share

NUMBERS = (0, 1, 2, 3)
MEMBERS = tuple(sorted(map(peer, NUMBERS), key=PeerID.to_bytes))
LIAR, REDUCER = 2, MEMBERS[0]
SIZES = [1000] * (SIZE // 1000)
LINEAGE = bytes(LINEAGE_BYTES)
PLACES_OF = partial(places_in_vector, SIZES)


def computed(place: int) -> torch.Tensor:
    """The mean gradient that this member has computed."""
    generator = torch.Generator().manual_seed(place)
    return 1e-3 * torch.randn(SIZE, generator=generator)


def list_of(place: int, num_before: int = 0, apart: float = 0.0) -> WorkList:
    """The list of two micro-batches, of 40 and 60 samples, noted as they were. `apart` moves their sums apart."""
    total = 100 * computed(place)[PLACES_OF(LINEAGE)]
    first = 0.3 * total + apart
    second = total - first
    lines = [Line(0, 40, tuple(first.tolist())), Line(40, 60, tuple(second.tolist()))]
    return WorkList("", lines, num_before=num_before)


LISTS = [list_of(place).to_bytes() for place in range(len(MEMBERS))]
TICKETS = [Ticket(3, 100, False, 1.0, LINEAGE, work=name_of(listed), back_to=NOWHERE) for listed in LISTS]
GROUP = Group.close(bytes(LINEAGE_BYTES), MEMBERS, tuple(TICKETS))
LIES = {
    "turned around": lambda gradient: -gradient,
    "nothing": torch.zeros_like,
    "a half": lambda gradient: gradient / 2,
    "three times as long": lambda gradient: 3 * gradient,
    "of another update": lambda gradient: computed(17),
}


def gives(lie=None):
    """The gradients that the members send. The liar's gradient is changed if `lie` is given."""
    return lambda place, size: lie(computed(place)) if lie and place == LIAR else computed(place)


def compared(codec="fp16", lie=None, group=GROUP, lists=LISTS) -> list[bool]:
    """For each part with places that the liar gave to the reducer: whether it differs from the liar's list."""
    judge = judge_of(codec)
    share = sealed_share(NUMBERS, judge, group, REDUCER, gradients=gives(lie))
    given_work = GivenWork(judge, PLACES_OF)
    parts = given_work.parts(group, REDUCER, MEMBERS[LIAR])
    signed = [share.seals[REDUCER].signed_part(MEMBERS[LIAR], part.part_index) for part in parts]
    return [given_work.differs(group, part, given, lists[LIAR]) for part, given in zip(parts, signed, strict=True)]


def test_gradients_that_are_too_large_for_the_codec_prove_nothing():
    """Gradients blow up on all members at once, so these would leave each other out for good."""
    grown = 1e9
    lines = [replace(line, numbers=tuple(grown * n for n in line.numbers)) for line in list_of(LIAR).lines]
    lists = [*LISTS[:LIAR], WorkList("", lines).to_bytes(), *LISTS[LIAR + 1 :]]
    tickets = [replace(ticket, work=name_of(listed)) for ticket, listed in zip(TICKETS, lists, strict=True)]
    group = Group.close(bytes(LINEAGE_BYTES), MEMBERS, tuple(tickets))
    found = compared(lie=lambda gradient: grown * gradient, group=group, lists=lists)
    assert found
    assert not any(found)
    assert any(compared(lie=lambda gradient: -grown * gradient, group=group, lists=lists)), "which is a lie"


@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_a_member_that_gives_what_it_has_computed_is_believed(codec):
    found = compared(codec)
    assert found
    assert not any(found)


@pytest.mark.parametrize("codec", ["none", "fp16"])
@pytest.mark.parametrize("lie", LIES)
def test_another_gradient_is_seen_in_each_part(codec, lie):
    assert all(compared(codec, LIES[lie]))


def test_rounding_is_no_lie():
    assert not any(compared(lie=lambda gradient: 1.01 * gradient))


def with_lists(lists: list[bytes], samples: int = 100) -> Group:
    """The group whose members have named these lists."""
    tickets = [
        replace(ticket, work=name_of(listed), samples=samples) for ticket, listed in zip(TICKETS, lists, strict=True)
    ]
    return Group.close(bytes(LINEAGE_BYTES), MEMBERS, tuple(tickets))


def test_numbers_that_are_too_small_for_the_codec_prove_nothing(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "computed", lambda place: torch.full((SIZE,), 1e-7))
    tiny = [list_of(place).to_bytes() for place in range(len(MEMBERS))]
    assert not any(compared("fp16", torch.neg, with_lists(tiny), tiny))
    assert all(compared("none", torch.neg, with_lists(tiny), tiny))


def test_where_micro_batches_cancel_out_rounding_is_no_lie():
    """What is left of 1e6 and -1e6 in fp32 has an error of 0.06, which is as much as the sum of the gradients."""
    apart = [list_of(place, apart=1e6).to_bytes() for place in range(len(MEMBERS))]
    assert not any(compared("none", group=with_lists(apart), lists=apart))


def test_remainders_of_earlier_rounds_are_no_lie():
    """Beside numbers that are zero they would look like one, as in rows of an embedding that no micro-batch touches."""
    zero = WorkList("", [Line(0, 1, (0.0,) * NUM_PLACES)]).to_bytes()
    group = with_lists([zero] * len(MEMBERS), samples=1)
    judge, seals = judge_of(), {}
    feedbacks = {member: ErrorFeedback(judge.codec, SIZE) for member in MEMBERS}
    for feedback in feedbacks.values():
        feedback.left_out.fill_(30.0)

    def seals_of(me, stripe):
        seals[me] = Seals(me, stripe, key(next(number for number in NUMBERS if peer(number) == me)))
        return seals[me]

    async def run():
        vectors = {member: torch.zeros(SIZE) for member in MEMBERS}
        return await Exchange(group, vectors, "fp16", seals_of, feedbacks).run()

    asyncio.run(run())
    given_work, compared = GivenWork(judge, PLACES_OF), 0
    for reducer, member in permutations(MEMBERS, 2):
        for part in given_work.parts(group, reducer, member):
            given = seals[reducer].signed_part(member, part.part_index)
            assert not given_work.differs(group, part, given, zero)
            compared += 1
    assert compared


def test_nothing_is_compared_where_numbers_travel_coarsely():
    assert compared("int8") == []


def proof_against_the_liar(lie=torch.neg, **changes) -> bytes:
    """The proof that the reducer makes of the first part that tells something."""
    judge = judge_of()
    share = sealed_share(NUMBERS, judge, GROUP, REDUCER, gradients=gives(lie))
    part = GivenWork(judge, PLACES_OF).parts(GROUP, REDUCER, MEMBERS[LIAR])[0]
    said = {
        "group": GROUP,
        "stripe": part.stripe,
        "part_index": part.part_index,
        "reducer": REDUCER,
        "given": share.seals[REDUCER].signed_part(MEMBERS[LIAR], part.part_index),
        "listed": LISTS[LIAR],
    }
    given = {name: change for name, change in changes.items() if name not in said}
    said |= {name: change for name, change in changes.items() if name in said}
    return of_other_work(**said | {"given": replace(said["given"], **given)})


def test_any_peer_can_check_the_proof():
    found = guilty(proof_against_the_liar(), judge_of(), GivenWork(judge_of(), PLACES_OF))
    assert (found.peer, found.what) == (MEMBERS[LIAR], Blame.GAVE_OTHER_WORK)


def test_a_gift_of_a_member_in_one_run_proves_nothing_in_another():
    judge = replace(judge_of(), run="another run")
    with pytest.raises(ValueError, match="not signed by the peer that it names"):
        guilty(proof_against_the_liar(), judge, GivenWork(judge, PLACES_OF))


FALSE_PROOFS = {
    "it gave what it says": {"lie": None},
    "another one's list": {"listed": LISTS[1]},
    "no list": {"listed": b"no list"},
    "another one's part": {"sender": MEMBERS[1]},
    "the reducer's own part": {"sender": REDUCER},
    "a part of a stranger": {"sender": peer(9)},
    "another reducer": {"reducer": MEMBERS[1]},
    "a stranger as reducer": {"reducer": peer(9)},
    "another stripe": {"stripe": 1},
    "a part that there is not": {"part_index": 63},
    "its signature": {"commitment": b"mine"},
    "other hashes": {"hashes": [bytes(32)]},
    "another round": {"group": Group.close(bytes([1] * LINEAGE_BYTES), MEMBERS, tuple(TICKETS))},
}


@pytest.mark.parametrize("changes", FALSE_PROOFS.values(), ids=FALSE_PROOFS)
def test_no_other_member_can_be_accused(changes):
    with pytest.raises(ValueError, match=r"part|list|sign|word|malformed|proof|unexpected|known|Expected|other"):
        guilty(proof_against_the_liar(**changes), judge_of(), GivenWork(judge_of(), PLACES_OF))


def test_a_proof_does_not_count_where_members_have_no_lists():
    for given_work in (None, GivenWork(judge_of(), lambda lineage: ())):
        with pytest.raises(ValueError, match=r"known kind|no list"):
            guilty(proof_against_the_liar(), judge_of(), given_work)


# ---- members --------------------------------------------------------------------------------------------------------


@dataclass
class Swarm:
    """Members with all that their averaging processes know. They ask each other directly."""

    def __post_init__(self):
        self.judge, self.group = judge_of(), GROUP
        self.shunned = {member: BlameBackoff() for member in MEMBERS}
        self.audits = {
            peer(number): Audits(
                *(peer(number), key(number), self.judge, partial(self.ask, peer(number)), self.shunned[peer(number)]),
                share=0.0,
                places_of=PLACES_OF,
            )
            for number in NUMBERS
        }

    async def ask(self, me, other, request, most):
        try:
            return await self.audits[other].answer(me, request)
        except ValueError as error:
            raise OSError from error

    async def round(self, lie=None, step: int = 3) -> None:
        tickets = tuple(self.audits[member].annotate(ticket) for member, ticket in zip(MEMBERS, TICKETS, strict=True))
        group = self.group = Group.close(bytes(LINEAGE_BYTES), MEMBERS, tickets)
        for member, listed in zip(MEMBERS, LISTS, strict=True):
            self.audits[member].work.take(OwnWork(listed), step)
            self.audits[member].begin(group)
        make = lambda member, stripe: self.audits[member].seals_of(stripe)  # noqa: E731
        sealed_share(NUMBERS, self.judge, group, REDUCER, gradients=gives(lie), make=make)
        for audits in self.audits.values():
            audits.end(has_average=True)
        for audits in self.audits.values():
            await audits.until_done()


@pytest.mark.parametrize("lie", LIES)
def test_all_members_leave_the_liar_out_for_good(monkeypatch, lie):
    """The reducer draws the liar sooner or later. The other members hear of it in the next round."""
    monkeypatch.setattr(work_audits, "COMPARED_SHARE", 1.0)
    swarm, found = Swarm(), {}

    async def train():
        for _ in range(30):
            await swarm.round(LIES[lie])
            for member, audits in swarm.audits.items():
                found.setdefault(member, {}).update(audits.found())

    asyncio.run(train())
    honest = [member for member in MEMBERS if member != MEMBERS[LIAR]]
    assert [found[member] for member in honest] == [{MEMBERS[LIAR]: Blame.GAVE_OTHER_WORK}] * 3
    assert all(MEMBERS[LIAR] in swarm.shunned[member] for member in honest)
    back_to = [swarm.audits[member].annotate(TICKETS[0], sound=(0, 2)).back_to for member in honest]
    assert back_to == [NOWHERE] * 3, "what one member gives is clipped: no member goes back for that"


def test_no_member_is_left_out_where_all_are_honest(monkeypatch):
    monkeypatch.setattr(work_audits, "COMPARED_SHARE", 1.0)
    swarm = Swarm()

    async def train():
        for _ in range(10):
            await swarm.round()

    asyncio.run(train())
    assert not any(audits.found() for audits in swarm.audits.values())


def test_a_list_of_two_versions_of_the_weights_is_not_compared():
    mixed = [list_of(place, num_before=1).to_bytes() for place in range(len(MEMBERS))]
    with pytest.raises(ValueError, match="two versions"):
        compared(lie=torch.neg, group=with_lists(mixed), lists=mixed)


def refuses_lists(swarm: Swarm):
    """The liar answers no question about its work."""

    def refuse(caller, name):
        raise ValueError("no")

    swarm.audits[MEMBERS[LIAR]].work.answer = refuse


def shows_another_list(swarm: Swarm):
    swarm.audits[MEMBERS[LIAR]].work.answer = lambda caller, name: LISTS[1]


@pytest.mark.slow
def test_a_member_that_shows_no_list_or_another_one_is_left_out_for_that(monkeypatch):
    monkeypatch.setattr(work_audits, "COMPARED_SHARE", 1.0)
    for hide in (refuses_lists, shows_another_list):
        swarm, found = Swarm(), {}
        hide(swarm)

        async def train(swarm=swarm, found=found):
            for step in range(60):
                await swarm.round(torch.neg, step)
                found |= swarm.audits[REDUCER].found()

        asyncio.run(train())
        assert found == {MEMBERS[LIAR]: Blame.HIDES_ITS_WORK}


def test_a_line_that_explains_a_lie_is_drawn_to_be_computed_again():
    """The line has one sample of a hundred, and all of the gradient that was not computed."""
    total = tuple((100 * computed(LIAR)[PLACES_OF(LINEAGE)]).tolist())
    honest = [Line(3 * number, 3, tuple(one / 33 for one in total)) for number in range(33)]
    made_up = Line(99, 1, tuple(-2 * one for one in total))
    assert WorkList("", honest).outsized == []
    assert WorkList("", [*honest, made_up]).outsized == [33]
    small = replace(made_up, numbers=tuple(one / 33 for one in total))
    assert WorkList("", [*honest, small]).outsized == [], "a sample may have three times as much as others"
