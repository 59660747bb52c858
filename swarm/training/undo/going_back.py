"""How a peer goes back to an earlier state together with its group.

Going back is an update like any other, except that the weights become those of a step that all members have kept. So
the step number only grows, and with it all that depends on it: the position in the data, schedules, orders, the end
of the run. The lineage after it is the name of the group, as after each round. A peer that was not in that group finds
that the swarm has gone on, and takes over its state. So does a member that has not kept that step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

from hivemind.utils import get_logger

from swarm.protocol.messages import Ticket, WentBack
from swarm.state_sync.state_version import StateVersion
from swarm.training.undo import breaker
from swarm.training.undo.sound_states import SoundStates

logger = get_logger(__name__)

MAX_TIMES_BACK = 4
"""Most times that a peer wants to go back within `WITHIN_UPDATES`. In an open run a liar returns under another name, so
going back may not help."""
WITHIN_UPDATES = 256
"""Updates in which `MAX_TIMES_BACK` are counted."""
NOTICED_AFTER = 3
"""Fewest breaker windows to go back. The breaker notices late, so younger states may be spoilt."""


class GoingBack:
    """Keeps the states to which one peer can go back, names the one to which it wants to go, and restores it.

    Args:
        version: the state of this peer
        is_on: whether the peer keeps earlier states
        folder: folder for large states
    """

    def __init__(self, version: StateVersion, is_on: bool, folder: Path | None = None):
        self._version, self._is_on = version, is_on
        self._states = SoundStates(version.state, folder)
        self.breaker = breaker.Breaker()
        self._gained: dict[int, breaker.Gained] = {}
        """What training had gained by the step of each state that this peer keeps."""
        self._went_at: deque[int] = deque(maxlen=MAX_TIMES_BACK)
        version.on_change = self._note

    def begin(self) -> None:
        """Begin to train. At step 0 keep the state: all peers that begin a run hold the same weights."""
        with self._version.lock:
            if self._version.step == 0:
                self._note(is_update=True)

    def _note(self, is_update: bool) -> None:
        if not is_update:
            self._states.forget()
            self._gained.clear()
            self.breaker.begin()
            return
        self.breaker.note_update()
        if self._is_on:
            self._states.note(self._version.step, self._version.lineage)
            self._gained = {step: self._gained.get(step, self.breaker.gained) for step in self._states.steps}

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the states to which this peer would go back now; empty if it has done so too often lately."""
        has_gone_often = len(self._went_at) == MAX_TIMES_BACK
        is_often = has_gone_often and self._went_at[0] > self._version.step - WITHIN_UPDATES
        return () if is_often else self._states.steps

    def with_wish(self, ticket: Ticket) -> Ticket:
        """The same ticket, with the step to which this peer wants to go back if its loss has risen.

        The averaging process, which holds proofs of lies, adds wishes to go back because of these.
        """
        if not self.steps or not self.breaker.has_risen:
            return ticket
        before = [step for step in self.steps if step <= ticket.step - NOTICED_AFTER * breaker.WINDOW]
        return replace(ticket, back_to=max(before, default=min(self.steps)))

    def is_convinced(self, back: WentBack) -> bool:
        """Whether this peer goes back with its group: a lie is proven, or its own loss may have risen."""
        return bool(back.liars) or self.breaker.may_have_risen

    def go(self, back: WentBack) -> bool:
        """Go back as the group has decided; return whether this peer could, that is, has kept that state.

        The caller holds the lock.
        """
        version, group = self._version, back.group
        is_of_group = (version.step, version.lineage) == (group.step, group.lineage)
        found = self._states.load(back.step) if is_of_group else None
        if found is None:
            return False
        gained = self._gained[back.step]
        self._states.rename(back.step, version.step + 1)
        version.go_back(*found, group.group_id)
        self._went_at.append(version.step)
        self.breaker.went_back(gained)
        self._gained[version.step] = gained
        return True
