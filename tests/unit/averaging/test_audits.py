"""Members check reducers and convince each other; only the network between them is left out."""

import asyncio
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto.averaging_pb2 import AveragingData, MessageCode
from hivemind.utils.asyncio import as_aiter
from hivemind.utils.crypto import RSAPrivateKey

from swarm.averaging.audit import audits as audits_module
from swarm.averaging.audit.audits import (
    KEPT_PROOFS,
    KEPT_ROUNDS,
    KNOWN_AT_ONCE,
    UNANSWERED,
    UNMET_AT_ONCE,
    Audits,
)
from swarm.averaging.audit.evidence_call import show_evidence
from swarm.averaging.audit.proofs import guilty, of_a_false_average, of_two_receipts, short_name
from swarm.averaging.audit.statements import Counted, Receipt, owner_of, root_of
from swarm.averaging.robust_mean import Combination
from swarm.averaging.shares import stripe_of
from swarm.membership.backoff import BlameBackoff
from swarm.network.signed_records import peer_of
from swarm.protocol import admission
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import NOWHERE, Blame, Group, Ticket
from swarm.protocol.signed_lists import REMOVED
from swarm.protocol.wire import to_wire
from swarm.runtime.line_use import LineUse
from tests.helpers.attacks.sealed_rounds import SIZE, group_of, judge_of, key, peer, sealed_share
from tests.helpers.owners import Organiser

MEMBERS = (0, 1, 2, 3)
REFUSED = "read|no proof|signed|contradict|other|another|honest|bytes|known|decoded|unexpected|malformed"
LIAR = peer(0)
SOUND = (0, 2, 4)
"""Steps of the states that all members have kept. Rounds are of step 3, unless a test says otherwise."""


class Members:
    """All members of one group. They ask each other directly, without a network.

    Args:
        share: how often each reducer is audited, as a share of the updates
    """

    def __init__(self, share: float = 100.0):
        self.judge, self.deaf, self.asked, self.step = judge_of(), set(), 0, 3
        self.shunned = {peer(number): BlameBackoff() for number in MEMBERS}
        self.audits = {
            peer(number): Audits(
                peer(number),
                key(number),
                self.judge,
                self.asker(peer(number)),
                self.shunned[peer(number)],
                share,
            )
            for number in MEMBERS
        }
        self.group = group_of(MEMBERS)

    def asker(self, me):
        """Return the function with which this member asks other members."""
        return lambda other, request, most: self.ask(me, other, request, most)

    async def ask(self, me, other, request, most):
        self.asked += 1
        try:
            if other in self.deaf:
                raise ValueError
            return await self.audits[other].answer(me, request)
        except ValueError as error:
            raise OSError from error

    async def round(self, change=lambda mean: mean, reducer=LIAR, name=bytes(16), lies_to=None):
        """Run one round, in which one member reduces everything that is looked at."""
        group = self.group = Group.close(name, self.group.peer_ids, self.tickets())
        for audits in self.audits.values():
            audits.begin(group)
        make = lambda member, stripe: self.audits[member].seals_of(stripe)  # noqa: E731
        share = sealed_share(MEMBERS, self.judge, group, reducer, change, make=make)
        if lies_to is not None:
            true = share.receipt
            false = Receipt.sign(key(0), true.stripe, root_of([]), true.counted)
            share.seals[lies_to].receipts[reducer] = false
        for audits in self.audits.values():
            audits.end(has_average=True)
        await self.settle()
        return share

    def tickets(self) -> tuple[Ticket, ...]:
        """The tickets that the members bring to the next round."""
        blank = {"receipts": b"", "accuses": b"", "back_to": NOWHERE}
        ticket = replace(self.group.tickets[0], step=self.step, lineage=self.group.group_id, **blank)
        return tuple(self.audits[member].annotate(ticket, SOUND) for member in self.group.peer_ids)

    async def settle(self):
        for audits in self.audits.values():
            await audits.until_done()

    def found(self) -> dict:
        """The peers that each honest member has found out."""
        return {member: audits.found() for member, audits in self.audits.items() if member != LIAR}


async def attempt(answer) -> bool:
    """Whether the member answers and shows something."""
    try:
        return bool(await answer)
    except ValueError:
        return False


def scaled(mean):
    return -10 * mean


ALL_CONVICT = {peer(number): {LIAR: Blame.MADE_UP_AN_AVERAGE} for number in MEMBERS[1:]}


