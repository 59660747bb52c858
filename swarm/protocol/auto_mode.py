"""`--averaging auto`: the codec and the number of local steps with which all peers average, from a stated step on.

No single peer decides, and none has to be trusted. Each ticket of a round has its member's measurements: the time of
computing for an update, and of an average. All members of a group see the same tickets, whose hash is the name of the
group. The choice for later rounds is a function of these tickets alone. So all peers that have the average of the round
have the same plan. The median of the measurements counts: fewer than half of the members cannot move it past the
values of the others.
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
    """A combination of codec and local steps that can be chosen: a row of `MODES`.

    Args:
        codec: how numbers travel
        local_steps: local steps of each peer between two averages, if all are equally fast. An update takes so many
            times the target batch size
        bytes_per_number: bytes of a number on the wire
    """

    codec: str
    local_steps: int
    bytes_per_number: float

    @property
    def bytes_per_sample(self) -> float:
        """Bytes for a sample, as a relative measure for the comparison of modes."""
        return self.bytes_per_number / self.local_steps

    def __str__(self) -> str:
        steps = {1: "one local step", 4: "four local steps"}[self.local_steps]
        return f"{steps} with {'float32' if self.codec == 'none' else self.codec}"


MODES = (Mode("fp16", 1, 2.0), Mode("int8", 1, 1 + 4 / 1024), Mode("none", 4, 4.0))
"""The modes, from most bytes for a sample to fewest. It has only modes that were measured and not found to lose
accuracy: see docs/howto/choose-averaging.md. The last one is for models that int8 is too coarse for."""
LEAST_SAVED = 0.1
"""Fraction of the bytes for a sample that a mode has to save over the one before it, to be in a model's table."""
MOST_LOCAL_STEPS = max(mode.local_steps for mode in MODES)

AHEAD = 2
"""Updates from the round whose tickets decide a change to the first update in the new mode. Peers already compute for
the one in between."""
APART = 20
"""Least number of updates from one change to the next."""
SHORT_SECONDS = 1.0
"""Averages up to this time are limited by round trips and not by bytes, so fewer bytes would not help."""
TOO_SLOW, FAST_ENOUGH = 1.1, 0.7
"""Ratios of averaging time to computing time. Above the first, a swarm changes to fewer bytes. It changes to more bytes
only if the ratio would then be at most the second."""
MAX_POSITION = 10**9

_Index = Annotated[int, Meta(ge=0, lt=len(MODES))]
_Milliseconds = Annotated[int, Meta(ge=0, le=10**9)]


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """The mode that counts from a step on, and the position in the recipe's schedule at that step.

    Args:
        mode: row of `MODES`
        before: row that counts until then
        since: number of updates before the first one in this mode
        position: what these updates are worth, in updates of the recipe, which have one local step
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
        """The plan of a swarm that has none yet, at this step."""
        return cls(0, 0, step, step)

    @property
    def is_first(self) -> bool:
        """Whether the mode was never changed."""
        return self.mode == self.before

    def at(self, step: int) -> Mode:
        """The mode of the update that follows this many."""
        return MODES[self.mode if step >= self.since else self.before]

    def position_at(self, step: int) -> int:
        """How many updates of the recipe this many updates are worth."""
        return self.position + (step - self.since) * self.at(step).local_steps

    def is_possible_at(self, step: int) -> bool:
        """Whether a group at this step can follow it: each update is worth 1 to `MOST_LOCAL_STEPS` of the recipe's."""
        return self.since <= step + AHEAD and step <= self.position_at(step) <= MOST_LOCAL_STEPS * step

    def step_at(self, position: int) -> int:
        """The number of updates that are worth this many of the recipe."""
        steps = (MODES[self.before] if position < self.position else MODES[self.mode]).local_steps
        return self.since - (self.position - position) // steps


class Pace(msgspec.Struct, frozen=True, array_like=True):
    """A member's plan and measurements in its ticket.

    Args:
        plan: the plan that it follows; None as long as it knows none
        computing_ms: usual milliseconds of computing for an update, in the mode of this step; 0 if not measured yet
        averaging_ms: the same for an average, without waiting for other members to come
    """

    plan: Plan | None = None
    computing_ms: _Milliseconds = 0
    averaging_ms: _Milliseconds = 0

    @property
    def is_measured(self) -> bool:
        """Whether it has both measurements."""
        return self.computing_ms > 0 and self.averaging_ms > 0


