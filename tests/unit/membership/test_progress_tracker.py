"""What a peer concludes from the progress records of others: which members come, which leads, when a step ends."""

import math
import random
from dataclasses import replace

import pytest
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time

from swarm.membership import trust
from swarm.membership.claim_bounds import MAX_AHEAD
from swarm.membership.no_shows import MAX_WAITED_FOR
from swarm.membership.progress_record import (
    AVERAGING,
    JOINING,
    TRAINING,
    VALIDATING,
    WAITING,
    PeerProgress,
)
from swarm.membership.progress_tracker import MAX_HOLD_SECONDS, TOLD_STEPS
from swarm.network.signed_records import peer_of
from swarm.protocol.attestation import Attestation
from swarm.protocol.messages import Blame, Group, Refused, RoundFailed, Ticket
from swarm.protocol.notes import FailedRound
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from tests.helpers.owners import subkey_of
from tests.helpers.records import RECORD, SaidSwarm

LINEAGE, OTHER, THIRD = (letter * LINEAGE_BYTES for letter in (b"L", b"O", b"T"))


@pytest.fixture
def swarm():
    return SaidSwarm()


def test_a_name_that_two_peers_have_comes_with_the_id(swarm):
    """A peer that lies under the name of an honest peer is not blamed under that name."""
    ada, liar, silent = swarm.says("ada"), swarm.says("liar"), peer_of(subkey_of("silent"))
    assert [swarm.tracker.name_of(peer) for peer in (ada, silent)] == ["ada", str(silent)]
    for name in ("ada", "own"):
        record = PeerProgress(name, 0, 0, 0.0, get_dht_time() - 100, get_dht_time(), False, TRAINING)
        swarm.says_bytes("liar", record.to_bytes())
        assert swarm.tracker.name_of(liar) == f"{name} ({liar})"


def test_a_peer_tells_others_for_a_while_why_a_round_failed(swarm):
    ada = swarm.says("ada")
    swarm.tracker.note_failure(4, RoundFailed("parts are missing", frozenset([ada])))
    assert swarm.tracker.own.failed == FailedRound(4, 1, "ada did not send in time")
    swarm.tracker.note_failure(4, RoundFailed("too slow").blames({ada: Blame.TOO_SLOW}))
    assert swarm.tracker.own.failed == FailedRound(4, 2, "ada holds up every round for far too long")
    swarm.tracker.note_failure(4, Refused(ada))
    assert swarm.tracker.own.failed.why == "ada averages another model"
    swarm.tracker.holds(4 + TOLD_STEPS, LINEAGE)
    assert swarm.tracker.own.failed.times == 3
    swarm.tracker.holds(5 + TOLD_STEPS, LINEAGE)
    assert swarm.tracker.own.failed is None


def test_helpers_are_members_and_do_not_count_as_trainers(swarm):
    helga = swarm.says("helga", helps=True)
    assert helga in swarm.members
    assert swarm.tracker.swarm.num_trainers == 1, "this peer"
    swarm.says("anna", samples=8)
    assert swarm.tracker.swarm.num_trainers == 2
    swarm.tracker.report(helps=True)
    assert swarm.tracker.swarm.num_trainers == 1
    assert len(swarm.members) == 3


def test_the_step_is_over_with_the_target_batch(swarm):
    swarm.tracker.report(samples=40)
    swarm.says("anna", samples=59)
    assert not swarm.tracker.swarm.step_is_over
    swarm.says("anna", samples=60)
    assert swarm.tracker.swarm.step_is_over
    swarm.says("anna", samples=60, step=1)
    assert not swarm.tracker.swarm.step_is_over


def test_the_step_is_over_when_a_member_is_averaging_it(swarm):
    swarm.says("anna", samples=1, phase=AVERAGING, step=3)
    assert not swarm.tracker.swarm.step_is_over
    swarm.tracker.begin_step(3, LINEAGE)
    assert swarm.tracker.swarm.step_is_over


@pytest.fixture
def set_clock(monkeypatch):
    """Stops the tracker's clock, at so many seconds from now."""

    def set_to(seconds: float) -> None:
        now = get_dht_time() + seconds
        monkeypatch.setattr("swarm.membership.progress_tracker.get_dht_time", lambda: now)

    return set_to


