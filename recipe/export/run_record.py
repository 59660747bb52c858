"""Reads from a run folder how long a training was, with how many peers, and how good the weights are."""

import json
from dataclasses import dataclass
from typing import Any

from recipe.run_folder import RunFolder, read_metrics


@dataclass(frozen=True)
class Measured:
    """A loss and accuracies, measured on one part of the images.

    Args:
        part: "validation" or "test".
        step: global updates that the weights had seen.
        top1: share of right first guesses.
        top5: share of right answers among the first five guesses; None if it was not recorded.
        loss: mean cross-entropy, without label smoothing; None if it was not recorded.
        images: number of images; None if it was not recorded.
    """

    part: str
    step: int
    top1: float
    top5: float | None = None
    loss: float | None = None
    images: int | None = None


@dataclass(frozen=True)
class RunRecord:
    """What one participant recorded of a run.

    Args:
        run_id: name of the run.
        outcome: why its training ended; None while it is under way.
        updates: global updates that the participant took part in.
        samples: samples of all participants in these updates.
        peers: number of different participants in these updates; 1 for the baseline.
        results: results of the weights of one step, or of the nearest step that was tested before it.
        versions: versions of packages, by name.
    """

    run_id: str
    outcome: str | None
    updates: int
    samples: int
    peers: int
    results: tuple[Measured, ...]
    versions: dict[str, str]


def read_record(folder: RunFolder, step: int) -> RunRecord:
    """Reads what the files of a run folder say about the weights of this step; missing files are allowed."""
    summary, environment = _json(folder.summary), _json(folder.environment)
    rounds = {line["step"]: line for line in _lines(folder.rounds) if _made_an_update(line, step)}
    members = {member for line in rounds.values() for member in line.get("members", ())}
    global_batch = summary.get("global_batch")  # only of the baseline, whose updates are all equally large
    updates = int(step if global_batch else summary.get("steps", step))
    samples = int(step * global_batch if global_batch else summary.get("samples", 0))
    results = (_validated(folder, step), _tested(folder, step))
    versions = environment.get("versions")
    return RunRecord(
        str(summary.get("run_id", folder.path.absolute().parent.name)),
        summary.get("outcome"),
        len(rounds) or updates,
        sum(line.get("samples", 0) for line in rounds.values()) or samples,
        max(len(members), 1),
        tuple(result for result in results if result is not None),
        {name: version for name, version in versions.items() if version} if isinstance(versions, dict) else {},
    )


def _made_an_update(line: dict[str, Any], step: int) -> bool:
    return line.get("outcome") in ("averaged", "alone") and line.get("step", step + 1) <= step


def _validated(folder: RunFolder, step: int) -> Measured | None:
    lines = [line for line in _lines(folder.metrics) if line.get("step") == step and line.get("val/top1") is not None]
    if not lines:
        return None
    last = lines[-1]
    return Measured("validation", step, last["val/top1"], last.get("val/top5"), last.get("val/loss"))


def _tested(folder: RunFolder, step: int) -> Measured | None:
    """The newest test result up to this step, by a peer that evaluates or by the baseline at its end."""
    lines = [line for line in _lines(folder.evaluations) if line.get("step", step + 1) <= step and "top1" in line]
    at_the_end = _json(folder.path / "test.json")
    if at_the_end.get("step") == step:
        lines.append(at_the_end | {"images": at_the_end.get("samples")})
    if not lines:
        return None
    newest = max(lines, key=lambda line: line["step"])
    return Measured(
        "test", newest["step"], newest["top1"], newest.get("top5"), newest.get("loss"), newest.get("images")
    )


def _lines(path: Any) -> list[dict[str, Any]]:
    try:
        return read_metrics(path)
    except OSError:  # such as another user's file
        return []


def _json(path: Any) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
