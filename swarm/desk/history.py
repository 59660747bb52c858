"""What has been seen of a run so far: its peers, its curves and its events. It uses neither the network nor the page.

Everything in it comes from records of strangers and grows with time, so everything has a bound.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import msgspec

from recipe.run_folder import write_json
from swarm.desk.seen import LOST_SECONDS, Event, PeerSeen, Point, Test
from swarm.desk.timeline import Timeline
from swarm.membership.progress_record import JOINING, PAUSED, WAITING, PeerProgress, step_of_most, under_way
from swarm.network.known_peers import usable

MISSED_LOOKS = 2
"""Looks at which a peer's record has to be missing before the peer counts as having left."""
SHOWN_SECONDS = 3600.0
"""How long a peer that is gone stays in the list of peers."""
LOWER_SECONDS = 60.0
"""How long most peers have to be at an earlier update before the run counts as having gone back to it."""
UNSEEN_SECONDS = 60.0
"""Longest time between two looks for which peers get credit. Updates after a longer gap are credited to no peer."""
CREDIT_TIMES = 3.0
"""Between two looks, peers get credit for at most so many times what they say they compute: records are seconds old."""
MAX_POINTS, MAX_EVENTS, MAX_PEERS, MAX_ADVANCES, MAX_TESTS = 1000, 200, 4096, 50, 1000
TRAFFIC_SECONDS = 30.0
"""Time over which the swarm's traffic is averaged: rounds send in bursts."""
PACE_SECONDS = 10.0
"""How long updates have to be seen before their pace is told."""
MAX_NAMES = 5
"""Names of peers that one event lists."""


