"""A seam for tests: this peer is killed or frozen at a given stage of a given step. Unused, it costs a comparison."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

STAGES = ("computing", "meeting", "met", "exchanging", "giving state", "taking state")
"""Micro-batches, meeting the others, the group is closed, parts are on their way; and states."""
ACTIONS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


@dataclass(frozen=True)
class Fault:
    """What happens to a peer.

    Args:
        action: one of `ACTIONS`
        stage: one of `STAGES`
        step: the first step at which it happens; who takes a state has none yet
        trainer: process that the signal goes to; its children go with it
    """

    action: str
    stage: str
    step: int
    trainer: int

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Raises ValueError: it is not "ACTION STAGE STEP"."""
        action, _, rest = text.partition(" ")
        stage, _, step = rest.rpartition(" ")
        if action not in ACTIONS or stage not in STAGES:
            raise ValueError(f"{text!r} is no fault: one of {', '.join(ACTIONS)}, of {', '.join(STAGES)}, and a step")
        return cls(action, stage, int(step), os.getpid())


_planned: Fault | None = None


def plan(text: str) -> None:
    """Let it happen in this process, or in a child that is made from now on; nothing if the text is empty.

    Args:
        text: like "kill exchanging 12": when it has sent its first part for update 13
    """
    global _planned
    _planned = Fault.parse(text) if text else None


def at(stage: str, step: int | None = None) -> None:
    """This peer is at that stage now."""
    global _planned
    if _planned is not None and _planned.stage == stage and (step is None or step >= _planned.step):
        fault, _planned = _planned, None  # once: who is thawed goes on
        os.kill(fault.trainer, ACTIONS[fault.action])
        if os.getpid() != fault.trainer:
            # It acts on the whole process, but begins with this thread: on a busy machine another one would hear of it
            # late, and this one would send all the rest first.
            signal.pthread_kill(threading.get_ident(), ACTIONS[fault.action])
