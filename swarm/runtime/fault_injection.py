"""For tests: kills or freezes this peer at a given stage of a given step. If unused, it costs one comparison."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

STAGES = ("computing", "meeting", "met", "exchanging", "giving state", "taking state")
"""Computing micro-batches, meeting other peers, the group is closed, parts are on their way; and sending or receiving a
state."""
ACTIONS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


@dataclass(frozen=True)
class Fault:
    """A planned fault of this peer.

    Args:
        action: one of `ACTIONS`
        stage: one of `STAGES`
        step: the first step at which it happens; it is ignored for "taking state", where the peer has no step yet
        trainer: id of the process that the signal goes to; its children go with it
    """

    action: str
    stage: str
    step: int
    trainer: int

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse a fault, such as "kill exchanging 12".

        Raises:
            ValueError: the text is not "ACTION STAGE STEP"
        """
        action, _, rest = text.partition(" ")
        stage, _, step = rest.rpartition(" ")
        if action not in ACTIONS or stage not in STAGES:
            raise ValueError(f"{text!r} is no fault: one of {', '.join(ACTIONS)}, of {', '.join(STAGES)}, and a step")
        return cls(action, stage, int(step), os.getpid())


_planned: Fault | None = None


def plan(text: str) -> None:
    """Plan a fault in this process, or in a child that is made from now on; none if the text is empty.

    Args:
        text: such as "kill exchanging 12": when this peer has sent its first part for update 13
    """
    global _planned
    _planned = Fault.parse(text) if text else None


def at(stage: str, step: int | None = None) -> None:
    """Let the planned fault happen if it is for this stage and step. The peer calls this at each stage."""
    global _planned
    if _planned is not None and _planned.stage == stage and (step is None or step >= _planned.step):
        fault, _planned = _planned, None  # once: a frozen peer that is continued goes on
        os.kill(fault.trainer, ACTIONS[fault.action])
        if os.getpid() != fault.trainer:
            # The signal acts on the whole process, but is sent to this thread. On a busy machine another thread would
            # receive it late, and this one would send all the rest first.
            signal.pthread_kill(threading.get_ident(), ACTIONS[fault.action])