@dataclass(frozen=True)
class Choice:
    """A change of mode, and why.

    Args:
        plan: the new plan
        computing_seconds: median of the members' computing times for an update, when the change was decided
        averaging_seconds: the same for an average
    """

    plan: Plan
    computing_seconds: float
    averaging_seconds: float

    def __str__(self) -> str:
        averaging, computing = (f"{seconds:.3g} s" for seconds in (self.averaging_seconds, self.computing_seconds))
        mode = MODES[self.plan.mode]
        return f"An average takes {averaging}, computing {computing}: {mode} from step {self.plan.since} on"


def plan_of(paces: Iterable[Pace | None], step: int) -> Plan:
    """The plan that counts for the round of this step: the one that most of its members follow.

    Of two plans with equally many members, the older one counts: those that claim a change have to be the majority. A
    plan that no member can follow at this step is a lie and is ignored: it could move the schedule, or the end of the
    run, anywhere.
    """
    plans = [pace.plan for pace in paces if pace is not None and pace.plan is not None]
    named = Counter(plan for plan in plans if plan.is_possible_at(step))
    known = sorted(named, key=lambda plan: (-named[plan], plan.since, plan.mode, plan.before, plan.position))
    return known[0] if known else Plan.first(step)


def table_for(codecs: Sequence[str]) -> list[int]:
    """The rows of `MODES` that can be chosen for a model that allows these codecs."""
    rows: list[int] = []
    for index, mode in enumerate(MODES):
        saves = not rows or mode.bytes_per_sample <= (1 - LEAST_SAVED) * MODES[rows[-1]].bytes_per_sample
        if mode.codec in codecs and saves:
            rows.append(index)
    return rows


def choose(plan: Plan, step: int, paces: Sequence[Pace | None], codecs: Sequence[str]) -> Choice | None:
    """The change that a round decides, if any.

    Args:
        plan: the plan that counted for the round
        step: the step that it ended
        paces: those of all its members that have computed
        codecs: codecs that the model allows

    Returns:
        the change; None if the mode stays as it is
    """
    measured = [pace for pace in paces if pace is not None and pace.is_measured]
    is_early = not plan.is_first and step < plan.since + APART
    if is_early or 2 * len(measured) <= len(paces):
        return None
    computing = [pace.computing_ms / 1000 for pace in measured]
    averaging = [pace.averaging_ms / 1000 for pace in measured]
    now, rows = MODES[plan.mode], table_for(codecs)

    def ratio(index: int, averages: float, computes: float) -> float:
        """Expected averaging time over computing time in that mode."""
        return averages / computes * MODES[index].bytes_per_sample / now.bytes_per_sample

    # Of an even number of values, that median counts which speaks against a change: of two, both have to be for it.
    least, most = statistics.median_low(averaging), statistics.median_high(computing)
    fewer = [index for index in rows if index > plan.mode]
    if fewer and least > SHORT_SECONDS and least > TOO_SLOW * most:
        index = next((index for index in fewer if ratio(index, least, most) <= 1), fewer[-1])
        return _change(plan, step, index, most, least)
    most, least = statistics.median_high(averaging), statistics.median_low(computing)

    def ratio_at_most(index: int) -> float:
        """As `ratio`, but at least that of an average whose time does not depend on its bytes, only on round trips.

        Otherwise a swarm would change to more bytes and back again and again.
        """
        return max(ratio(index, most, least), most / least * now.local_steps / MODES[index].local_steps)

    more = [index for index in rows if index < plan.mode and ratio_at_most(index) <= FAST_ENOUGH]
    return _change(plan, step, more[0], least, most) if more else None


def _change(plan: Plan, step: int, index: int, computing: float, averaging: float) -> Choice:
    since = step + AHEAD
    return Choice(Plan(index, plan.mode, since, plan.position_at(since)), computing, averaging)
