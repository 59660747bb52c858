"""Names cost a stranger nothing. The memory that a peer keeps of names does not grow with their number."""

import gc
import math
import weakref

from hivemind.p2p import PeerID

from swarm.membership import failure_detector, no_shows
from swarm.membership.failure_detector import FailureDetector
from swarm.membership.no_shows import NoShows


def name(number: int) -> PeerID:
    return PeerID(bytes([18, 32]) + number.to_bytes(32, "big"))


def test_of_missed_peers_the_latest_are_remembered(monkeypatch):
    monkeypatch.setattr(no_shows, "MAX_REMEMBERED", 100)
    missed = NoShows()
    for number in range(1000):
        missed.note(name(number), number, math.nan, is_proven=False)
        missed.note(name(0), number, 7.0, is_proven=True)
    assert [missed.missed_at(name(number)) for number in (0, 1, 900, 901, 999)] == [999, -1, -1, 901, 999]
    assert not missed.is_over(name(0), 7.0), "a peer that is missed again and again is not forgotten"


def test_of_heard_peers_the_latest_are_remembered(monkeypatch):
    monkeypatch.setattr(failure_detector, "MAX_HEARD", 100)
    detector, peers = FailureDetector(None, "run"), [name(number) for number in range(1000)]
    for peer in peers:
        detector.heard(peer)
    kept = [weakref.ref(peer) for peer in peers]
    del peers, peer
    gc.collect()
    assert [reference() is not None for reference in kept] == [False] * 900 + [True] * 100
