"""Whether a peer believes that the swarm has gone on without it. The claim of one member is not enough."""

import pytest
from hivemind.utils import get_dht_time

from swarm.membership.progress_record import AVERAGING, JOINING
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.training.joining import corroboration
from swarm.training.joining.corroboration import Attendance, Corroboration
from tests.helpers.records import SaidSwarm

OURS, NEXT, LATER, MADE_UP = (letter * LINEAGE_BYTES for letter in (b"O", b"N", b"L", b"M"))
JOINED = get_dht_time() - 50


class Told(Corroboration):
    """A peer at step 10, in time. Its leader says that the swarm has gone on; the other peers were in its group."""

    def __init__(self, *others: str, came_in_time: bool = True, failed_groups=(), helps: bool = False):
        self.swarm = SaidSwarm()
        self.swarm.tracker.report(helps=helps)
        self.peers = {name: self.say(name, 10, OURS) for name in (*others, "leader")}
        group = frozenset({self.swarm.tracker.peer_id, *self.peers.values()})
        self.swarm.tracker.begin_step(10, OURS, group)
        super().__init__(self.swarm.tracker, self.peers["leader"], group if came_in_time else (), failed_groups)

    def say(self, name: str, step: int, lineage: bytes, **fields):
        return self.swarm.says(name, step=step, lineage=lineage, joined=JOINED, **fields)


@pytest.fixture
def speaks_later(monkeypatch):
    """Make all later statements younger than the leader's claim."""
    monkeypatch.setattr(corroboration, "TOLERATED_SECONDS", 0.0)


def test_updates_are_made_up_to_the_last_one_that_another_peer_has_made():
    told = Told("anna", "ben")
    anna, leader = told.peers["anna"], told.peers["leader"]
    lineages = [NEXT, LATER, MADE_UP]
    assert told.num_confirmed(leader, 10, lineages) == 0
    told.say("leader", 13, MADE_UP)
    assert told.num_confirmed(leader, 10, lineages) == 0, "its own word"
    told.say("anna", 12, LATER)
    assert told.num_confirmed(leader, 10, lineages) == 2
    assert told.num_confirmed(leader, 10, [MADE_UP, MADE_UP]) == 0
    assert told.num_confirmed(anna, 10, [NEXT, LATER]) == 0, "her own word"
    told.say("leader", 12, LATER)
    assert told.num_confirmed(anna, 10, [NEXT, LATER]) == 2, "the leader is a second one, if another peer hands it over"
    assert told.confirms(leader, 12, LATER)
    assert not told.confirms(leader, 13, MADE_UP)
    assert told.is_witness_past(11)
    assert not told.is_witness_past(12)


@pytest.mark.parametrize("told", [lambda: Told(), lambda: Told("anna", came_in_time=False)], ids=["two peers", "late"])
def test_a_peer_that_trains_with_one_other_or_comes_late_believes_that_one(told):
    told = told()
    assert not told.is_needed
    assert told.num_confirmed(told.peers["leader"], 10, [MADE_UP, MADE_UP]) == 2
    assert told.confirms(told.peers["leader"], 12, MADE_UP)
    assert not told.is_denied


def test_a_claim_is_denied_when_all_have_spoken_since_and_none_has_gone_on(speaks_later):
    told = Told("anna", "ben")
    assert told.is_needed
    assert not told.is_denied, "what they say is older"
    told.say("leader", 11, MADE_UP)
    told.say("anna", 10, OURS)
    assert not told.is_denied, "ben may have gone on"
    told.say("ben", 10, OURS, phase=JOINING)
    assert told.is_denied, "he has been told the same"
    assert not told.is_confirmed


def test_a_peer_that_has_denied_the_claim_and_goes_to_a_round_then_has_not_missed_one(speaks_later):
    """The round may be this peer's own."""
    told = Told("anna")
    told.say("anna", 10, OURS)
    assert told.is_denied
    told.say("anna", 10, OURS, phase=AVERAGING)
    assert (told.is_denied, told.is_confirmed) == (True, False)
    told.say("anna", 11, NEXT)
    assert (told.is_denied, told.is_confirmed) == (False, True)


