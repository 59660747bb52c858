"""One peer's side of `--averaging auto`: it measures, says so in its tickets, and follows what the groups decide."""

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
"""Latest rounds that count."""
FEWEST = 3
"""Rounds in a mode, before a peer says what they take."""
MOST_MILLISECONDS = 10**9

logger = get_logger(__name__)


@dataclass
class AutoAveraging:
    """What a peer knows of the mode of its swarm.

    Args:
        has_float_buffers: the model has running statistics, for which small codecs are too coarse
        plan: that it follows; None until it has been in a group
    """

    has_float_buffers: bool = False
    plan: Plan | None = None
    _seconds: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MEASURED))
    """Computing and averaging, of the latest rounds in one mode."""
    _measured: Mode | None = None
    """In which these were."""

    @property
    def codecs(self) -> list[str]:
        """That the model allows."""
        return [name for name in CODECS if not (self.has_float_buffers and name in TOO_COARSE_FOR_BUFFERS)]

    def _plan(self, step: int) -> Plan:
        return self.plan or Plan.first(step)

    def local_steps(self, step: int) -> int:
        """Local steps of the update that follows this many updates, which takes so many target batches."""
        return self._plan(step).at(step).local_steps

    def position(self, step: int) -> int:
        """Where the recipe's schedule is then."""
        return self._plan(step).position_at(step)

    def step_at(self, position: int) -> int:
        """After how many updates the recipe's schedule is there."""
        return self._plan(position).step_at(position)

    def pace(self, step: int) -> Pace:
        """What this peer says in its ticket for the round of this step."""
        if self._measured != self._plan(step).at(step) or len(self._seconds) < FEWEST:
            return Pace(self.plan)
        computing, averaging = (median(seconds) for seconds in zip(*self._seconds, strict=True))
        return Pace(self.plan, _milliseconds(computing), _milliseconds(averaging))

    def begin(self, step: int) -> None:
        """Nobody is there yet, or only who begins as well: this peer knows what counts, and names it in its tickets.

        Else the first group would follow whatever a single member names.
        """
        self.plan = self._plan(step)

    def join(self) -> None:
        """Others train, and what they follow counts: of a run without a change this peer has nothing to say."""
        if self.plan is not None and self.plan.is_first:
            self.plan = None

    def met(self, group: Group) -> None:
        """A group was closed: what most of its members follow counts here, too."""
        self.plan = group.plan

    def note(self, report: RoundReport, computing_seconds: float) -> None:
        """A round has given its average: it is measured, and its group may have decided something.

        Args:
            computing_seconds: of this peer, for what it gave
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
