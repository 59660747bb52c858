"""Names cost a stranger nothing. The memory that a peer keeps of names does not grow with their number."""

import asyncio
import gc
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

from hivemind.p2p import PeerID

from swarm.membership import failure_detector, liveness_probe, no_shows
from swarm.membership.failure_detector import FailureDetector
from swarm.membership.liveness_probe import LivenessProbe
from swarm.membership.no_shows import NoShows
from tests.helpers.records import RECORD
from tests.helpers.virtual_time import run_in_virtual_time


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


def test_of_those_who_are_there_the_latest_are_remembered(monkeypatch):
    monkeypatch.setattr(liveness_probe, "MAX_THERE", 100)
    probe = LivenessProbe(None, "run", lambda: None)
    ahead = {name(number): replace(RECORD, step=RECORD.step + 1) for number in range(300)}
    group = [name(number) for number in range(10)]
    for number in range(10, 300):
        probe.met([name(number)])
        if number % 50 == 0:
            probe.met(group)
    assert ahead.keys() - probe.doubted(RECORD, ahead, has_trained=True) == {*group, *map(name, range(210, 300))}


def test_of_those_who_never_call_the_latest_are_remembered(monkeypatch):
    monkeypatch.setattr(failure_detector, "MAX_NEVER_CALL", 100)
    detector = FailureDetector(None, "run")
    for number in range(1000):
        detector.did_not_call(name(number))
        detector.did_not_call(name(0))
    never_call = [number for number in range(1000) if detector.never_calls(name(number))]
    assert never_call == [0, *range(901, 1000)]


def test_doubts_about_a_peer_end_with_its_watch(monkeypatch):
    async def never(*_, **__) -> None:
        await asyncio.Event().wait()

    async def watch_all() -> None:
        detector = FailureDetector(SimpleNamespace(call_protobuf_handler=never), "run")
        doubt_seconds = detector.timeouts.look_seconds + detector.timeouts.doubt_seconds
        watches = {name(number): asyncio.ensure_future(detector.lost(name(number), True)) for number in range(100)}
        await asyncio.wait(watches.values(), timeout=doubt_seconds + detector.timeouts.look_seconds)
        assert all(detector.doubts(peer) for peer in watches)
        for watch in [*watches.values()][:50]:
            watch.cancel()
        await asyncio.wait(watches.values(), timeout=10 * detector.timeouts.first_silence_seconds)
        assert all(watch.done() for watch in watches.values()), "the rest are lost"
        assert not any(detector.doubts(peer) for peer in watches)

    run_in_virtual_time(watch_all, monkeypatch, seconds=200)