def run(scenario, **options):
    members = Members(**options)
    return members, asyncio.run(scenario(members))


def test_all_members_that_check_find_out_a_reducer_that_makes_up_an_average():
    async def scenario(members):
        await members.round(scaled)

    members, _ = run(scenario)
    assert members.found() == ALL_CONVICT
    assert all(LIAR in members.shunned[peer(number)] for number in MEMBERS[1:])


def test_a_member_that_did_not_check_is_convinced_by_the_proof():
    async def scenario(members):
        for number in MEMBERS[2:]:
            members.audits[peer(number)] = Audits(
                peer(number),
                key(number),
                members.judge,
                members.asker(peer(number)),
                members.shunned[peer(number)],
                0.0,
            )
        await members.round(scaled)
        before = members.found()
        await members.round()
        return before, members.found()

    members, (before, after) = run(scenario)
    assert before == {peer(1): {LIAR: Blame.MADE_UP_AN_AVERAGE}, peer(2): {}, peer(3): {}}
    assert after[peer(2)] == after[peer(3)] == {LIAR: Blame.MADE_UP_AN_AVERAGE}
    assert all(LIAR in members.shunned[peer(number)] for number in MEMBERS[1:])


def test_a_reducer_that_tells_members_different_things_is_found_out_when_they_meet_again():
    async def scenario(members):
        await members.round(lies_to=peer(2))
        members.group = Group.close(bytes(16), members.group.peer_ids, members.tickets())
        for audits in members.audits.values():
            audits.begin(members.group)
        await members.settle()

    members, _ = run(scenario, share=0.0)
    assert members.found() == {peer(number): {LIAR: Blame.EQUIVOCATED} for number in MEMBERS[1:]}


def test_no_member_is_found_out_where_all_are_honest():
    async def scenario(members):
        for number in range(12):
            await members.round(reducer=random.choice(members.group.peer_ids), name=bytes([number] * 16))

    members, _ = run(scenario)
    assert members.asked >= 12, "they did check"
    assert not any(members.found().values())


def test_a_reducer_that_shows_nothing_is_suspected_after_some_times_and_not_left_out_yet():
    async def scenario(members):
        members.deaf.add(LIAR)
        for number in range(UNANSWERED - 1):
            await members.round(scaled, name=bytes([number] * 16))
        assert not any(members.found().values())
        await members.round(scaled, name=bytes([9] * 16))

    members, _ = run(scenario)
    assert members.found() == {peer(number): {LIAR: Blame.HIDES_ITS_INPUTS} for number in MEMBERS[1:]}
    assert not any(LIAR in members.shunned[peer(number)] for number in MEMBERS), "it is for the round to leave it out"


def false_proofs(share, honest) -> list[bytes]:
    """Proofs against an honest reducer that are all false, and noise."""
    evidence = share.seals[share.reducer].show(0)
    rng = random.Random(5)
    place = rng.randrange(len(evidence))
    damaged = evidence[:place] + bytes([evidence[place] ^ 1]) + evidence[place + 1 :]
    other = Receipt.sign(key(9), share.receipt.stripe, root_of([]), share.receipt.counted)  # the accuser's own key
    return [
        b"",
        rng.randbytes(1000),
        to_wire("a false average", b""),
        to_wire("two receipts", to_wire(share.receipt.data, share.receipt.data)),
        of_two_receipts(share.receipt, other),
        of_two_receipts(share.receipt, honest.receipt),
        of_a_false_average(share.group, 0, 0, share.receipt, evidence),
        of_a_false_average(share.group, 0, 1, share.receipt, evidence),
        of_a_false_average(share.group, 0, 0, share.receipt, damaged),
        of_a_false_average(honest.group, 0, 0, share.receipt, evidence),
        of_a_false_average(group_of(MEMBERS, samples=7), 0, 0, share.receipt, evidence),
    ]


def test_nothing_that_an_accuser_makes_proves_an_honest_reducer_guilty():
    judge = judge_of()
    share = sealed_share(MEMBERS, judge)
    honest = sealed_share(MEMBERS, judge, group_of(MEMBERS, name=bytes([3] * 16)), share.reducer)
    for proof in false_proofs(share, honest):
        with pytest.raises(ValueError, match=REFUSED):
            guilty(proof, judge)


OTHER_RULES = {
    "a smaller target": {"target_at": lambda step: BatchTarget(64)},
    "local steps": {"rule": Combination(clips=True, local_steps=16)},
}