def meet_early(swarm: SaidSwarm, set_clock, samples: int, other: PeerID) -> None:
    """A group of this peer and another one meets with so many of the 100 samples, after 20 s of computing."""
    swarm.tracker.begin_step(0, LINEAGE)
    set_clock(0)
    swarm.tracker.report(samples=20, rate=1.0)
    tickets = tuple(Ticket(0, number, False, 1.0, LINEAGE) for number in (20, samples - 20))
    swarm.tracker.recount(Group(LINEAGE, (swarm.tracker.peer_id, other), tickets))
    swarm.tracker.resume()


def test_a_group_that_met_too_early_counts_again(swarm, set_clock):
    anna = swarm.says("anna", samples=90, rate=0.001)
    bert = swarm.says("bert", samples=80, phase=AVERAGING)
    swarm.says("cleo", samples=1, phase=AVERAGING)
    assert swarm.tracker.swarm.step_is_over
    swarm.tracker.missed([bert])
    meet_early(swarm, set_clock, 50, anna)
    assert swarm.tracker.swarm.samples_by_now == pytest.approx(51, abs=0.1), (
        "a peer that did not come has no samples for this step"
    )
    set_clock(MAX_HOLD_SECONDS)
    assert not swarm.tracker.swarm.step_is_over, "each of these was averaging before the group met"
    swarm.says("cleo", samples=1, phase=AVERAGING)
    assert swarm.tracker.swarm.step_is_over


@pytest.mark.parametrize("said", [{"samples": 1, "phase": AVERAGING}, {"samples": 10**6}, {"rate": 1e7}], ids=str)
def test_a_group_that_met_too_early_computes_on_whatever_a_member_says(swarm, set_clock, said):
    """Else a member that gives nothing could make the group meet after each micro-batch."""
    meet_early(swarm, set_clock, 50, swarm.says("anna"))
    swarm.says("liar", **said)
    set_clock(0.1)
    assert swarm.tracker.swarm.has_just_met
    assert not swarm.tracker.swarm.step_is_over
    set_clock(MAX_HOLD_SECONDS)
    assert not swarm.tracker.swarm.has_just_met
    assert swarm.tracker.swarm.step_is_over, "a peer that waits for others has to be heard in the end"


def test_a_group_that_lacked_few_samples_meets_again_soon(swarm, set_clock):
    """At its pace of 4.9 samples a second it lacks two samples for 0.4 s."""
    meet_early(swarm, set_clock, 98, swarm.says("anna"))
    assert swarm.tracker.swarm.has_just_met
    set_clock(0.21)
    assert not swarm.tracker.swarm.has_just_met


def test_a_group_that_meets_too_early_again_computes_for_longer(swarm, set_clock):
    """A liar's ticket can claim nearly all missing samples each time: then few seem to be missing."""
    anna = swarm.says("anna")
    meet_early(swarm, set_clock, 98, anna)
    set_clock(1)
    assert not swarm.tracker.swarm.has_just_met
    tickets = tuple(Ticket(0, number, False, 1.0, LINEAGE) for number in (20, 78))
    swarm.tracker.recount(Group(LINEAGE, (swarm.tracker.peer_id, anna), tickets))
    set_clock(1 + 3.9)
    assert swarm.tracker.swarm.has_just_met, "20 s were computed, of which a quarter is more than the 4 s at most"
    set_clock(1 + MAX_HOLD_SECONDS)
    assert not swarm.tracker.swarm.has_just_met


@pytest.mark.parametrize("change", ["a new step", "a clock that is set back"])
def test_a_step_is_not_held_up_for_an_earlier_one_nor_by_a_clock(swarm, set_clock, change):
    meet_early(swarm, set_clock, 50, swarm.says("anna"))
    if change == "a new step":
        swarm.tracker.begin_step(1, LINEAGE)
    else:
        set_clock(-3600)
    assert not swarm.tracker.swarm.has_just_met


def test_samples_of_a_whole_new_step_begin_at_zero(swarm):
    anna = swarm.says("anna", samples=90, rate=10.0)
    swarm.tracker.report(samples=20)
    swarm.tracker.begin_step(1, LINEAGE, frozenset([anna]))
    assert swarm.tracker.own.samples == 0
    assert swarm.tracker.swarm.samples_by_now < 10


