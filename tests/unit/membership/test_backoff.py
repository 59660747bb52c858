"""A peer that is left out comes back after a while, and later if it did something worse or did it again."""

import pytest
from hivemind.p2p import PeerID

from swarm.membership import backoff
from swarm.membership.backoff import BACKOFF_SECONDS, BLAME_SECONDS, MAX_BLAME_SECONDS, Backoff, BlameBackoff
from swarm.protocol.messages import Blame

LIAR, OTHER = PeerID(b"liar"), PeerID(b"other")
PROVEN = next(what for what in Blame if what.is_proven)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(backoff.time, "monotonic", lambda: now[0])
    return now


def seconds_left_out(peers: Backoff, clock: list[float]) -> float:
    begin = clock[0]
    while LIAR in peers:
        clock[0] += 1.0
    return clock[0] - begin


@pytest.mark.parametrize("what", [what for what in Blame if not what.is_proven])
def test_a_peer_is_left_out_for_longer_each_time_up_to_a_limit(clock, what):
    peers, lengths = BlameBackoff(), []
    for _ in range(8):
        peers.blame(LIAR, what)
        lengths.append(seconds_left_out(peers, clock))
    assert lengths == sorted(lengths)
    assert lengths[1] > lengths[0]
    assert lengths[-1] == pytest.approx(MAX_BLAME_SECONDS, abs=1.0)
    assert OTHER not in peers


@pytest.mark.parametrize("what", [what for what in Blame if what.is_proven])
def test_a_peer_that_is_proven_guilty_does_not_come_back(clock, what):
    peers = BlameBackoff()
    peers.blame(LIAR, what)
    peers.blame(LIAR, Blame.TOO_SLOW)
    peers.end(LIAR)
    clock[0] += 1e6
    assert LIAR in peers
    assert OTHER not in peers


def test_a_leader_that_hung_once_may_be_honest(clock):
    hung, lied = BlameBackoff(), BlameBackoff()
    hung.blame(LIAR, Blame.STUCK)
    lied.blame(LIAR, Blame.SENT_NONSENSE)
    assert seconds_left_out(hung, clock) == pytest.approx(BACKOFF_SECONDS, abs=1.0)
    assert seconds_left_out(lied, clock) == pytest.approx(BLAME_SECONDS - BACKOFF_SECONDS, abs=2.0)


def test_a_peer_that_does_what_it_promised_is_back_at_once(clock):
    peers = Backoff()
    peers.add(LIAR)
    peers.end(LIAR)
    assert LIAR not in peers


def test_a_peer_that_hung_first_and_lied_then_is_left_out_for_as_long_as_a_liar(clock):
    peers = BlameBackoff()
    peers.blame(LIAR, Blame.STUCK)
    peers.blame(LIAR, Blame.SENT_NONSENSE)
    assert seconds_left_out(peers, clock) == pytest.approx(BLAME_SECONDS, abs=1.0)


def test_of_too_many_peers_the_one_is_forgotten_that_comes_back_first(clock, monkeypatch):
    monkeypatch.setattr(backoff, "MAX_REMEMBERED", 3)
    peers, names = BlameBackoff(), [PeerID(b"%d" % number) for number in range(10)]
    peers.blame(names[0], Blame.SENT_NONSENSE)
    peers.blame(names[1], PROVEN)
    peers.blame(LIAR, Blame.STUCK)
    clock[0] += BACKOFF_SECONDS + 1.0
    peers.blame(LIAR, Blame.STUCK)
    peers.blame(names[2], Blame.SENT_NONSENSE)
    assert [name for name in (*names, LIAR) if name in peers] == names[:3], "they are left out for longer"
    for name in names:
        peers.blame(name, PROVEN)
    assert [name for name in names if name in peers] == names[-3:]


def test_a_backoff_that_is_over_still_doubles_among_many_others(clock, monkeypatch):
    monkeypatch.setattr(backoff, "MAX_REMEMBERED", 3)
    peers = Backoff()
    peers.add(OTHER)
    clock[0] += 1.0
    peers.add(LIAR)
    clock[0] += BACKOFF_SECONDS + 1.0
    for name in (b"a", b"b"):
        peers.add(PeerID(name))
    peers.add(LIAR)
    assert seconds_left_out(peers, clock) == pytest.approx(2 * BACKOFF_SECONDS, abs=1.0)