@pytest.mark.parametrize("rule", OTHER_RULES.values(), ids=OTHER_RULES)
def test_a_signature_of_a_reducer_in_one_run_proves_nothing_in_another(rule):
    """The average is honest by the rule of its own run alone. The reducer is the same peer in both runs."""
    judge = replace(judge_of(), target_at=lambda step: BatchTarget(2000), run="night-1")
    members = group_of(MEMBERS[:3])
    samples = zip(members.tickets, (1500, 300, 200), strict=True)
    tickets = tuple(replace(ticket, samples=number) for ticket, number in samples)
    group = Group.close(bytes(16), members.peer_ids, tickets, judge.run)
    share = sealed_share(MEMBERS[:3], judge, group)
    proof = of_a_false_average(group, 0, 0, share.receipt, share.seals[share.reducer].show(0))
    with pytest.raises(ValueError, match="honest"):
        guilty(proof, judge)
    with pytest.raises(ValueError, match="another round"):
        guilty(proof, replace(judge, run="night-2", **rule))
    assert guilty(proof, replace(judge, **rule)).peer == share.reducer, "it would, if the name were the same"


def test_two_rounds_with_the_same_nonce_yield_no_two_receipts_of_one_name():
    """A member that has computed nothing since, such as a helper, would come again with the same ticket."""
    reducer, judge = Audits(peer(0), key(0), judge_of(), never, BlameBackoff()), judge_of()
    members, receipts = group_of(MEMBERS[:3]), []
    for number in range(2):
        brought = {peer(0): reducer.annotate(members.tickets[0])}
        tickets = tuple(brought.get(member, ticket) for member, ticket in members.members)
        gradients = lambda place, size, number=number: torch.full((size,), float(place + number))  # noqa: E731
        group = Group.close(bytes(16), members.peer_ids, tickets)
        receipts.append(sealed_share(MEMBERS[:3], judge, group, peer(0), gradients=gradients).receipt)
    with pytest.raises(ValueError, match="contradict"):
        guilty(of_two_receipts(*receipts), judge)


async def never(other, request, most):
    raise OSError


def test_an_accuser_with_true_proofs_against_unmet_peers_is_heard_later():
    """A newcomer meets none of the peers that all members have left out.

    A liar can show such proofs to one member alone.
    """

    async def scenario(members):
        await members.round(scaled)
        accuser, hears = members.audits[peer(1)], Members(share=0.0)
        hears.audits[peer(1)] = accuser
        proofs = [two_receipts_of(RSAPrivateKey()) for _ in range(3)]
        for name, proof in proofs:
            hears.audits[peer(1)] = SimpleNamespace(answer=lambda *_, proof=proof: shown(proof))
            await hear(hears, name)
        hears.audits[peer(1)] = accuser
        hears.audits[peer(3)].found()
        await hear(hears, short_name(LIAR))
        return hears.audits[peer(3)].found()

    async def hear(hears, name):
        tickets = [replace(ticket, accuses=name * (of == peer(1))) for of, ticket in hears.group.members]
        hears.audits[peer(3)].begin(Group.close(name, hears.group.peer_ids, tuple(tickets)))
        await hears.audits[peer(3)].until_done()

    _, found = run(scenario)
    assert found == {LIAR: Blame.MADE_UP_AN_AVERAGE}


async def shown(proof):
    return proof


def two_receipts_of(invented: RSAPrivateKey) -> tuple[bytes, bytes]:
    """The name of a peer that nobody has met, and a proof against it."""
    receipts = [Receipt.sign(invented, b"s" * 16, bytes([number] * 32), []) for number in (1, 2)]
    return short_name(peer_of(owner_of(invented))), of_two_receipts(*receipts)


def test_a_hundred_false_accusations_are_asked_for_once():
    """An accuser that has proven nothing cannot keep any peer from being convicted by other members."""

    class Liar(Audits):
        async def answer(self, caller, data):
            return random.randbytes(1000)

        def annotate(self, ticket, sound=()):
            return replace(ticket, accuses=random.randbytes(16))

    async def scenario(members):
        members.audits[LIAR] = Liar(LIAR, key(0), members.judge, members.asker(LIAR), members.shunned[LIAR], 0.0)
        for number in range(100):
            group = Group.close(bytes([number] * 16), members.group.peer_ids, members.tickets())
            members.audits[peer(1)].begin(group)
            await members.settle()
        return members.asked

    members, asked = run(scenario, share=0.0)
    assert asked == 1
    assert not any(members.found().values())


