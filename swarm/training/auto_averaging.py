"""One peer's side of `--averaging auto`: it measures rounds, reports that in tickets, and follows the groups' plans."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from hivemind.utils import get_logger

from swarm.averaging.compression.codec import CODECS, TOO_COARSE_FOR_BUFFERS
from swarm.protocol.auto_mode import MODES, Mode, Pace, Plan, choose
from swarm.protocol.messages import Group
from swarm.protocol.round_report import RoundReport

MEASURED = 5
"""Number of the latest rounds whose times count."""
FEWEST = 3
"""Fewest rounds in one mode before a peer reports their times."""
MOST_MILLISECONDS = 10**9
"""Longest time that a ticket can report."""

logger = get_logger(__name__)


@dataclass
class AutoAveraging:
    """What a peer knows of the mode of its swarm.

    Args:
        has_float_buffers: the model has running statistics, for which small codecs are too coarse
        plan: the plan that the peer follows; None until it has been in a group
    """

    has_float_buffers: bool = False
    plan: Plan | None = None
    _seconds: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MEASURED))
    """Seconds of computing and of averaging, for each of the latest rounds in one mode."""
    _measured: Mode | None = None
    """The mode of these rounds."""

    @property
    def codecs(self) -> list[str]:
        """The codecs that the model allows."""
        return [name for name in CODECS if not (self.has_float_buffers and name in TOO_COARSE_FOR_BUFFERS)]

    def _plan(self, step: int) -> Plan:
        return self.plan or Plan.first(step)

    def local_steps(self, step: int) -> int:
        """Local steps of the update after this many updates; the update takes as many target batches."""
        return self._plan(step).at(step).local_steps

    def position(self, step: int) -> int:
        """The position in the recipe's schedule after this many updates."""
        return self._plan(step).position_at(step)

    def step_at(self, position: int) -> int:
        """The number of updates after which the recipe's schedule has reached this position."""
        return self._plan(position).step_at(position)

    def pace(self, step: int) -> Pace:
        """The plan and the median times that this peer puts into its ticket for the round of this step."""
        if self._measured != self._plan(step).at(step) or len(self._seconds) < FEWEST:
            return Pace(self.plan)
        computing, averaging = (median(seconds) for seconds in zip(*self._seconds, strict=True))
        return Pace(self.plan, _milliseconds(computing), _milliseconds(averaging))

    def begin(self, step: int) -> None:
        """Begin a run, alone or with peers that begin as well: this peer names a plan in its tickets from now on.

        Otherwise the first group would follow any plan that a single member names.
        """
        self.plan = self._plan(step)

    def join(self) -> None:
        """Join peers that already train: their plan counts, so this peer drops a plan that was never changed."""
        if self.plan is not None and self.plan.is_first:
            self.plan = None

    def met(self, group: Group) -> None:
        """Follow the plan of a group that was closed: the plan that most of its members follow."""
        self.plan = group.plan

    def note(self, report: RoundReport, computing_seconds: float) -> None:
        """Note a round that gave an average: measure it, and follow a change of plan that its tickets decide.

        Args:
            computing_seconds: seconds that this peer computed for what it gave
        """
        group = report.group
        self.met(group)
        if self._measured != group.mode:
            self._measured = group.mode
            self._seconds.clear()
        if computing_seconds and not report.lost:
            self._seconds.append((computing_seconds, report.exchange_seconds))
        paces = [ticket.pace for ticket in group.tickets if ticket.samples]
        if (choice := choose(self.plan, group.step, paces, self.codecs)) is not None:
            logger.warning(f"{choice} (before: {MODES[self.plan.mode]})")
            self.plan = choice.plan


def _milliseconds(seconds: float) -> int:
    return min(MOST_MILLISECONDS, max(1, round(1000 * seconds)))
