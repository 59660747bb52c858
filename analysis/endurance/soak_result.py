"""Computes the result of a soak: how long each fault stopped the swarm, and whether all peers are equal at the end."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from analysis.program import options_of_result
from recipe.run_folder import RunFolder, read_metrics

TOLERATED_ACCURACY = 0.005
JUDGED_VALIDATIONS = 10
"""Number of last validations of which the mean is compared.

With fewer, nothing is judged: a single validation varies by some points from update to update, with or without faults.
That is several times what is tolerated.
"""
DIVISION = "network divided"
HANG_SECONDS = 120.0
"""Time without a new update that counts as a hang. It holds even if all peers were killed and first have to make some
updates again."""


@dataclass
class Event:
    """A fault.

    Args:
        fault: kind of the fault.
        victims: names of the hosts that it hit.
        began: Unix seconds at its beginning.
        mended: Unix seconds at its end.
        stall_seconds: excess of the swarm's longest time without an update meanwhile over a usual one.
        back_seconds: time from `mended` until all victims made updates with others again; None if they never did.
    """

    fault: str
    victims: list[str] = field(default_factory=list)
    began: float = 0.0
    mended: float = 0.0
    stall_seconds: float | None = None
    back_seconds: float | None = None


def common_checkpoint(folders: Mapping[str, RunFolder], since: float) -> tuple[int, dict[str, str]] | None:
    """The latest step of which all peers have a checkpoint since `since`, and a hash of each one's weights; or None."""
    steps = [  # a second checkpoint of a step is called step=10-v1.ckpt
        {
            int(path.stem[5:])
            for path in folder.checkpoints.glob("step=*.ckpt")
            if path.stem[5:].isdigit() and path.stat().st_mtime > since
        }
        for folder in folders.values()
    ]
    common = set.intersection(*steps)
    if not common:
        return None
    step = max(common)
    try:
        return step, {name: weights_hash(folder.checkpoints / f"step={step}.ckpt") for name, folder in folders.items()}
    except FileNotFoundError:  # only the last three are kept: a peer has just deleted this one
        return None


def shown(accuracies: Sequence[float]) -> str:
    """The accuracies of several runs in words."""
    return ", ".join(f"{accuracy:.3f}" for accuracy in accuracies)


def weights_hash(checkpoint: Path) -> str:
    """A hash of all tensors of the model in a checkpoint, in the order of their names."""
    import torch  # importing it takes seconds, and most of this file does without

    state = torch.load(checkpoint, map_location="cpu", weights_only=False)["state_dict"]
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def accuracies(folder: RunFolder, until: int) -> dict[int, float]:
    """Validation accuracy at each validated step up to `until`."""
    lines = read_metrics(folder.metrics)
    return {line["step"]: line["val/top1"] for line in lines if "val/top1" in line and line["step"] <= until}


def summarise(
    runs: Path,
    events: list[Event],
    step: int,
    hashes: dict[str, str],
    left: list[str],
    calm: list[RunFolder],
    problems: list[str],
    options: dict[str, Any],
    ended: float,
) -> dict[str, Any]:
    """The content of `soak.json`.

    Args:
        runs: run folders of all volunteers.
        events: the faults.
        step: step of the checkpoint that all peers have at the end; 0 for none.
        hashes: hash of each peer's weights there.
        left: hosts on which processes were left after all peers had ended.
        calm: run folders of as many updates without faults.
        problems: problems that were found already.
        options: options of the soak.
        ended: Unix seconds when the peers were told to leave.
    """
    updates = {folder.name: _updates(RunFolder(folder)) for folder in sorted(runs.iterdir())}
    of_swarm: dict[int, float] = {}
    for lines in updates.values():
        for moment, number, _ in lines:
            of_swarm[number] = min(moment, of_swarm.get(number, moment))
    moments = sorted(of_swarm.values())
    usual = _usual([b - a for a, b in pairwise(moments)])
    _judge(events, updates, [*moments, ended], usual)
    found = dict(item for folder in runs.iterdir() for item in accuracies(RunFolder(folder), step).items())
    of_calm = [accuracies(folder, step) for folder in calm]
    validated = sorted(set(found).intersection(*of_calm))[-JUDGED_VALIDATIONS:] if calm else []
    accuracy = _mean(found, validated) if validated else None
    calm_accuracies = sorted(_mean(one, validated) for one in of_calm) if validated else []
    problems = [*problems, *not_back(events), *hangs(events)]
    if len(set(hashes.values())) > 1:
        problems.append(f"different weights at step {step}: {hashes}")
    if left:
        problems.append(f"processes were left on {', '.join(left)}")
    if found and calm and not validated:
        problems.append(f"no step until {step} was validated both with and without faults")
    if len(validated) == JUDGED_VALIDATIONS and accuracy < calm_accuracies[0] - TOLERATED_ACCURACY:
        problems.append(f"accuracy {accuracy:.3f}, without faults {shown(calm_accuracies)}")
    return {
        "options": options_of_result(options),
        "events": [asdict(event) for event in events],
        "updates": len(of_swarm),
        "usual_seconds": usual,
        "step": step,
        "weights": hashes,
        "validated_steps": validated,
        "accuracy": accuracy,
        "calm_accuracies": calm_accuracies,
        "problems": problems,
    }