def test_seconds_to_target(swarm):
    assert swarm.tracker.swarm.seconds_to_target == math.inf
    swarm.tracker.report(samples=20, rate=10.0)
    swarm.says("anna", samples=20, rate=30.0, age=-1.0)
    assert swarm.tracker.swarm.seconds_to_target == pytest.approx(60 / 40)
    swarm.says("anna", samples=20, rate=30.0, phase=VALIDATING)
    assert swarm.tracker.swarm.seconds_to_target == pytest.approx(60 / 10)


def test_members_are_peers_that_have_joined_and_still_speak(swarm):
    own = swarm.dht.peer_id
    assert swarm.members == {own}
    anna, ben = swarm.says("anna"), swarm.says("ben", client_mode=True)
    swarm.says("clara", phase=JOINING)
    swarm.says("dora", age=DEFAULT_TIMEOUTS.record_seconds + 1)
    assert swarm.members == {own, anna, ben}
    assert {member.peer_id for member in swarm.tracker.swarm.members if member.client_mode} == {ben}
    swarm.dht.store("", subkey_of("anna"), None, get_dht_time() + DEFAULT_TIMEOUTS.record_seconds, True)  # says goodbye
    swarm.tracker.exchange.look()
    assert swarm.members == {own, ben}


def test_a_peer_that_waits_at_an_earlier_step_takes_over_this_peers_state_first(swarm):
    """So two peers that begin with one checkpoint between them begin together."""
    own = swarm.dht.peer_id
    swarm.tracker.begin_step(20, LINEAGE)
    swarm.says("anna", step=0, phase=WAITING)
    assert swarm.members == {own}
    anna = swarm.says("anna", step=20, phase=WAITING)
    ben = swarm.says("ben", step=19)
    assert swarm.members == {own, anna, ben}, "records are a little old"
    swarm.tracker.begin_step(21, LINEAGE, frozenset([own, anna]))
    assert swarm.members == {own, anna, ben}, "one has begun with this peer, too"


def test_a_missed_peer_is_expected_again_once_it_has_caught_up(swarm):
    swarm.tracker.begin_step(5, LINEAGE)
    anna = swarm.says("anna", step=5)
    swarm.tracker.missed([anna])
    assert anna not in swarm.members
    swarm.says("anna", step=6)
    assert anna in swarm.members


def test_a_peer_that_never_comes_makes_no_group_wait_by_saying_that_it_has_come_back(swarm):
    def awaited(peer) -> bool:
        return any(member.awaited for member in swarm.tracker.swarm.members if member.peer_id == peer)

    anna, joined, waited = swarm.says("anna", step=3), get_dht_time() - 50, 0
    for step in range(3, 10):
        swarm.tracker.begin_step(step, LINEAGE)
        swarm.says("anna", step=step, joined=joined + step)
        if awaited(anna):
            waited += 1
            swarm.tracker.missed([anna])
            swarm.tracker.missed([anna])  # the round was tried again
    assert waited == MAX_WAITED_FOR
    swarm.tracker.met([anna], [anna])
    assert awaited(anna), "it has come without having been awaited"


def test_a_missed_peer_is_awaited_again_once_it_has_taken_over_this_peers_state(swarm):
    joined = get_dht_time() - 50

    def awaited(peer) -> list[bool]:
        return [member.awaited for member in swarm.tracker.swarm.members if member.peer_id == peer]

    anna = swarm.says("anna", step=3, joined=joined, samples=60, rate=1.0)
    swarm.tracker.begin_step(3, LINEAGE)
    assert awaited(anna) == [True]
    swarm.tracker.missed([anna])
    assert awaited(anna) == []
    swarm.tracker.begin_step(4, LINEAGE)
    swarm.says("anna", step=4, joined=joined, samples=60, rate=1.0)
    assert awaited(anna) == [False], "it trains in the other half of a divided network"
    assert swarm.tracker.swarm.samples_by_now == 0, "and its samples are of no use here"
    swarm.says("anna", step=4, joined=joined + 30)
    assert awaited(anna) == [True], "it has come back"
    swarm.says("anna", step=4, joined=joined)
    swarm.tracker.met([anna], {anna})
    assert awaited(anna) == [True], "it came"
    swarm.tracker.missed([anna])
    swarm.tracker.came_back()
    swarm.says("anna", step=5, joined=joined)
    assert awaited(anna) == [True], "this peer has come back to it"


