"""`--averaging auto`: with which codec and how many local steps a swarm averages, from a stated step on, on all peers.

Nobody decides, and nobody has to be trusted. Each ticket of a round says what its member has measured: the seconds of
computing for an update and of an average. All members of a group see the same tickets, whose hash is the name of the
group. What follows for later rounds is a function of these tickets alone. So all who have the average of the round have
the same plan. The middle of the measurements counts: fewer than half of the members cannot move it past the others'.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.protocol.wire import Step


@dataclass(frozen=True)
class Mode:
    """A row of the table from which is chosen.

    Args:
        codec: how numbers travel
        local_steps: of each of equal peers between two averages; an update takes so many times the target batch size
        bytes_per_number: on the wire
    """

    codec: str
    local_steps: int
    bytes_per_number: float

    @property
    def bytes_per_sample(self) -> float:
        """Against others'."""
        return self.bytes_per_number / self.local_steps

    def __str__(self) -> str:
        steps = {1: "one local step", 4: "four local steps"}[self.local_steps]
        return f"{steps} with {'float32' if self.codec == 'none' else self.codec}"


MODES = (Mode("fp16", 1, 2.0), Mode("int8", 1, 1 + 4 / 1024), Mode("none", 4, 4.0))
"""From most bytes for a sample to fewest. Only what was measured and not found to lose accuracy is in it: see
docs/howto/choose-averaging.md. The last is for models that int8 is too coarse for."""
LEAST_SAVED = 0.1
"""Of the bytes for a sample, that a mode has to take less than the one before it in the table."""
MOST_LOCAL_STEPS = max(mode.local_steps for mode in MODES)

AHEAD = 2
"""Updates from the round whose tickets are decisive to the one that a change counts for: peers compute for the next one
already."""
APART = 20
"""Updates from one change to the next, at least."""
SHORT_SECONDS = 1.0
"""An average that takes no longer is a matter of round trips, and not of bytes."""
TOO_SLOW, FAST_ENOUGH = 1.1, 0.7
"""Averaging over computing: above the first a swarm goes to fewer bytes; to more again only where it would be below the
second."""
MAX_POSITION = 10**9

_Index = Annotated[int, Meta(ge=0, lt=len(MODES))]
_Milliseconds = Annotated[int, Meta(ge=0, le=10**9)]


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """Which mode counts from a step on, and how far the recipe's schedule is there.

    Args:
        mode: row of `MODES`
        before: the one until then
        since: updates that come before the first one in this mode
        position: that so many updates are worth, in updates of one local step: those of the recipe
    """

    mode: _Index
    before: _Index
    since: Step
    position: Annotated[int, Meta(ge=0, le=MAX_POSITION)]

    def __post_init__(self) -> None:
        if not self.since <= self.position <= MOST_LOCAL_STEPS * self.since:
            raise ValueError("a position that so many updates cannot have")

    @classmethod
    def first(cls, step: int) -> Plan:
        """Of a swarm that has none, at this step."""
        return cls(0, 0, step, step)

    @property
    def is_first(self) -> bool:
        """Whether nothing was ever changed."""
        return self.mode == self.before

    def at(self, step: int) -> Mode:
        """What counts for the update that follows this many."""
        return MODES[self.mode if step >= self.since else self.before]

    def position_at(self, step: int) -> int:
        """How many updates of the recipe so many updates are worth."""
        return self.position + (step - self.since) * self.at(step).local_steps

    def is_possible_at(self, step: int) -> bool:
        """Whether a group at this step can follow it: each update counts for one of the recipe or more."""
        return self.since <= step + AHEAD and step <= self.position_at(step) <= MOST_LOCAL_STEPS * step

    def step_at(self, position: int) -> int:
        """After how many updates this many of the recipe are made."""
        steps = (MODES[self.before] if position < self.position else MODES[self.mode]).local_steps
        return self.since - (self.position - position) // steps


