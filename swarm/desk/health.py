"""Whether a run is well, and if not, the one sentence that says why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from swarm.desk.history import History
from swarm.membership.progress_record import WAITING
from swarm.protocol.certificates import Certificate

RISEN_TIMES, RISEN_BY = 2.0, 0.5
"""The loss has risen if it is above so many times the lowest one seen, and also above that one plus so much."""
LOST_UPDATES = 3
"""Updates without a finite loss of any peer after which something is wrong."""
LAST_SECONDS = 5.0
"""Time before peers leave in which they may make updates that no record tells of any more."""
DEAF_SECONDS = 30.0
"""Time without an answer from the swarm after which something is wrong."""

Level = Literal["good", "warning", "bad", "paused"]
Kind = Literal["deaf", "nobody", "still", "loss", "reachable", "certificate", "disk"]

UNKNOWN_WHILE: Mapping[Kind, frozenset[Kind]] = {
    "nobody": frozenset({"still", "loss", "reachable", "certificate"}),
    "deaf": frozenset({"nobody", "still", "loss", "reachable", "certificate"}),
}
"""Kinds that cannot be found while there is a finding of another kind: then their absence says nothing about them."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Args:
        kind: what it is about; there is at most one finding of each kind
        level: bad: the run makes no progress, or its updates are worth nothing; else warning
        text: one sentence, which also says what to do where that is not plain
    """

    kind: Kind
    level: Level
    text: str


def loss_has_risen(loss: float, lowest: float) -> bool:
    """Whether the loss has risen a lot: the reason may be bad data, or a peer that computes nonsense.

    Args:
        loss: median of the peers
        lowest: lowest median seen
    """
    return loss > max(RISEN_TIMES * lowest, lowest + RISEN_BY)


def is_over(history: History, total_steps: int, now: float) -> bool:
    """Whether the run has made all its updates.

    Peers leave after the last updates, often before their records tell of them. So if all peers have left, or none
    answers any more, some updates may be missing: those of 5 s at the last pace, but at most 2 % of the run, and one in
    any case. A silence shorter than an update usually takes tells nothing: the desk's own network may be down.
    """
    if history.step is None:
        return False
    pace = history.last_updates_per_second
    usual_seconds = 1 / pace if pace > 0 else 0.0
    if history.here and _deaf_seconds(history, now) <= max(DEAF_SECONDS, usual_seconds):
        return history.step >= total_steps
    unseen = min(math.ceil(LAST_SECONDS * pace), total_steps // 50)
    return history.step >= total_steps - max(1, unseen)


def _deaf_seconds(history: History, now: float) -> float:
    """Seconds since the swarm last answered, or since the desk began to look."""
    return now - (history.looked_at or history.began_at)


def findings(
    history: History,
    total_steps: int,
    still_minutes: float,
    now: float,
    is_paused: bool = False,
    ending: Sequence[Certificate] = (),
) -> list[Finding]:
    """What is not as it should be, the worst first.

    Args:
        total_steps: updates after which the run has ended
        still_minutes: minutes without an update after which something is wrong
        now: seconds since 1970
        is_paused: the organiser has paused the run, so no update is expected
        ending: certificates of members that are there, which should have been renewed by now and end soon
    """
    if is_over(history, total_steps, now):  # asked first: no peer answers after the end
        return []
    deaf_seconds = _deaf_seconds(history, now)
    if deaf_seconds > DEAF_SECONDS:
        text = (
            f"No peer has answered the desk for {_minutes(deaf_seconds)}: all have left, or the desk's own network is "
            "down. The numbers shown are that old."
        )
        return [Finding("deaf", "bad", text)]
    here = history.here
    if not here:
        return [Finding("nobody", "bad", "No peer trains: the desk finds no peer in the run.")]
    found = [None if is_paused else _still(history, still_minutes, now), _loss(history), _reachable(history)]
    found.append(_certificates(ending, now))
    return sorted((finding for finding in found if finding), key=lambda finding: finding.level != "bad")


def verdict(
    history: History, total_steps: int, found: list[Finding], now: float, is_paused: bool = False
) -> tuple[Level, str]:
    """Level of the run, and the one sentence about it.

    Args:
        found: what is not as it should be, the worst first
        now: seconds since 1970
    """
    if found:
        return found[0].level, found[0].text
    if is_over(history, total_steps, now):
        if history.step < total_steps:
            seen = f"update {history.step:,} of {total_steps:,} was the last one seen"
            return "good", f"The run has probably ended: all peers have left, and {seen}."
        return "good", f"The run has ended: all {total_steps:,} updates are made."
    if is_paused:
        step = history.step or 0
        return "paused", f"The run is paused at update {step:,}: no peer computes until its organiser resumes it."
    peers = sum(not peer.helps for peer in history.here)
    trains = f"{peers} peers train" if peers > 1 else "One peer trains"
    pace = history.updates_per_minute(now)
    if pace is None:
        return "good", f"{trains}. The pace shows after the next updates."
    return "good", f"All is well: {trains[0].lower() + trains[1:]}, with an update every {_every(60 / pace)}."


def _still(history: History, still_minutes: float, now: float) -> Finding | None:
    if all(peer.helps for peer in history.here):
        return Finding("still", "warning", "Only helpers are here: the run waits for a training peer.")
    if all(peer.phase == WAITING for peer in history.here):
        text = "All peers wait for more peers: the run has not begun, or too few peers are left to go on."
        return Finding("still", "warning", text)
    seconds = history.still_seconds(now)
    if seconds < 60 * still_minutes:
        return None
    return Finding("still", "bad", f"No update was made for {_minutes(seconds)}.")


def _loss(history: History) -> Finding | None:
    if history.step is not None and history.step - history.finite_at_step >= LOST_UPDATES:
        return Finding("loss", "bad", "No peer has a finite loss: begin again from a good checkpoint.")
    loss, lowest = history.loss, history.lowest_loss
    if loss is not None and lowest is not None and loss_has_risen(loss, lowest):
        return Finding("loss", "bad", f"The loss has risen from {lowest:.3f} to {loss:.3f}.")
    return None


def _reachable(history: History) -> Finding | None:
    full = [peer.name for peer in history.here if not peer.client_mode]
    if not full:
        return Finding("reachable", "bad", "No peer can be called, so the peers cannot average: open a port for one.")
    if len(full) == 1:
        text = f"Only {full[0]!r} can be called. Without it no peer can average or join: open a port for another peer."
        return Finding("reachable", "warning", text)
    return None


def _certificates(ending: Sequence[Certificate], now: float) -> Finding | None:
    if not ending:
        return None
    first = min(ending, key=lambda certificate: certificate.end)
    others = f", and {len(ending) - 1} more soon after" if len(ending) > 1 else ""
    left = _minutes(max(0.0, first.end - now))
    text = (
        f"The certificate of {first.name!r} ends in {left}{others}, and was not renewed: "
        "start your own peer, or `swarm enrol`, so that members can stay."
    )
    return Finding("certificate", "warning", text)


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} seconds"
    return f"{minutes} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"


def _every(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
