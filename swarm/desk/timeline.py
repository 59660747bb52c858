"""What each peer did in the last ten minutes, and how the last updates came about, as far as progress records tell.

A record says what its peer does at that moment, and why its last round failed. The desk looks every two seconds, so
it sees shorter phases only by chance.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from swarm.desk.seen import PeerSeen
from swarm.membership.progress_record import AVERAGING, HELPING, JOINING, PAUSED, TRAINING, VALIDATING, WAITING

CELL_SECONDS, CELLS = 10.0, 60
MAX_ROUNDS, MAX_ROUND_PEERS = 30, 12
MAX_FAILURES, MAX_SHOWN_FAILURES = 64, 3
"""Different reasons of failed rounds that are kept; and reasons shown of one update, those that most peers give."""
NEXT_STEPS = 2
"""How far ahead failed rounds may be. A peer that is ahead, or overlaps, tells of the update after the next one."""
UNKNOWN, GONE, OTHER = " ", "-", "o"
LETTERS = {TRAINING: "c", AVERAGING: "a", WAITING: "w", JOINING: "j", VALIDATING: "v", PAUSED: "p", HELPING: "h"}
"""Letter for what a peer does, by its phase."""
WORDS = {
    "c": "computes",
    "a": "averages",
    "w": "waits for peers",
    "j": "catches up",
    "v": "validates",
    "p": "is paused",
    "h": "helps",
    OTHER: "does something else",
    GONE: "is gone",
}


@dataclass
class Failure:
    """Why rounds of an update gave no average, as peers say.

    Args:
        why: the end of a sentence
        times: number of such rounds, by the peer that counts most
        said_by: names of peers that say so, at most 12
    """

    why: str
    times: int
    said_by: list[str]


@dataclass
class Round:
    """Updates that were seen at once: one, or several if they are made faster than the desk looks.

    Args:
        time: when they were seen, seconds since 1970
        step: of the last of them
        updates: number of them
        seconds: since the updates before, or since a pause was over
        peers: number of peers that computed for them
        late: names of peers that still computed while more than half of all were averaging, at most 12
        lost: names of peers that fell silent or left since the updates before, at most 12
        names: names of peers that computed, at most 12
        failed: why earlier rounds of these updates gave no average
    """

    time: float
    step: int
    updates: int
    seconds: float
    peers: int
    late: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)


@dataclass
class Timeline:
    """The last ten minutes, in cells of ten seconds.

    Args:
        cells: when each cell began, seconds since 1970
        updates: number of updates made in each cell
        strips: by peer id, a letter for each cell: what the peer did most of the time
        rounds: the last 30
        rounds_at: when updates were last seen, seconds since 1970; None before the first
    """

    cells: list[float] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    strips: dict[str, str] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    rounds_at: float | None = None

    def __post_init__(self):
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """How often each letter was seen in the last cell, by peer id."""
        self._late: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        """Names of peers that were late, and of peers that were lost, since the last update, by peer id."""
        self._present: dict[str, str] = {}
        """Names of peers that were there at the last look, by peer id."""
        self._failed: dict[tuple[int, str], Failure] = {}
        """Failures by the update that was to be made, and the reason."""

    def look(
        self, peers: Mapping[str, PeerSeen], step: int, updates: int, now: float, rested_until: float | None
    ) -> None:
        """Take in what the peers do now.

        Args:
            peers: by peer id
            step: updates that the swarm has made
            updates: number of updates made since the last look
            now: seconds since 1970
            rested_until: last time at which no update was expected, as of the last look; None if there was none
        """
        self._begin_cell(now)
        self._fill_cell(peers)
        self._see_who_is_late(peers)
        self._see_failures(peers, step, updates)
        if updates:
            self._note_round(peers, step, updates, now, rested_until)

    def move(self, seconds: float) -> None:
        """Shift the times of rounds after the clock was set. Strips go by the clock, and begin anew.

        Args:
            seconds: by which the clock was set
        """
        self.rounds_at = None if self.rounds_at is None else self.rounds_at + seconds
        for made in self.rounds:
            made.time += seconds

    @property
    def trying(self) -> list[Failure]:
        """Why rounds of the next updates have given no average yet: the reasons that most peers give."""
        return _said_most([*self._failed.values()])

    def _begin_cell(self, now: float) -> None:
        """Begin a new cell if it is time. After ten minutes without a look, all cells before are forgotten."""
        if self.cells and 0 <= now - self.cells[-1] < CELL_SECONDS:
            return
        if self.cells and not 0 <= now - self.cells[-1] < CELLS * CELL_SECONDS:
            self.cells, self.updates, self.strips = [], [], {}
        begin = now - now % CELL_SECONDS
        # cells that went by without a look get no updates, and an unknown state of all peers
        missed = range(1, int((begin - self.cells[-1]) / CELL_SECONDS)) if self.cells else ()
        self.cells += [self.cells[-1] + number * CELL_SECONDS for number in missed] + [begin]
        self.cells = self.cells[-CELLS:]
        self.updates = [*self.updates, *(0 for _ in missed), 0][-len(self.cells) :]
        self.strips = {
            peer_id: (strip + UNKNOWN * (len(missed) + 1))[-len(self.cells) :] for peer_id, strip in self.strips.items()
        }
        self._counts.clear()

    def _fill_cell(self, peers: Mapping[str, PeerSeen]) -> None:
        for peer_id, peer in peers.items():
            letter = GONE if peer.state != "here" else LETTERS.get(peer.phase, OTHER)
            if letter == GONE and peer_id not in self.strips:
                continue
            counts = self._counts[peer_id]
            counts[letter] += 1
            most = max(counts, key=lambda other: (counts[other], other == letter))
            self.strips[peer_id] = self.strips.get(peer_id, UNKNOWN * len(self.cells))[:-1] + most
        for peer_id in [*self.strips]:
            if peer_id not in peers or not self.strips[peer_id].strip(UNKNOWN + GONE):
                del self.strips[peer_id]

    def _note_round(
        self, peers: Mapping[str, PeerSeen], step: int, updates: int, now: float, rested_until: float | None
    ) -> None:
        self.updates[-1] += updates
        if self.rounds_at is not None:
            computed = [peer.name for peer in peers.values() if peer.computes and not peer.helps]
            late, lost = [*self._late.values()], [*self._lost.values()]
            failed = _said_most([failure for (at_step, _), failure in self._failed.items() if at_step <= step])
            took, names = now - max(self.rounds_at, rested_until or 0.0), computed[:MAX_ROUND_PEERS]
            self.rounds.append(Round(now, step, updates, took, len(computed), late, lost, names, failed))
            del self.rounds[:-MAX_ROUNDS]
        self.rounds_at = now
        self._failed = {key: failure for key, failure in self._failed.items() if key[0] > step}
        self._late.clear()
        self._lost.clear()

    def _see_failures(self, peers: Mapping[str, PeerSeen], step: int, updates: int) -> None:
        """Note failed rounds of the updates that were made since the last look, and of the next two.

        Failures of later updates are forgotten: the run went back to an earlier one.
        """
        self._failed = {key: failure for key, failure in self._failed.items() if key[0] <= step + NEXT_STEPS}
        for peer in peers.values():
            failed = peer.failed
            if failed is None or peer.state != "here" or not step - updates < failed.step <= step + NEXT_STEPS:
                continue
            known = self._failed.get((failed.step, failed.why))
            if known is None and len(self._failed) < MAX_FAILURES:
                known = self._failed[failed.step, failed.why] = Failure(failed.why, 1, [])
            if known is not None:
                known.times = max(known.times, failed.times)
                if peer.name not in known.said_by and len(known.said_by) < MAX_ROUND_PEERS:
                    known.said_by.append(peer.name)

    def _see_who_is_late(self, peers: Mapping[str, PeerSeen]) -> None:
        here = {peer_id: peer for peer_id, peer in peers.items() if peer.computes}
        average = [peer for peer in here.values() if peer.phase == AVERAGING]
        if 2 * len(average) > len(here):
            step = max(peer.step for peer in average)
            late = {id: peer.name for id, peer in here.items() if peer.phase == TRAINING and peer.step <= step}
            _add(self._late, late)
        present = {peer_id: peer.name for peer_id, peer in peers.items() if peer.state == "here"}
        _add(self._lost, {peer_id: name for peer_id, name in self._present.items() if peer_id not in present})
        self._present = present


def _add(known: dict[str, str], names: Mapping[str, str]) -> None:
    """Add names, up to those that an update shows: strangers could come and go without end while a run is paused."""
    for peer_id, name in names.items():
        if len(known) == MAX_ROUND_PEERS:
            break
        known[peer_id] = name


def _said_most(failures: list[Failure]) -> list[Failure]:
    return sorted(failures, key=lambda failure: -len(failure.said_by))[:MAX_SHOWN_FAILURES]


def runs_of(strip: str) -> list[tuple[str, int, int]]:
    """The stretches in which a peer did the same: letter, first cell, and number of cells."""
    found, begin = [], 0
    for letter, cells in groupby(strip):
        length = len([*cells])
        if letter != UNKNOWN:
            found.append((letter, begin, length))
        begin += length
    return found


def said_of(strip: str) -> str:
    """A strip in words, for visitors that cannot see it."""
    known = Counter(strip.replace(UNKNOWN, ""))
    return ", ".join(f"{WORDS[letter]} {share(strip, letter):.0%} of the time" for letter, _ in known.most_common())


def share(strip: str, letter: str) -> float:
    """Part of the known time in which a peer did what the letter says, 0 to 1."""
    known = len(strip) - strip.count(UNKNOWN)
    return strip.count(letter) / known if known else 0.0