def test_a_liar_whose_proofs_never_come_leaves_room_for_audits():
    """It accuses another member in each round. Sixteen proofs on their way kept all other checks from being made."""
    asked = []

    async def scenario():
        forever, audited = asyncio.Event(), asyncio.Event()

        async def ask(other, request, most):
            if b"proof" in request:
                asked.append(other)
                await forever.wait()
            if b"part" in request:
                audited.set()
            raise OSError

        others = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(20)]
        peers, ticket = (LIAR, peer(1), *others), group_of(MEMBERS).tickets[0]
        audits = Audits(peer(1), key(1), judge_of(), ask, BlameBackoff(), 100.0 * len(peers))
        for number, accused in enumerate(others):
            tickets = (replace(ticket, accuses=short_name(accused)), *(ticket,) * (len(peers) - 1))
            group = Group.close(bytes([number] * 16), peers, tickets)
            audits.begin(group)
            await asyncio.sleep(0)
        seals = audits.seals_of(stripe_of(group, 0, 0))
        seals.received(LIAR, bytes(32))
        seals.receipts[LIAR] = Receipt.sign(key(0), seals.stripe, root_of([bytes(32)]), [Counted()] * len(peers))
        audits.end(has_average=True)
        await asyncio.wait_for(audited.wait(), 10)

    asyncio.run(scenario())
    assert asked == [LIAR]


def test_an_accuser_whose_proof_is_known_is_heard_when_it_accuses_another_member():
    """It wants to go back further, since its loss has risen: so it is asked for the known proof again, a few times."""
    name, proof = two_receipts_of(key(2))

    async def scenario(members):
        await members.round(scaled)
        hears = members.audits[peer(3)]
        hears.found()

        async def hear(accused):
            said = replace(members.group.tickets[0], accuses=accused, back_to=0)
            silent = replace(said, accuses=b"", back_to=NOWHERE)
            tickets = tuple(said if member == peer(1) else silent for member in members.group.peer_ids)
            hears.begin(Group.close(bytes(16), members.group.peer_ids, tickets))
            await hears.until_done()

        before = members.asked
        for _ in range(20):
            await hear(short_name(LIAR))
        again, nothing_new = members.asked - before, hears.found()
        members.audits[peer(1)] = SimpleNamespace(answer=lambda *_: shown(proof))
        await hear(name)
        return again, nothing_new, hears.found()

    assert run(scenario)[1] == (KNOWN_AT_ONCE, {}, {peer(2): Blame.EQUIVOCATED})


@pytest.mark.parametrize("taken", [UNMET_AT_ONCE, KEPT_PROOFS])
def test_proofs_against_invented_peers_push_out_no_proof_that_matters(monkeypatch, taken):
    """Keys cost nothing, and two receipts of an invented round prove the owner of the key guilty.

    Several accusers together can bring as many proofs as a peer keeps. Here one accuser is heard as often.
    """
    monkeypatch.setattr(audits_module, "UNMET_AT_ONCE", taken)
    invented = [two_receipts_of(RSAPrivateKey()) for _ in range(KEPT_PROOFS)]

    async def scenario(members):
        await members.round(scaled)
        audits = members.audits[peer(1)]
        assert audits.found() == {LIAR: Blame.MADE_UP_AN_AVERAGE}
        for name, proof in invented:
            members.audits[LIAR] = SimpleNamespace(answer=lambda *_, proof=proof: shown(proof))
            tickets = [replace(ticket, accuses=name * (of == LIAR)) for of, ticket in members.group.members]
            audits.begin(Group.close(name, members.group.peer_ids, tuple(tickets)))
            await audits.until_done()
        return audits

    members, audits = run(scenario)
    assert len(audits.found()) == taken
    ticket = audits.annotate(members.group.ticket_of(peer(1)), SOUND)
    assert ticket.back_to == 2, "it still wants to go back"


def test_a_proof_against_a_peer_other_than_the_accused_does_not_count():
    async def scenario(members):
        await members.round(scaled)

    members, _ = run(scenario)
    accuser, hears = members.audits[peer(1)], Members(share=0.0)
    hears.audits[peer(1)] = accuser
    named = replace(members.group.tickets[0], accuses=short_name(peer(2)))
    group = Group.close(bytes(16), members.group.peer_ids, (named,) * len(MEMBERS))

    async def listen():
        hears.audits[peer(3)].begin(group)
        await hears.settle()

    asyncio.run(listen())
    assert hears.audits[peer(3)].found() == {}