def _mean(accuracy_at: Mapping[int, float], steps: Sequence[int]) -> float:
    """The mean accuracy over these steps."""
    return statistics.mean(accuracy_at[step] for step in steps)


def summarise_stock(
    runs: Mapping[str, RunFolder],
    events: list[Event],
    left: list[str],
    problems: list[str],
    options: dict[str, Any],
    ended: float,
) -> dict[str, Any]:
    """The content of `soak-hivemind.json`: as `summarise`, without weights and accuracies.

    Hivemind's epochs begin anew when all peers are lost, so any update of any peer counts as progress of the swarm.
    """
    updates = {name: _updates(folder) for name, folder in runs.items()}
    moments = sorted(moment for lines in updates.values() for moment, *_ in lines)
    gaps = [b - a for lines in updates.values() for (a, *_), (b, *_) in pairwise(lines)]
    usual = _usual(gaps)
    _judge(events, updates, [*moments, ended], usual)
    problems = problems + not_back(events) + hangs(events)
    if left:
        problems.append(f"processes were left on {', '.join(left)}")
    last = {name: lines[-1][1] for name, lines in updates.items() if lines}
    if len(set(last.values())) > 1 and max(last.values()) - min(last.values()) > 1:
        problems.append(f"peers ended in different epochs: {last}")
    return {
        "options": options_of_result(options),
        "events": [asdict(event) for event in events],
        "updates": max(len(lines) for lines in updates.values()),
        "usual_seconds": usual,
        "validated_steps": [],
        "problems": problems,
    }


def not_back(events: list[Event]) -> list[str]:
    """A sentence for each fault whose victims never made another update with others."""
    return [f"{event.fault} ({', '.join(event.victims)}): not back" for event in events if event.back_seconds is None]


def hangs(events: list[Event]) -> list[str]:
    """A sentence for each fault after which there was no new update for too long."""
    too_long = [event for event in events if event.stall_seconds > HANG_SECONDS]
    return [
        f"{event.fault} ({', '.join(event.victims)}): no new update for {event.stall_seconds:.0f} s"
        for event in too_long
    ]


def _judge(
    events: list[Event], updates: Mapping[str, list[tuple[float, int, float]]], moments: list[float], usual: float
) -> None:
    """Fill in what each fault cost.

    Args:
        events: the faults, in order.
        updates: updates of each peer, as of `_updates`.
        moments: Unix seconds of the swarm's updates, ascending, and of the end: no update may follow a fault.
        usual: seconds of a usual update.
    """
    for event in events:
        event.stall_seconds, event.back_seconds = 0.0, _back(updates, event)
    for before, after in pairwise(moments):
        event = _to_blame(events, before, after)
        if event is not None:
            event.stall_seconds = max(event.stall_seconds, after - before - usual)