def test_the_senior_is_the_peer_that_joined_first_and_can_be_dialled(swarm):
    joined = swarm.tracker.own.joined
    swarm.says("anna", joined=joined - 10, client_mode=True)
    assert not swarm.tracker.swarm.superiors
    swarm.tracker.report(joined=joined - 50)
    swarm.says("ben", joined=joined - 40)
    assert not swarm.tracker.swarm.superiors
    clara = swarm.says("clara", joined=joined - 60, lineage=OTHER)
    assert swarm.tracker.swarm.superiors == [clara]
    swarm.tracker.holds(0, OTHER)
    assert swarm.tracker.swarm.superiors == [], "with the same weights there is nothing to be taken over"


def test_a_member_of_the_last_group_leads_before_a_stranger_that_claims_to_be_older(swarm):
    own = swarm.tracker.peer_id
    anna = swarm.says("anna", joined=swarm.tracker.own.joined + 1e-3, age=-1.0)
    stranger = swarm.says("stranger", joined=1.0)

    def order() -> list[PeerID]:
        return [member.peer_id for member in sorted(swarm.tracker.swarm.members, key=lambda member: member.seniority)]

    assert order() == [stranger, own, anna], "of the peers that it does not know, this peer believes it"
    swarm.tracker.begin_step(1, LINEAGE, frozenset([own, anna]))
    assert order() == [own, anna, stranger]
    swarm.tracker.begin_step(2, LINEAGE, frozenset([own]))
    assert order() == [own, anna, stranger], "also in the other half of a network that was divided"
    swarm.says("anna", joined=2.0)
    assert order() == [own, stranger, anna], "now she says something else"


def test_a_member_that_claims_to_be_the_oldest_does_not_lead():
    """The organiser has signed when each peer became a member, in this order."""
    swarm = SaidSwarm(invites=True)
    own, now = swarm.tracker.peer_id, get_dht_time()
    ada, liar, eve = (peer_of(subkey_of(name)) for name in ("ada", "liar", "eve"))
    shown = {peer: swarm.organiser.admission(peer) for peer in (ada, liar, eve)}

    def says(name: str, joined: float, **fields) -> None:
        record = replace(RECORD, name=name, step=0, joined=joined, time=get_dht_time())
        swarm.says_bytes(name, shown[peer_of(subkey_of(name))].show(replace(record, **fields).to_bytes()))

    def order() -> list[PeerID]:
        return [member.peer_id for member in sorted(swarm.tracker.swarm.members, key=lambda member: member.seniority)]

    for name, joined in (("ada", now - 1), ("liar", 0.0), ("eve", now - 2)):
        says(name, joined)
    swarm.tracker.begin_step(1, LINEAGE, frozenset([own, ada, liar, eve]))
    assert order() == [own, ada, liar, eve]
    says("eve", 0.0)
    assert order() == [own, ada, liar, eve], "a peer that has come back is the junior"
    says("ada", back := get_dht_time())
    assert order() == [own, liar, eve, ada], "however early it became a member"
    swarm.tracker.begin_step(2, LINEAGE, frozenset([own, ada, liar, eve]))
    assert order() == [own, ada, liar, eve], "until it has been in a group again"
    for name, joined in (("ada", back), ("liar", 0.0), ("eve", 0.0)):
        says(name, joined, step=2, lineage=OTHER)
    assert swarm.tracker.swarm.superiors == [], "nor does its state count before ours"
    assert swarm.tracker.swarm.donors(2) == [ada, liar, eve]


def test_a_peer_that_has_handed_over_something_false_is_not_asked_again_and_met_all_the_same(swarm):
    liar, ben = swarm.says("liar", step=8), swarm.says("ben", step=7)
    assert swarm.tracker.swarm.donors(7) == [liar, ben]
    swarm.tracker.trust.handed_over_false(liar)
    swarm.tracker.cannot_hand_over(liar)
    assert swarm.tracker.swarm.donors(7) == [ben]
    assert swarm.tracker.swarm.latest_step == 7
    assert swarm.tracker.swarm.superiors == [ben]
    assert liar in swarm.members, "the others follow their leader"