def test_strangers_are_shown_nothing_and_members_not_too_often():
    async def scenario(members):
        share = await members.round()
        request = to_wire("part", share.receipt.stripe, 0)
        for data in (b"", b"x" * 100, to_wire("state", bytes(16), 0), to_wire("part", bytes(16), 0)):
            with pytest.raises(ValueError, match=REFUSED):
                await members.audits[LIAR].answer(peer(1), data)
        with pytest.raises(ValueError, match="in no group"):
            await members.audits[LIAR].answer(peer(9), request)
        shown = [await attempt(members.audits[LIAR].answer(peer(2), request)) for _ in range(100)]
        return sum(shown)

    _, shown = run(scenario, share=0.0)
    assert 1 < shown < 100


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "certificate ended"])
def test_a_peer_that_is_no_longer_a_member_is_shown_nothing(monkeypatch, removed):
    """All members keep gradients and averages of the last rounds, and the peer was in those rounds."""
    organiser, shown = Organiser(), []
    here, other = (organiser.admission(peer(number), end=60) for number in (0, 1))

    async def ask(members, share):
        request = as_aiter(AveragingData(group_id=to_wire("part", share.receipt.stripe, 0)))
        context = SimpleNamespace(remote_id=peer(1))
        answers = show_evidence(members.audits[LIAR], here, LineUse(), request, context)
        shown.append(MessageCode.Name((await anext(answers)).code))
        await answers.aclose()

    async def scenario(members):
        share = await members.round()
        here.admit(other.show(b""), peer(1))
        await ask(members, share)
        if removed:
            here.lists.take(REMOVED, organiser.remove(other))
        else:
            monkeypatch.setattr(admission, "get_dht_time", lambda: time.time() + 120)
        await ask(members, share)

    run(scenario, share=0.0)
    assert shown == ["AVERAGED_PART", "PROTOCOL_VIOLATION"]


def test_a_reducer_keeps_what_it_was_given_for_a_few_rounds_only():
    async def scenario(members):
        shares = [await members.round(name=bytes([number] * 16)) for number in range(KEPT_ROUNDS + 1)]
        requests = [to_wire("part", share.receipt.stripe, 0) for share in shares]
        return sum([await attempt(members.audits[LIAR].answer(peer(1), request)) for request in requests])

    assert run(scenario, share=0.0)[1] == KEPT_ROUNDS


def test_two_members_check_nothing():
    """The reducer could have given itself any part that explains the average."""
    members = Members()
    ticket = members.group.tickets[0]
    listener = Ticket.of_listener(ticket.step, False)
    tickets = (ticket, ticket, listener, listener)

    async def scenario():
        group = Group.close(bytes(16), members.group.peer_ids, tickets)
        for audits in members.audits.values():
            audits.begin(group)
            audits.end(has_average=True)
        await members.settle()

    asyncio.run(scenario())
    assert members.asked == 0


def test_an_order_that_comes_after_the_round_makes_no_reducer_a_suspect():
    async def scenario(members):
        members.judge = replace(members.judge, orders_at=lambda step: b"another.")
        for number in MEMBERS:
            me = peer(number)
            members.audits[me] = Audits(me, key(number), members.judge, members.asker(me), members.shunned[me], 100.0)
        await members.round()
        assert members.asked
        return members.found()

    _, found = run(scenario)
    assert found == {peer(number): {} for number in MEMBERS[1:]}


def test_members_keep_nothing_and_ask_nothing_where_they_would_have_to_keep_too_much(monkeypatch):
    """All members know the limit, so none takes the reducer for one that hides something."""

    async def scenario(members):
        monkeypatch.setattr(audits_module, "MAX_KEPT_BYTES", members.judge.bytes_given(members.group) - 1)
        share = await members.round(scaled)
        assert not await attempt(members.audits[LIAR].answer(peer(1), to_wire("part", share.receipt.stripe, 0)))
        assert (members.asked, members.found()) == (0, {peer(number): {} for number in MEMBERS[1:]})
        monkeypatch.undo()
        await members.round(scaled, name=b"1" * 16)

    members, _ = run(scenario)
    assert members.found() == ALL_CONVICT