def _usual(gaps: Sequence[float]) -> float:
    """The median of the seconds between updates; 0 without any, so that all of a stall counts."""
    return statistics.median(gaps) if gaps else 0.0


def _to_blame(events: list[Event], before: float, after: float) -> Event | None:
    """The fault that a stall between two updates, or an update and the end, counts for.

    It is the first one that began between them, or else the last one before them. Later faults found the swarm stalled
    already.
    """
    between = [event for event in events if before < event.began <= after]
    earlier = [event for event in events if event.began <= before]
    return between[0] if between else earlier[-1] if earlier else None


def _updates(folder: RunFolder) -> list[tuple[float, int, float]]:
    """(Unix seconds, step, peers) of all updates that a peer took part in; infinitely many peers if they are not
    counted."""
    return [
        (line["time"], line["step"], line.get("swarm/peers", math.inf))
        for line in read_metrics(folder.metrics)
        if "swarm/own_samples" in line
    ]


def _back(updates: dict[str, list[tuple[float, int, float]]], event: Event) -> float | None:
    """Seconds from the end of the fault until all victims had made an update with others; None if they never did.

    Victims of a division train with each other all the time. They are back when one has an update with more peers than
    those of its own part.
    """
    company = len(event.victims) if event.fault == DIVISION else 1
    firsts = []
    for victim in event.victims:
        after = [moment for moment, _, peers in updates.get(victim, []) if moment > event.mended and peers > company]
        if not after:
            return None
        firsts.append(after[0] - event.mended)
    return max(firsts, default=0.0)


COLUMNS = (
    *("fault", "times", "recovered", "stall: median s", "stall: worst s"),
    *("of these, begun when all were there", "stall of these: worst s", "back: median s", "back: worst s"),
)


def found_all_there(event: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no victim of an earlier fault was still on its way back when this one began."""
    earlier = [other for other in events if other["began"] < event["began"]]
    return all(
        other["back_seconds"] is not None and other["mended"] + other["back_seconds"] <= event["began"]
        for other in earlier
    )


def rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each kind of fault, with the keys `COLUMNS`."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for event in found["events"]:
        kinds.setdefault(event["fault"], []).append(event)
    result = []
    for kind, events in sorted(kinds.items()):
        back = [event["back_seconds"] for event in events if event["back_seconds"] is not None]
        stalls = [event["stall_seconds"] for event in events]
        alone = [event["stall_seconds"] for event in events if found_all_there(event, found["events"])]
        figures = [f"{value:.1f}" for value in (statistics.median(stalls), max(stalls))]
        figures += [str(len(alone)), f"{max(alone):.1f}" if alone else "–"]
        figures += [f"{value:.1f}" for value in (statistics.median(back), max(back))] if back else ["–", "–"]
        result.append(dict(zip(COLUMNS, (kind, str(len(events)), str(len(back)), *figures), strict=True)))
    return result


def accuracy_of(found: Mapping[str, Any]) -> str | None:
    """The accuracy with and without faults, in words; None if no peer trained without faults."""
    if "calm_accuracies" not in found or not found["options"].get("calm_runs"):
        return None
    steps = found["validated_steps"]
    not_judged = f"not judged: {len(steps)} of {JUDGED_VALIDATIONS} validations"
    if not steps:
        return f"accuracy {not_judged}"
    said = f"accuracy {found['accuracy']:.3f}, without faults {shown(found['calm_accuracies'])}"
    said += f" (means of {len(steps)} validation{'s' * (len(steps) != 1)} until update {steps[-1]})"
    return said if len(steps) == JUDGED_VALIDATIONS else f"{said}; {not_judged}"


def table(found: Mapping[str, Any]) -> Table:
    """A table of the result, for a screen."""
    title = f"{found['updates']} updates, usually one in {found['usual_seconds']:.1f} s"
    if accuracy := accuracy_of(found):
        title += f"; {accuracy}"
    summary = Table(title=title, title_justify="left")
    for column in COLUMNS:
        summary.add_column(column, justify="left" if column == "fault" else "right")
    for row in rows(found):
        summary.add_row(*row.values())
    return summary
