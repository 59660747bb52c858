"""Whether a peer believes that the swarm has gone on without it: not because one member says so."""

import pytest
from hivemind.utils import get_dht_time

from swarm.membership.progress_record import AVERAGING, JOINING
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.training.joining import second_word
from swarm.training.joining.second_word import SecondWord
from tests.helpers.records import SaidSwarm

OURS, NEXT, MADE_UP = (letter * LINEAGE_BYTES for letter in (b"O", b"N", b"M"))
JOINED = get_dht_time() - 50


class Told:
    """A peer at step 10, whose leader says that the swarm has gone on; it has trained with the others."""

    def __init__(self, *others: str):
        self.swarm, self.others = SaidSwarm(), others
        self.peers = {name: self.say(name, 10, OURS) for name in (*others, "leader")}
        self.swarm.tracker.begin_step(10, OURS, frozenset({self.swarm.tracker.peer_id, *self.peers.values()}))
        self.word = SecondWord(self.swarm.tracker, self.peers["leader"])

    def say(self, name: str, step: int, lineage: bytes, **fields):
        return self.swarm.says(name, step=step, lineage=lineage, joined=JOINED, **fields)

    def is_there(self, lineage: bytes) -> bool:
        return self.word.is_there(self.peers["leader"], lineage)


@pytest.fixture
def speaks_later(monkeypatch):
    """What is said from now on is younger than what the leader has said."""
    monkeypatch.setattr(second_word, "MARGIN_SECONDS", 0.0)


def test_an_average_is_used_when_another_one_has_made_the_same_update():
    told = Told("anna", "ben")
    told.say("leader", 11, MADE_UP)
    assert not told.is_there(MADE_UP)
    told.say("anna", 11, NEXT)
    assert not told.is_there(MADE_UP), "she has made another one"
    assert told.is_there(NEXT)
    told.say("anna", 12, OURS)
    assert told.is_there(NEXT), "she has gone on from it"


def test_who_holds_its_weights_alone_believes_one():
    told = Told("anna")
    told.say("anna", 9, NEXT)
    assert told.is_there(MADE_UP)
    assert not told.word.is_denied


def test_it_is_denied_when_all_have_spoken_since_and_none_has_gone_on(speaks_later):
    told = Told("anna", "ben")
    assert not told.word.is_denied, "what they say is older"
    told.say("anna", 10, OURS)
    assert not told.word.is_denied, "ben may have gone on"
    told.say("ben", 10, OURS, phase=JOINING)
    assert told.word.is_denied, "he has been told the same"


@pytest.mark.parametrize("fields", [{"phase": AVERAGING}, {"ahead": True}], ids=["in a round", "overlapped"])
def test_it_is_not_denied_while_somebody_is_in_the_round_that_this_peer_has_missed(speaks_later, fields):
    told = Told("anna", "ben")
    told.say("anna", 10, OURS)
    told.say("ben", 10, OURS, **fields)
    assert not told.word.is_denied


def test_it_is_not_denied_by_the_leader_or_when_another_one_is_further(speaks_later):
    told = Told("anna")
    told.say("leader", 10, OURS)
    told.say("anna", 11, NEXT)
    assert not told.word.is_denied
