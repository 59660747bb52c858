"""Admission to a run by invitation, and the message to a peer that is refused."""

import logging
import time
from functools import partial

import pytest

from swarm.network.signed_records import peer_of
from swarm.protocol import admission, signed_lists
from swarm.protocol.admission import OPEN, SHOWN_BYTES, Admission, NotAMember
from swarm.protocol.certificates import NotSigned, Removals, Role
from swarm.protocol.signed_lists import REMOVED
from tests.helpers.owners import Organiser, subkey_of

ADA, BOB = (peer_of(subkey_of(name)) for name in ("ada", "bob"))
ORGANISER = Organiser()


@pytest.fixture
def here() -> Admission:
    """The admission of the process that is asked."""
    return Admission(ORGANISER.authority)


def test_in_an_open_run_nothing_is_shown_and_every_peer_is_admitted():
    assert OPEN.show(b"hello") == OPEN.admit(b"hello", ADA) == b"hello"
    assert OPEN.is_open
    assert not OPEN.is_removed(ADA)
    assert OPEN.why_this_peer_was_removed is None


def test_a_member_shows_its_certificate_with_what_it_sends(here):
    ada = ORGANISER.admission(ADA)
    shown = ada.show(b"hello")
    assert here.admit(shown, ADA) == b"hello"
    assert len(shown) <= SHOWN_BYTES + len(b"hello")
    assert here.member(ADA) == ada.own
    assert here.member(BOB) is None


@pytest.mark.parametrize(
    ("show", "said"),
    [
        (lambda: b"hello", "shows no certificate"),
        (lambda: ORGANISER.admission(BOB).show(b"hello"), "of another peer"),
        (lambda: Organiser().admission(ADA).show(b"hello"), "was not signed by the organiser"),
        (lambda: Organiser("other").admission(ADA).show(b"hello"), "was not signed by the organiser"),
        (lambda: ORGANISER.admission(ADA, end=-1).show(b"hello"), "has ended"),
        (lambda: ORGANISER.admission(ADA, roles=Role.WATCH).show(b"hello"), "does not allow this"),
        (lambda: ORGANISER.admission(ADA, roles=Role(0)).show(b"hello"), "does not allow this"),
    ],
)
def test_a_peer_that_is_no_member_is_refused_and_said_so_once(here, show, said, caplog):
    shown = show()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(NotAMember, match=said):
                here.admit(shown, ADA)
    assert sum(said in line for line in caplog.messages) == 1


def test_a_removed_member_is_refused_and_told_why(here):
    ada, bob = ORGANISER.admission(ADA), ORGANISER.admission(BOB)
    shown = ada.show(b"hello")
    here.admit(shown, ADA)
    signed = ORGANISER.remove(ada, why="it sent noise")
    assert here.lists.take(REMOVED, signed)
    assert here.is_removed(ADA)
    assert here.removed([ADA, BOB]) == [ADA]
    with pytest.raises(NotAMember, match="removed by the organiser: it sent noise"):
        here.admit(shown, ADA)
    assert here.admit(bob.show(b"hello"), BOB) == b"hello"
    assert ada.lists.take(REMOVED, signed)
    assert ada.why_this_peer_was_removed == "it sent noise"
    assert bob.why_this_peer_was_removed is None


def test_the_reason_of_a_deputy_moves_no_terminal(here, caplog):
    ada = ORGANISER.admission(ADA)
    list_ = Removals("run", int(1000 * time.time()), {ada.own.serial: "\x1b]0;mine\x07noise\x1b[2J"})
    here.lists.take(REMOVED, list_.signed_by(ORGANISER.signer))
    with caplog.at_level(logging.WARNING), pytest.raises(NotAMember, match="]0;minenoise"):
        here.admit(ada.show(b""), ADA)
    (said,) = caplog.messages
    assert said.isprintable()
    assert "organiser: ]0;minenoise[2J (said once)" in said


def test_a_removed_peer_gets_no_more_time_from_a_further_list(here, monkeypatch):
    """A leader that has not heard of a removal may finish its group. Otherwise a liar could do so with each removal."""
    now = [1000.0]
    monkeypatch.setattr(signed_lists.time, "monotonic", lambda: now[0])
    ada, bob = ORGANISER.admission(ADA), ORGANISER.admission(BOB)
    admit = {
        peer: partial(here.admit, own.show(b""), peer, late_seconds=10) for peer, own in {ADA: ada, BOB: bob}.items()
    }
    here.lists.take(REMOVED, ORGANISER.remove(ada))
    admit[ADA]()
    now[0] += 60
    here.lists.take(REMOVED, ORGANISER.remove(bob))
    with pytest.raises(NotAMember, match="removed"):
        admit[ADA]()
    admit[BOB]()
    now[0] += 11
    with pytest.raises(NotAMember, match="removed"):
        admit[BOB]()


def test_an_older_list_changes_nothing(here):
    ada, bob = ORGANISER.admission(ADA), ORGANISER.admission(BOB)
    older, newer = ORGANISER.remove(ada), ORGANISER.remove(bob)
    assert here.lists.take(REMOVED, newer)
    assert not here.lists.take(REMOVED, older)
    assert not here.lists.take(REMOVED, newer)
    assert here.lists.signed(REMOVED) == newer
    with pytest.raises(NotAMember):
        here.admit(bob.show(b""), BOB)


def test_a_list_of_another_signer_is_refused(here):
    other = Organiser()
    with pytest.raises(NotSigned):
        here.lists.take(REMOVED, other.remove(other.admission(ADA)))
    with pytest.raises(NotSigned):
        OPEN.lists.take(REMOVED, ORGANISER.remove())


def test_of_many_certificates_the_latest_are_remembered(here, monkeypatch):
    monkeypatch.setattr(admission, "MAX_REMEMBERED", 5)
    many = [ORGANISER.admission(ADA).show(b"") for _ in range(8)]
    for shown in many:
        here.admit(shown, ADA)
    assert [here.has_seen(shown, ADA) for shown in many] == [False] * 3 + [True] * 5