@pytest.mark.parametrize("fields", [{"phase": AVERAGING}, {"ahead": True}], ids=["in a round", "overlapped"])
def test_a_claim_is_confirmed_by_a_peer_that_is_in_the_round_that_this_peer_has_missed(speaks_later, fields):
    told = Told("anna", "ben")
    told.say("anna", 10, OURS)
    told.say("ben", 10, OURS, **fields)
    assert (told.is_denied, told.is_confirmed) == (False, True)


def test_a_peer_with_other_weights_of_the_same_step_denies_nothing(speaks_later):
    told = Told("anna")
    told.say("anna", 10, NEXT)
    assert (told.is_denied, told.is_confirmed) == (False, False)


def test_a_peer_that_has_fallen_silent_is_not_asked(speaks_later):
    """The silent peer may have died right after an update that it has made with the leader."""
    told = Told("anna", "ben")
    told.say("ben", 10, OURS)
    told.say("anna", 10, OURS, age=6.0, phase=AVERAGING)
    assert told.is_denied
    told.say("ben", 10, OURS, age=6.0)
    assert not told.is_needed


def test_an_average_of_a_round_that_this_peer_has_been_in_needs_no_second_statement(speaks_later):
    """Only the leader has the whole average, so all others have to take it over from there."""
    told = Told("anna", failed_groups=[NEXT])
    told.say("anna", 10, OURS)
    assert told.is_denied
    told.say("leader", 11, NEXT)
    assert (told.is_denied, told.is_confirmed) == (False, True)
    assert told.num_confirmed(told.peers["leader"], 10, [NEXT, LATER]) == 1
    assert not told.confirms(told.peers["leader"], 12, NEXT)


def test_helpers_deny_nothing_to_each_other():
    told = Told("anna", helps=True)
    told.say("anna", 10, OURS, helps=True)
    assert not told.is_needed, "a peer that trains leads them both"
    told.say("anna", 10, OURS)
    assert told.is_needed


def test_a_peer_is_in_time_unless_it_does_something_else_for_long(monkeypatch):
    now = 100.0
    monkeypatch.setattr("swarm.training.joining.corroboration.time.monotonic", lambda: now)
    attendance = Attendance(patience_seconds=5.0)
    assert not attendance.is_in_time, "it has not trained yet"
    attendance.begin_step()
    for seconds in (1.0, 2.0):
        now += seconds
        attendance.look()
    assert attendance.is_in_time
    now += 20.0
    attendance.resume()
    attendance.look()
    assert attendance.is_in_time, "it was in a round"
    now += 3.0
    attendance.look()
    assert not attendance.is_in_time, "it has validated, or computed for that long"
    now += 0.1
    attendance.look()
    assert not attendance.is_in_time
    attendance.begin_step()
    assert attendance.is_in_time


def test_a_peer_that_comes_in_time_is_told_of_its_last_round_by_others_and_a_late_peer_is_not(monkeypatch):
    now = 100.0
    monkeypatch.setattr("swarm.training.joining.corroboration.time.monotonic", lambda: now)
    told, attendance = Told("anna"), Attendance(patience_seconds=5.0)
    leader, tracker = told.peers["leader"], told.swarm.tracker
    assert not attendance.corroboration_for(leader, tracker).is_needed, "it was in no round yet"
    attendance.begin_step()
    attendance.go_to_round()
    now += 20.0
    attendance.look()
    assert attendance.corroboration_for(leader, tracker).is_needed, "it was in time when it went there"
    attendance.note_failed(b"")
    attendance.note_failed(NEXT)
    assert attendance.corroboration_for(leader, tracker).confirms(leader, 11, NEXT)
    assert not attendance.corroboration_for(leader, tracker).confirms(leader, 11, b"")
    attendance.note_update()
    assert not attendance.corroboration_for(leader, tracker).confirms(leader, 11, NEXT)
    attendance.go_to_round()
    assert not attendance.corroboration_for(leader, tracker).is_needed, "it is late"
    attendance.begin_step()
    attendance.go_to_round()
    attendance.listen()
    assert not attendance.corroboration_for(leader, tracker).is_needed, "it was in this round before it had the weights"