@dataclass
class History:
    """What has been seen of a run.

    Args:
        key: prefix of the run's keys in the DHT, so that a file of another run is not continued
        target_batch_size: samples of an update
        began_at: when the desk first looked, seconds since 1970
        looked_at: when the swarm last answered, seconds since 1970
        step: updates that most peers have made; None before a peer was seen
        updated_at: when the last update was seen, seconds since 1970
        still_since: last time at which no update was expected: the run was paused, or no peer there was training
        lower_since: since when most peers are at an earlier update than `step`; None if they are not
        loss: last known median of the peers
        accuracy: last known median of the peers
        lowest_loss: lowest median seen, since the run last went back
        finite_at_step: last step at which a peer had a finite loss
        point_seconds: time between two points; it doubles each time that there are too many
        points: of the curves
        events: what happened, the newest last
        peers: all peers that are remembered, by peer id
        addresses: of peers, so that the desk finds the swarm again after others have left
        timeline: the last minutes
        tests: of the weights, as the peers that made them say
    """

    key: str
    target_batch_size: int
    began_at: float
    looked_at: float | None = None
    step: int | None = None
    updated_at: float | None = None
    still_since: float | None = None
    lower_since: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    lowest_loss: float | None = None
    finite_at_step: int = 0
    point_seconds: float = 2.0
    points: list[Point] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    peers: dict[str, PeerSeen] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    tests: list[Test] = field(default_factory=list)

    def __post_init__(self):
        self._advances: deque[tuple[float, int]] = deque(maxlen=MAX_ADVANCES)
        """When updates were seen, and their steps, since the desk was started or the run last rested."""
        self._rested = False
        self._attentive_since = -math.inf
        """Since when there was no long gap between two looks. A peer does not count as lost because of a gap."""
        self._traffic: deque[tuple[float, int]] = deque()
        """When the last looks were, and the bytes that all peers have sent since the look before."""

    # ---- looking ------------------------------------------------------------------------------------------------

    def look(self, records: Mapping[str, PeerProgress], now: float, is_paused: bool = False) -> None:
        """Take in what the peers say now.

        Args:
            records: by peer id
            now: seconds since 1970
            is_paused: the organiser has paused the run, whatever peers say
        """
        unseen = now - (self.looked_at or now)
        if not 0 <= unseen <= LOST_SECONDS or math.isinf(self._attentive_since):
            self._attentive_since = now
        if unseen < 0:
            self._move(unseen)
            unseen = 0.0
        self._meet(records, now)
        self._miss(records, now)
        before, rested_until = self.step, self.still_since
        self._advance(now, unseen)
        self._rest(now, is_paused)
        updates = 0 if before is None else max(0, (self.step or 0) - before)
        self.timeline.look(self.peers, self.step or 0, updates, now, rested_until)
        self._note_tests()
        self._summarise(now)
        self.looked_at = now
        self._forget()

    def _move(self, seconds: float) -> None:
        """Shift all times after this machine's clock was set back: all that was seen stays as long ago as it was."""
        self.began_at += seconds
        self.updated_at = None if self.updated_at is None else self.updated_at + seconds
        self.still_since = None if self.still_since is None else self.still_since + seconds
        self.lower_since = None if self.lower_since is None else self.lower_since + seconds
        for peer in self.peers.values():
            peer.seen_at += seconds
        for item in (*self.points, *self.events):
            item.time += seconds
        self._advances = deque([(time + seconds, step) for time, step in self._advances], maxlen=MAX_ADVANCES)
        self._traffic = deque((time + seconds, sent) for time, sent in self._traffic)
        self.timeline.move(seconds)

    def _meet(self, records: Mapping[str, PeerProgress], now: float) -> None:
        joined, back, sent = [], [], 0
        for peer_id, record in records.items():
            peer = self.peers.get(peer_id)
            if peer is None:
                peer = self.peers[peer_id] = PeerSeen("", 0, 0.0, False, JOINING, 0.0, -math.inf, now)
                peer.read(record, now)
                joined.append(record.name)
                continue
            before = peer.sent
            if peer.read(record, now) and peer.state != "here":
                peer.state = "here"
                back.append(record.name)
            sent += peer.sent - before
        self._traffic.append((now, sent))
        while now - self._traffic[0][0] > TRAFFIC_SECONDS:
            self._traffic.popleft()
        if self.looked_at is None and joined:
            self.note(f"The desk began to watch. {_list(joined)} {_were(joined)} there.", now)
        elif joined:
            self.note(f"{_list(joined)} joined.", now)
        if back:
            self.note(f"{_list(back)} came back.", now)

    def _miss(self, records: Mapping[str, PeerProgress], now: float) -> None:
        lost, left = [], []
        for peer_id, peer in self.peers.items():
            if peer.state != "here":
                continue
            if peer_id not in records:
                peer.missed += 1
            if now - max(peer.seen_at, self._attentive_since) > LOST_SECONDS:
                peer.state = "lost"
                lost.append(peer.name)
            elif peer.missed >= MISSED_LOOKS:
                peer.state = "left"
                left.append(peer.name)
        if lost:
            self.note(f"{_list(lost)} {_were(lost)} lost: no record for more than {LOST_SECONDS:.0f} s.", now)
        if left:
            self.note(f"{_list(left)} left.", now)

    def _advance(self, now: float, unseen: float) -> None:
        steps = [peer.step for peer in under_way(self.here)]
        if not steps:
            return
        step = step_of_most(steps)
        if self.step is None:
            self.step = self.finite_at_step = step
            self._advances.append((now, step))
        elif step > self.step:
            if unseen <= UNSEEN_SECONDS:
                self._credit([peer for peer in self.here if peer.computes], step - self.step, unseen)
            else:
                self._advances.clear()
            self.step, self.updated_at = step, now
            self._advances.append((now, step))
        self.lower_since = (self.lower_since or now) if step < self.step else None
        if self.lower_since is not None and now - self.lower_since > LOWER_SECONDS:
            self.note(f"The run went back from update {self.step:,} to {step:,}.", now)
            self.step, self.lower_since, self.finite_at_step = step, None, min(self.finite_at_step, step)
            self.lowest_loss = None  # earlier weights have a higher loss
            self.tests = [test for test in self.tests if test.step <= step]  # later weights exist no longer
            for peer in self.peers.values():
                if peer.tested is not None and peer.tested.step > step:
                    peer.tested = None
            self._advances.clear()

    def _rest(self, now: float, is_paused: bool) -> None:
        """Note whether the run rests. A run that rests does not stand still, and the time says nothing of its pace.

        It rests if it is paused, if no peer is there, or if all peers there are helpers, are paused or wait.
        """
        here = self.here
        rests = is_paused or all(peer.helps or peer.phase in (PAUSED, WAITING) for peer in here)
        if rests:
            self.still_since = now
        if here and (rests or self._rested):  # without peers the last pace stays: `is_over` needs it
            self._advances.clear()
            if self.step is not None:
                self._advances.append((now, self.step))
        self._rested = rests

    def _credit(self, here: list[PeerSeen], updates: int, seconds: float) -> None:
        """Credit the peers with the samples of new updates, in proportion to their paces: all compute equally long.

        The samples are at most `CREDIT_TIMES` times what the peers say they compute in that time, and a target batch.

        Args:
            here: peers that compute
            updates: that were made since the last look
            seconds: since the last look
        """
        total = sum(peer.rate for peer in here)
        can_be = total * CREDIT_TIMES * seconds + self.target_batch_size
        samples = min(updates * self.target_batch_size, can_be)
        for peer in here:
            peer.samples += samples * peer.rate / total if total > 0 else 0.0

    def _note_tests(self) -> None:
        """Note each peer's newest test once.

        If there are too many, every second test of the peer that has most is dropped: a liar displaces its own ones
        first.
        """
        last = {test.peer_id: test.step for test in self.tests}
        for peer_id, peer in self.peers.items():
            found = peer.tested
            if found is None or not last.get(peer_id, -1) < found.step <= (self.step or 0) + 1:
                continue
            self.tests.append(Test(found.step, found.accuracy, found.loss, peer_id, peer.name))
            if len(self.tests) > MAX_TESTS:
                ((most, _),) = Counter(test.peer_id for test in self.tests).most_common(1)
                thinned = {id(test) for test in [test for test in self.tests if test.peer_id == most][:-1:2]}
                self.tests = [test for test in self.tests if id(test) not in thinned]

    def _summarise(self, now: float) -> None:
        losses = [peer.loss for peer in self.here if peer.loss is not None]
        accuracies = [peer.accuracy for peer in self.here if peer.accuracy is not None]
        if losses:
            self.loss, self.finite_at_step = statistics.median(losses), self.step or 0
            self.lowest_loss = self.loss if self.lowest_loss is None else min(self.lowest_loss, self.loss)
        if accuracies:
            self.accuracy = statistics.median(accuracies)
        if self.step is None or (self.points and now - self.points[-1].time < self.point_seconds):
            return
        self.points.append(
            Point(
                now,
                self.step,
                self.loss if losses else None,
                self.accuracy,
                self.samples_per_second,
                self.updates_per_minute(now),
                len(self.here),
                self.bytes_per_second,
            )
        )
        if len(self.points) > MAX_POINTS:
            del self.points[1::2]
            self.point_seconds *= 2

    def _forget(self) -> None:
        """Forget peers if there are too many: first those that are gone, and of these the ones with least samples."""
        if len(self.peers) <= MAX_PEERS:
            return
        worth = sorted(self.peers.items(), key=lambda item: (item[1].state == "here", item[1].samples))
        for peer_id, _ in worth[: len(self.peers) - MAX_PEERS]:
            del self.peers[peer_id]

    def note(self, text: str, now: float) -> None:
        """Add an event.

        Args:
            text: one sentence
            now: seconds since 1970
        """
        self.events.append(Event(now, text))
        del self.events[:-MAX_EVENTS]

    # ---- what comes of it ---------------------------------------------------------------------------------------

    @property
    def here(self) -> list[PeerSeen]:
        """Peers that are there."""
        return [peer for peer in self.peers.values() if peer.state == "here"]

    def shown(self, now: float) -> dict[str, PeerSeen]:
        """Peers that are there, the fastest first, and then those that went in the last hour, the last one first.

        Args:
            now: seconds since 1970
        """
        recent = {
            peer_id: peer
            for peer_id, peer in self.peers.items()
            if peer.state == "here" or now - peer.seen_at < SHOWN_SECONDS
        }
        return dict(sorted(recent.items(), key=lambda item: _order(item[1])))

    @property
    def samples_per_second(self) -> float:
        """Pace of all peers that compute, as they claim."""
        return sum(peer.rate for peer in self.peers.values() if peer.computes)

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes per second that all peers together send, as they say, over the last half minute.

        None as long as no peer says, or before the second look.
        """
        if not self._traffic or not any(peer.profile for peer in self.here):
            return None
        (first_at, _), *later = self._traffic
        seconds = self._traffic[-1][0] - first_at
        return sum(sent for _, sent in later) / seconds if seconds > 0 else None

    @property
    def sent(self) -> int:
        """Bytes that all remembered peers have sent, as they say."""
        return sum(peer.sent for peer in self.peers.values())

    def updates_per_minute(self, now: float) -> float | None:
        """Pace over the last updates. It falls when no more updates come. None before two updates are seen.

        Args:
            now: seconds since 1970
        """
        if len(self._advances) < 2:
            return None
        (first_at, first), (last_at, last) = self._advances[0], self._advances[-1]
        usual = (last_at - first_at) / (len(self._advances) - 1)
        ends = now if now - last_at > 2 * usual else last_at  # an update is overdue: the pace falls from now on
        return 60 * (last - first) / (ends - first_at) if ends - first_at >= PACE_SECONDS else None

    @property
    def last_updates_per_second(self) -> float:
        """Pace while updates were seen, however long ago that is; 0 before two updates are seen."""
        if len(self._advances) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._advances[0], self._advances[-1]
        return (last - first) / max(1.0, last_at - first_at)  # two looks may follow each other at once

    def still_seconds(self, now: float) -> float:
        """Seconds since the last update (the first look, if none was seen), or since the run rested if that is less."""
        return max(0.0, now - max(self.updated_at or self.began_at, self.still_since or 0.0))

    # ---- on disk ------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Replace the file atomically.

        Raises:
            OSError: it cannot be written
        """
        write_json(path, {item.name: msgspec.to_builtins(getattr(self, item.name)) for item in fields(self)})

    @classmethod
    def load(cls, path: Path, key: str, target_batch_size: int, now: float) -> History:
        """The history of an earlier desk, or a new one if there is none.

        A file of another run, or a damaged one, is kept under another name.

        Args:
            path: file of the history
            key: prefix of the run's keys in the DHT
            target_batch_size: samples of an update
            now: seconds since 1970
        """
        try:
            history = msgspec.json.decode(path.read_bytes(), type=cls)
            if history.key == key:
                history.target_batch_size = target_batch_size
                history.note("The desk was started again.", now)
                return history
        except FileNotFoundError:
            return cls(key, target_batch_size, now)
        except (OSError, ValueError, RecursionError):
            pass
        os.replace(path, path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}"))
        return cls(key, target_batch_size, now)


def remembered_addresses(path: Path) -> list[str]:
    """The addresses in the history of an earlier desk; empty if it cannot be read."""
    try:
        return usable(msgspec.json.decode(path.read_bytes(), type=History).addresses)
    except (OSError, ValueError, RecursionError):
        return []


def _order(peer: PeerSeen) -> tuple[bool, float, float]:
    is_gone = peer.state != "here"
    return is_gone, -peer.seen_at if is_gone else -peer.rate, -peer.samples


def _list(names: list[str]) -> str:
    """The first names, and how many more there are, as part of a sentence."""
    shown = [*names[:MAX_NAMES]] + ([f"{len(names) - MAX_NAMES:,} more"] if len(names) > MAX_NAMES else [])
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _were(names: list[str]) -> str:
    return "was" if len(names) == 1 else "were"