def test_a_peer_that_waited_in_a_failed_round_waits_no_more(swarm):
    swarm.says("anna", phase=AVERAGING, age=0.1)
    assert swarm.tracker.swarm.step_is_over
    swarm.tracker.end_ahead(0, LINEAGE, 10)
    assert not swarm.tracker.swarm.step_is_over, "the record is older than the failure"
    swarm.says("anna", phase=AVERAGING)
    assert swarm.tracker.swarm.step_is_over, "it waits again"


def test_a_peer_that_comes_back_is_the_newest_member(swarm):
    follower = swarm.says("anna", joined=swarm.tracker.own.joined + 1e-3, age=-1.0)
    order = sorted(swarm.tracker.swarm.members, key=lambda member: member.seniority)
    assert order[-1].peer_id == follower
    while get_dht_time() <= order[-1].since:
        pass
    swarm.tracker.came_back()
    assert sorted(swarm.tracker.swarm.members, key=lambda member: member.seniority)[0].peer_id == follower
    told = PeerProgress.from_bytes(swarm.tracker.own.to_bytes(), get_dht_time())
    assert told.joined == swarm.tracker.own.joined, "others believe it"


def test_a_peer_that_comes_back_asks_peers_that_it_has_trained_with_and_no_strangers(swarm):
    """In an open run names cost nothing: strangers would agree with each other about any state."""
    said = Attestation(8, LINEAGE, b"D" * 16, ())
    ben = swarm.says("ben", step=8, attested=said)
    swarm.tracker.begin_step(8, LINEAGE, frozenset([swarm.tracker.peer_id, ben]))
    for number in range(3):
        swarm.says(f"stranger {number}", step=8, attested=Attestation(8, LINEAGE, b"F" * 16, ()))
    swarm.tracker.came_back()
    assert swarm.tracker.attestations(8, LINEAGE, []) == {ben: said}


def test_donors_are_full_peers_first_then_the_latest_then_the_senior(swarm):
    anna = swarm.says("anna", step=7)
    ben = swarm.says("ben", step=8)
    clara = swarm.says("clara", step=8, joined_before=20)
    dora = swarm.says("dora", step=9, client_mode=True)
    swarm.says("emil", step=9, phase=JOINING)
    swarm.says("fred", step=6)
    assert swarm.tracker.swarm.donors(min_step=7) == [clara, ben, anna]
    assert swarm.tracker.swarm.donors(min_step=9) == [dora], (
        "a peer that cannot be called is asked only if there is no other"
    )


def test_a_claim_makes_a_donor_until_it_proves_false(swarm):
    liar = swarm.says("liar", step=10**6)
    assert swarm.tracker.swarm.latest_step == 10**6
    assert swarm.tracker.swarm.donors(min_step=1) == [liar]
    swarm.tracker.trust.distrusted.add(liar)
    assert swarm.tracker.swarm.latest_step == 0
    assert swarm.tracker.swarm.donors(min_step=1) == []
    assert liar not in swarm.members
    swarm.says("liar", samples=10**6, phase=AVERAGING)
    assert not swarm.tracker.swarm.step_is_over


def test_a_peer_that_claims_to_be_ahead_has_to_answer_first(swarm, caplog):
    swarm.dht.answers = False
    for _ in range(2):
        liar = swarm.says("liar", step=10**6, samples=10**6, phase=AVERAGING)
    assert swarm.tracker.swarm.latest_step == 0
    assert not swarm.tracker.swarm.step_is_over
    assert swarm.members == {swarm.tracker.peer_id}
    assert swarm.tracker.swarm.superiors == []
    assert caplog.text.count("Ignoring liar, which claims to be at step 1000000 and does not answer") == 1

    ben = swarm.says("ben")
    swarm.tracker.begin_step(0, LINEAGE, frozenset({swarm.tracker.peer_id, ben}))
    swarm.says("ben", step=1)
    assert swarm.tracker.swarm.latest_step == 1, "it has been in a group with this peer"
    swarm.dht.answers = True
    swarm.says("clara", step=2)
    assert swarm.tracker.swarm.latest_step == 2
    swarm.says("liar", step=1, samples=5)
    assert liar not in swarm.members, "it is not called again so soon"
    swarm.tracker.holds(1, LINEAGE)
    assert liar in swarm.members, "at the same step it claims nothing"
    swarm.says("liar", step=50)
    swarm.tracker.report(phase=JOINING)
    assert swarm.tracker.swarm.latest_step == 2, "a peer that has trained is not a newcomer again"