class Pace(msgspec.Struct, frozen=True, array_like=True):
    """What a member says of itself in its ticket.

    Args:
        plan: that it follows; None as long as it knows none
        computing_ms: usual milliseconds of computing for an update, in the mode of this step; 0: not measured yet
        averaging_ms: the same of an average, without waiting for others to come
    """

    plan: Plan | None = None
    computing_ms: _Milliseconds = 0
    averaging_ms: _Milliseconds = 0

    @property
    def is_measured(self) -> bool:
        return self.computing_ms > 0 and self.averaging_ms > 0


@dataclass(frozen=True)
class Choice:
    """A change, and why.

    Args:
        plan: from now on
        computing_seconds: for an update, of the member in the middle, when it was made
        averaging_seconds: the same of an average
    """

    plan: Plan
    computing_seconds: float
    averaging_seconds: float

    def __str__(self) -> str:
        averaging, computing = (f"{seconds:.3g} s" for seconds in (self.averaging_seconds, self.computing_seconds))
        mode = MODES[self.plan.mode]
        return f"An average takes {averaging}, computing {computing}: {mode} from step {self.plan.since} on"


def plan_of(paces: Iterable[Pace | None], step: int) -> Plan:
    """That counts for the round of this step: what most of its members follow.

    Of two that equally many follow it is the older one: who says that there was a change has to be in the majority.
    One that nobody can follow at this step is a lie: it would move the schedule, or the end of the run, anywhere.
    """
    plans = [pace.plan for pace in paces if pace is not None and pace.plan is not None]
    named = Counter(plan for plan in plans if plan.is_possible_at(step))
    known = sorted(named, key=lambda plan: (-named[plan], plan.since, plan.mode, plan.before, plan.position))
    return known[0] if known else Plan.first(step)


def table_for(codecs: Sequence[str]) -> list[int]:
    """The rows of `MODES` from which is chosen, for a model that allows these codecs."""
    rows: list[int] = []
    for index, mode in enumerate(MODES):
        saves = not rows or mode.bytes_per_sample <= (1 - LEAST_SAVED) * MODES[rows[-1]].bytes_per_sample
        if mode.codec in codecs and saves:
            rows.append(index)
    return rows


def choose(plan: Plan, step: int, paces: Sequence[Pace | None], codecs: Sequence[str]) -> Choice | None:
    """What a round decides.

    Args:
        plan: that counted for it
        step: that it ended
        paces: of all its members that have computed
        codecs: that the model allows

    Returns:
        None: all stays as it is
    """
    measured = [pace for pace in paces if pace is not None and pace.is_measured]
    is_early = not plan.is_first and step < plan.since + APART
    if is_early or 2 * len(measured) <= len(paces):
        return None
    computing = [pace.computing_ms / 1000 for pace in measured]
    averaging = [pace.averaging_ms / 1000 for pace in measured]
    now, rows = MODES[plan.mode], table_for(codecs)

    def ratio(index: int, averages: float, computes: float) -> float:
        """Averaging over computing, in that mode."""
        return averages / computes * MODES[index].bytes_per_sample / now.bytes_per_sample

    # Of an even number, the one in the middle that speaks against a change: of two, both have to be for it.
    least, most = statistics.median_low(averaging), statistics.median_high(computing)
    fewer = [index for index in rows if index > plan.mode]
    if fewer and least > SHORT_SECONDS and least > TOO_SLOW * most:
        index = next((index for index in fewer if ratio(index, least, most) <= 1), fewer[-1])
        return _change(plan, step, index, most, least)
    most, least = statistics.median_high(averaging), statistics.median_low(computing)

    def ratio_at_most(index: int) -> float:
        """The same where fewer bytes of an average save nothing, since it waits for round trips: else it came again."""
        return max(ratio(index, most, least), most / least * now.local_steps / MODES[index].local_steps)

    more = [index for index in rows if index < plan.mode and ratio_at_most(index) <= FAST_ENOUGH]
    return _change(plan, step, more[0], least, most) if more else None


def _change(plan: Plan, step: int, index: int, computing: float, averaging: float) -> Choice:
    since = step + AHEAD
    return Choice(Plan(index, plan.mode, since, plan.position_at(since)), computing, averaging)