@pytest.mark.parametrize(("num_members", "asks"), [(8, True), (128, False)])
def test_no_member_asks_for_more_than_an_answer_can_hold(num_members, asks):
    """Two reducers, a megabyte of fp16 and no line known: 128 parts of 128 KiB are more than 16 MiB.

    The reducer could not answer, and was taken for one that hides its inputs.
    """
    judge, asked = replace(judge_of(), size_at=lambda step: 2**19), []

    async def ask(other, request, most):
        asked.append(other)
        raise OSError

    async def scenario():
        reducers = peer(0), peer(1)
        others = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(num_members - 2)]
        ticket = group_of(MEMBERS).tickets[0]
        tickets = (ticket, ticket, *(replace(ticket, client_mode=True),) * len(others))
        audits = Audits(peer(1), key(1), judge, ask, BlameBackoff(), 100.0 * num_members)
        for number in range(UNANSWERED):
            group = Group.close(bytes([number] * 16), (*reducers, *others), tickets)
            audits.begin(group)
            seals = audits.seals_of(stripe_of(group, 0, 0))
            seals.received(peer(0), bytes(32))
            counted = [Counted()] * num_members
            seals.receipts[peer(0)] = Receipt.sign(key(0), seals.stripe, root_of([bytes(32)]), counted)
            audits.end(has_average=True)
            await audits.until_done()
        return audits.found()

    found = asyncio.run(scenario())
    assert (asked, found) == (([peer(0)] * UNANSWERED, {peer(0): Blame.HIDES_ITS_INPUTS}) if asks else ([], {}))


def test_a_reducer_for_many_members_is_given_as_many_times_a_share():
    """Two bytes for each number. Nothing is kept of a member that has no samples."""
    judge, group = judge_of("fp16"), group_of(MEMBERS)
    assert judge.bytes_given(group) == 2 * SIZE
    one, *rest = group.tickets
    tickets = (replace(one, samples=0), *(replace(ticket, client_mode=True) for ticket in rest))
    assert judge.bytes_given(Group.close(bytes(16), group.peer_ids, tickets)) == 3 * 2 * SIZE


def back_to(members) -> dict:
    """The step to which each honest member wants to go back."""
    return {
        member: ticket.back_to
        for member, ticket in zip(members.group.peer_ids, members.tickets(), strict=True)
        if member != LIAR
    }


def test_a_member_that_has_found_a_liar_wants_to_go_back_to_the_last_state_before_its_lie():
    async def scenario(members):
        await members.round()
        before = back_to(members)
        await members.round(scaled)
        return before, back_to(members), await members.audits[peer(1)].liars_since(2, members.group)

    _, (before, after, liars) = run(scenario)
    assert set(before.values()) == {NOWHERE}
    assert set(after.values()) == {2}, "the state of step 4 has come out of that update"
    assert liars == {LIAR}


def test_the_group_that_goes_back_shows_the_proof_to_a_member_that_has_not_seen_it():
    async def scenario(members):
        members.audits[peer(3)] = Audits(
            peer(3), key(3), members.judge, members.asker(peer(3)), members.shunned[peer(3)], 0.0
        )
        await members.round(scaled)
        assert back_to(members) == {peer(1): 2, peer(2): 2, peer(3): NOWHERE}
        group = Group.close(bytes(16), members.group.peer_ids, members.tickets())
        assert group.back_to is None or group.ticket_of(LIAR).back_to == 2
        return await members.audits[peer(3)].liars_since(2, group)

    assert run(scenario)[1] == {LIAR}


def test_a_round_that_a_liar_has_made_up_takes_no_member_back():
    """The liar proves itself guilty of a lie that has spoilt nothing. It is left out, and nothing else happens."""

    async def scenario(members):
        share = sealed_share(MEMBERS, members.judge, group_of(MEMBERS, name=b"x" * 16), LIAR, scaled)
        proof = of_a_false_average(share.group, 0, 0, share.receipt, share.seals[LIAR].show(0))

        class Accuser(Audits):
            async def answer(self, caller, data):
                return proof

            def annotate(self, ticket, sound=()):
                return replace(ticket, accuses=short_name(LIAR), back_to=0)

        members.audits[peer(1)] = Accuser(peer(1), key(1), members.judge, None, members.shunned[peer(1)], 0.0)
        await members.round()
        group = Group.close(b"y" * 16, members.group.peer_ids, members.tickets())
        for number in MEMBERS[2:]:
            members.audits[peer(number)].begin(group)
        await members.settle()
        return group

    members, group = run(scenario, share=0.0)
    assert group.back_to is None
    assert members.found()[peer(2)] == {LIAR: Blame.MADE_UP_AN_AVERAGE}
    assert back_to(members) == {peer(1): 0, peer(2): NOWHERE, peer(3): NOWHERE}