def test_a_joiner_has_nothing_to_lose(swarm):
    swarm.dht.answers = False
    swarm.tracker.report(phase=JOINING)
    swarm.says("anna", step=500)
    assert swarm.tracker.swarm.latest_step == 500


# ---- how far other peers can be --------------------------------------------------------------------------------------


def test_step_and_lineage_are_reported_together():
    tracker = SaidSwarm().tracker
    with pytest.raises(TypeError):
        tracker.report(step=3)
    tracker.holds(3, OTHER, samples=5)
    assert (tracker.own.step, tracker.own.lineage, tracker.own.samples) == (3, OTHER, 5)


def test_a_newcomer_wants_a_claim_corroborated_where_another_peer_can(swarm, caplog):
    swarm.tracker.report(phase=JOINING)
    liar = swarm.says("liar", step=10**6)
    assert swarm.tracker.swarm.superiors == [liar], "no other peer says otherwise"
    anna = swarm.says("anna", step=500)
    for _ in range(2):
        assert swarm.tracker.swarm.superiors == swarm.tracker.swarm.donors(min_step=1) == [anna]
    assert swarm.tracker.swarm.latest_step == 500
    assert not swarm.tracker.swarm.may_hold(liar, 10**6)
    assert swarm.tracker.swarm.may_hold(anna, 500 + 60)
    assert caplog.text.count("Ignoring liar, which claims to be at step 1000000") == 1
    swarm.says("ben", step=10**6, phase=JOINING)
    assert swarm.tracker.swarm.latest_step == 500, "a peer that has just come itself is no witness"


def test_a_peer_that_has_trained_knows_about_how_far_the_others_can_be(swarm):
    own, joined = swarm.tracker.peer_id, get_dht_time() - 50
    ben = swarm.says("ben", step=10, joined=joined)
    swarm.tracker.begin_step(10, LINEAGE, frozenset({own, ben}))
    for name, step in (("liar", 10**6), ("accomplice", 10**6)):
        swarm.says(name, step=step)
    assert swarm.tracker.swarm.latest_step == 10, "no peer that this one knows is near that"
    assert swarm.members == {own, ben}
    swarm.says("ben", step=11, joined=joined)
    swarm.says("liar", step=12)
    assert swarm.tracker.swarm.donors(min_step=11) == [ben], "a stranger is not ahead of all peers that this one knows"
    liar = swarm.says("liar", step=11)
    assert swarm.tracker.swarm.donors(min_step=11) == [ben, liar], "peers that this one knows come first"
    swarm.says("ben", step=10 + MAX_AHEAD + 1, joined=joined)
    swarm.says("accomplice", step=10 + MAX_AHEAD + 1)
    assert swarm.tracker.swarm.latest_step == 11, "it knows one alone, and that one says too much"


def test_a_peer_that_was_away_for_a_night_believes_that_others_went_on(swarm, monkeypatch):
    """No peer that it knew still has its old joining time: each has come back meanwhile, for one average."""
    own, joined = swarm.tracker.peer_id, get_dht_time() - 50
    ben = swarm.says("ben", step=10, joined=joined)
    swarm.tracker.begin_step(10, LINEAGE, frozenset({own, ben}))
    swarm.says("ben", step=20_000, joined=joined + 1)
    assert swarm.tracker.swarm.latest_step == 10
    now = trust.seconds_since_boot()
    monkeypatch.setattr(trust, "seconds_since_boot", lambda: now + 8 * 3600)
    assert swarm.tracker.swarm.latest_step == 20_000
    assert swarm.tracker.swarm.donors(min_step=11) == [ben]
    swarm.tracker.begin_step(20_000, LINEAGE, frozenset({own, ben}))
    swarm.says("ben", step=40_000, joined=joined + 2)
    assert swarm.tracker.swarm.latest_step == 20_000, "it is there again"


def test_a_peer_that_has_spoilt_a_round_is_believed_again_only_after_a_group_with_it(swarm):
    own, joined = swarm.tracker.peer_id, get_dht_time() - 50
    ben, liar = swarm.says("ben", step=10, joined=joined), swarm.says("liar", step=10, joined=joined)
    swarm.tracker.begin_step(10, LINEAGE, frozenset({own, ben, liar}))
    swarm.says("liar", step=20, joined=joined)
    assert swarm.tracker.swarm.latest_step == 20
    swarm.tracker.blame({liar: Blame.SENT_NONSENSE})
    swarm.tracker.trust.blamed.end(liar)  # as when the time of the blame is over
    assert swarm.tracker.swarm.latest_step == 10


def test_a_peer_that_has_slept_for_long_believes_two_peers_that_it_knows(swarm):
    own, joined = swarm.tracker.peer_id, get_dht_time() - 50
    anna, ben = swarm.says("anna", step=10, joined=joined), swarm.says("ben", step=10, joined=joined)
    swarm.tracker.begin_step(10, LINEAGE, frozenset({own, anna, ben}))
    swarm.says("anna", step=5000, joined=joined)
    assert swarm.tracker.swarm.latest_step == 10
    swarm.says("ben", step=5003, joined=joined)
    assert swarm.tracker.swarm.latest_step == 5003
    swarm.says("anna", step=10**6, joined=joined)
    assert swarm.tracker.swarm.latest_step == 5003, "of two different claims the lower one counts"


def test_one_peer_alone_that_claims_to_be_ahead_is_no_reason_to_give_up_weights(swarm):
    own, joined = swarm.tracker.peer_id, get_dht_time() - 50
    anna = swarm.says("anna", step=10, joined=joined, lineage=LINEAGE)
    liar = swarm.says("liar", step=10, joined=joined)
    swarm.tracker.begin_step(10, LINEAGE, frozenset({own, anna, liar}))
    swarm.says("liar", step=30, joined=joined, lineage=OTHER)
    now = swarm.tracker.swarm
    assert (now.latest_step, now.seconded_step) == (30, 10)
    swarm.says("anna", step=12, joined=joined)
    now = swarm.tracker.swarm
    assert now.seconded_step == 12
    assert now.donors(min_step=11) == [anna, liar], "a peer that is further than a second one says comes last"
    swarm.says("anna", step=12, joined=joined, phase=JOINING)
    assert swarm.tracker.swarm.seconded_step == 30, "of two, one is behind itself: this peer knows one alone"


def test_a_peer_with_another_history_than_two_that_agree_is_the_odd_one_out(swarm):
    own, joined = swarm.tracker.peer_id, get_dht_time() - 50
    peers = [swarm.says(name, step=10, joined=joined, lineage=LINEAGE) for name in ("anna", "ben")]
    swarm.tracker.begin_step(10, LINEAGE, frozenset({own, *peers}))
    swarm.tracker.begin_step(11, OTHER, frozenset({own}))
    assert not swarm.tracker.is_odd_one_out, "they are where this peer was"
    swarm.says("anna", step=11, joined=joined, lineage=THIRD)
    assert not swarm.tracker.is_odd_one_out, "she is alone with it"
    swarm.says("ben", step=11, joined=joined, lineage=THIRD)
    assert swarm.tracker.is_odd_one_out
    swarm.says("ben", step=11, joined=joined, lineage=THIRD, phase=JOINING)
    assert not swarm.tracker.is_odd_one_out
    swarm.says("eve", step=11, joined=joined, lineage=THIRD)
    assert not swarm.tracker.is_odd_one_out, "this peer has not trained with her"
    swarm.says("ben", step=11, joined=joined, lineage=THIRD, helps=True)
    assert not swarm.tracker.is_odd_one_out, "he does not get further by himself"


def test_a_peer_that_went_on_alone_does_not_lead_while_it_is_left_out(swarm):
    anna, ben = swarm.says("anna"), swarm.says("ben")
    swarm.tracker.blame({anna: Blame.GOES_ON_ALONE, ben: Blame.TOO_SLOW})
    assert swarm.tracker.trust.left_out_leaders == {anna}
    swarm.tracker.trust.blamed.end(anna)  # as when the time of the blame is over
    assert swarm.tracker.trust.left_out_leaders == frozenset()