def test_no_member_wants_to_go_back_where_the_states_since_the_lie_are_gone():
    async def scenario(members):
        await members.round(scaled)
        ticket = members.group.tickets[0]
        return [members.audits[peer(1)].annotate(ticket, sound).back_to for sound in ((), (4, 8), (3, 8), (1, 2, 4))]

    assert run(scenario)[1] == [NOWHERE, NOWHERE, 3, 2]


def test_a_proof_that_takes_no_member_back_does_not_stand_in_the_way_of_one_that_does():
    """An accomplice passes on a proof from a round that never was.

    The members that hear it check nothing themselves.
    """

    async def scenario(members):
        share = sealed_share(MEMBERS, members.judge, group_of(MEMBERS, name=b"x" * 16), LIAR, scaled)
        proof = of_a_false_average(share.group, 0, 0, share.receipt, share.seals[LIAR].show(0))
        for number in MEMBERS[2:]:
            me = peer(number)
            members.audits[me] = Audits(me, key(number), members.judge, members.asker(me), members.shunned[me], 0.0)
        await members.round(scaled)

        class Accomplice(Audits):
            async def answer(self, caller, data):
                return proof

            def annotate(self, ticket, sound=()):
                return replace(ticket, accuses=short_name(LIAR))

        members.audits[LIAR] = Accomplice(LIAR, key(0), members.judge, None, members.shunned[LIAR], 0.0)
        peers = sorted(members.group.peer_ids, key=lambda member: member != LIAR)  # the liar is asked first
        members.group = replace(members.group, peer_ids=tuple(peers))
        await members.round(reducer=peer(1), name=b"1" * 16)
        before = back_to(members)
        await members.round(reducer=peer(1), name=b"2" * 16)
        return before, back_to(members)

    members, (before, after) = run(scenario)
    assert before == {peer(1): 2, peer(2): NOWHERE, peer(3): NOWHERE}
    assert after == {peer(number): 2 for number in MEMBERS[1:]}
    assert all(LIAR in members.shunned[peer(number)] for number in MEMBERS[1:])


def test_there_is_no_liar_where_most_members_want_to_go_back_and_show_no_proof():
    """Neither is there one where the proof is invalid, or where the lie was before the step to go back to."""

    async def scenario(members):
        await members.round()
        ticket = members.tickets()[0]
        wants, found = replace(ticket, back_to=2), []
        for others in (wants, replace(wants, accuses=short_name(peer(1))), replace(wants, accuses=b"x" * 16)):
            said = [ticket if member == peer(3) else others for member in members.group.peer_ids]
            group = Group.close(bytes(16), members.group.peer_ids, tuple(said))
            assert group.back_to == 2
            found.append(await members.audits[peer(3)].liars_since(2, group))
        await members.round(scaled, name=b"1" * 16)
        found += [await members.audits[peer(3)].liars_since(step, group) for step in (4, 3)]
        return found

    assert run(scenario)[1] == [frozenset()] * 4 + [{LIAR}]


def test_a_member_that_was_in_no_round_with_the_liar_goes_back_with_the_members_that_were():
    """Most of its group want to go back, and show a proof that the member can check."""

    async def scenario(members):
        await members.round(scaled)
        late = members.audits[peer(3)] = Audits(
            peer(3), key(3), members.judge, members.asker(peer(3)), members.shunned[peer(3)], 0.0
        )
        tickets = dict(zip(members.group.peer_ids, members.tickets(), strict=True))
        peers = (peer(1), peer(2), peer(3))
        group = Group.close(bytes(16), peers, tuple(map(tickets.get, peers)))
        assert (group.back_to, late.annotate(tickets[LIAR], SOUND).back_to) == (2, NOWHERE)
        found = await late.liars_since(2, group)
        assert late.annotate(tickets[LIAR], SOUND).back_to == NOWHERE, "it does not ask for it"
        return found

    assert run(scenario)[1] == {LIAR}