def test_holders_of_weights_are_known_for_a_while(swarm):
    own, joined = swarm.tracker.peer_id, get_dht_time() - 50
    anna, ben = (swarm.says(name, step=10, joined=joined, lineage=LINEAGE) for name in ("anna", "ben"))
    swarm.says("eve", step=10, joined=joined, lineage=LINEAGE)
    swarm.tracker.begin_step(10, LINEAGE, frozenset({own, anna, ben}))
    assert swarm.tracker.holders(10, LINEAGE, []) == {anna, ben}, "this peer has not trained with eve"
    swarm.says("anna", step=11, joined=joined, lineage=OTHER)
    assert swarm.tracker.holders(11, OTHER, []) == {anna}
    assert swarm.tracker.holders(10, LINEAGE, [ben]) == {anna}, "she has said so before"
    assert swarm.tracker.holders(11, LINEAGE, []) == set()


def test_no_peer_is_further_than_the_run_is_long(caplog):
    swarm = SaidSwarm(max_step=1000)
    swarm.tracker.report(phase=JOINING)
    swarm.says("liar", step=1001)
    assert swarm.tracker.swarm.superiors == []
    assert "this run ends after 1000 updates" in caplog.text
    anna = swarm.says("anna", step=1000)
    assert swarm.tracker.swarm.superiors == [anna]


def test_a_peer_that_fails_again_is_distrusted_for_longer(swarm, monkeypatch):
    anna, now = swarm.says("anna", step=7), 100.0
    monkeypatch.setattr("swarm.membership.backoff.time.monotonic", lambda: now)
    for seconds in (10, 20, 40, 60, 60):
        swarm.tracker.trust.distrusted.add(anna)
        now += seconds - 1
        assert swarm.tracker.swarm.donors(min_step=1) == []
        now += 2
        assert swarm.tracker.swarm.donors(min_step=1) == [anna]
    swarm.tracker.trust.distrusted.end(anna)
    swarm.tracker.trust.distrusted.add(anna)
    now += 11
    assert swarm.tracker.swarm.donors(min_step=1) == [anna]


def test_an_outbound_only_peer_counts_for_full_ones_if_it_is_ahead_of_them(swarm):
    anna = swarm.says("anna", step=5, client_mode=True, joined_before=20)
    assert swarm.tracker.swarm.latest_step == 5
    assert swarm.tracker.swarm.superiors == swarm.tracker.swarm.donors(min_step=1) == [anna]
    swarm.tracker.cannot_hand_over(anna)
    assert swarm.tracker.swarm.latest_step == 0
    assert anna in swarm.members, "it has not promised anything"
    swarm.tracker.holds(5, LINEAGE)
    assert swarm.tracker.swarm.superiors == [], "at the same step the others follow a server-mode peer"


def test_outbound_only_peers_cannot_ask_each_other():
    swarm = SaidSwarm(client_mode=True)
    swarm.says("anna", step=10**6, client_mode=True)
    assert swarm.tracker.swarm.latest_step == 0
    assert swarm.tracker.swarm.superiors == swarm.tracker.swarm.donors(min_step=0) == []


def test_a_person_that_sets_the_clock_is_told_what_it_may_mean(swarm, caplog, monkeypatch):
    monkeypatch.setattr("swarm.membership.record_exchange.OwnClock.set_by_seconds", lambda self: 40.2)
    swarm.tracker.exchange.look_at_clock()
    assert "has just changed by +40 s" in caplog.text


def test_nonsense_in_the_dht_is_ignored(swarm):
    anna = swarm.says("anna", samples=10)
    chance = random.Random(0)
    for number in range(20):
        swarm.says_bytes(f"liar {number}", chance.randbytes(40))
    swarm.says_bytes("no bytes", "text")
    swarm.dht.records["no bytes either"] = ValueWithExpiration(RECORD.to_bytes(), get_dht_time() + 10)
    swarm.dht.records[b"no owner"] = ValueWithExpiration(RECORD.to_bytes(), get_dht_time() + 10)
    swarm.dht.records[subkey_of("no entry")] = 7
    swarm.tracker.exchange.look()
    assert set(swarm.tracker.others) == {anna}
