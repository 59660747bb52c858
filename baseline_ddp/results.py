"""The work after the training, in the first process alone: the test, the summary and the logbook."""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from baseline_ddp.evaluate import TestResult, evaluate, result_table
from baseline_ddp.measuring.logbook import write_logbook
from baseline_ddp.processes import RunFailed
from recipe.errors import InputError
from recipe.remote_file import RemoteCopy, RemoteFile
from recipe.run_folder import RunFolder, read_metrics, write_json
from recipe.training.checkpoint_io import BEST

if TYPE_CHECKING:
    from baseline_ddp.session import Session


INTERRUPTED_STATUS = 130
"""Exit status of a run that a signal stopped; shells use it for Ctrl-C."""


def finish(session: Session) -> int:
    """Tests the best checkpoint and completes the run folder; returns the exit status.

    A run that was interrupted is neither validated once more nor tested, so that it ends quickly.

    Raises:
        RunFailed: the best checkpoint could not be copied to its address.
    """
    outcome = _outcome(session)
    if session.copy is not None:
        session.copy.close()
    is_interrupted = outcome == "interrupted"
    result, test_problem = (None, "the training was interrupted") if is_interrupted else _test(session)
    session.folder.write_summary(
        session.recipe,
        **_training(session, outcome),
        **_setting(session),
        test_accuracy=None if result is None else result.top1,
        test_problem=test_problem,
    )
    logbook = write_logbook(session.folder)
    if result is not None:
        Console(soft_wrap=True).print(result_table(result))
    step, seconds = session.trainer.global_step, session.seconds
    resumed = session.beginning.resumed_step
    since = "" if resumed is None else f", resumed at step {resumed}"
    print(f"{outcome.capitalize()} at step {step} after {seconds:.0f} s{since}: {logbook}", flush=True)
    _check_arrived(session.copy, session.folder)
    if is_interrupted:
        print(f"To go on: the same command with --run-id {session.beginning.run_id} --resume", flush=True)
    return INTERRUPTED_STATUS if is_interrupted else 0


def deliver_best(folder: RunFolder, remote: RemoteFile) -> None:
    """Copies the best checkpoint of a complete run to its address, unless it is there already.

    Raises:
        RunFailed: the checkpoint could not be copied.
    """
    best, summary = folder.checkpoints / BEST, json.loads(folder.summary.read_text())
    if not best.exists() or summary.get("best_checkpoint") == {"url": remote.url, "sha256": _sha256(best)}:
        return
    copy = RemoteCopy(remote)
    copy.submit(best)
    copy.close()
    _check_arrived(copy, folder)
    write_json(folder.summary, summary | {"best_checkpoint": {"url": remote.url, "sha256": copy.sha256}})


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _check_arrived(copy: RemoteCopy | None, folder: RunFolder) -> None:
    """Raises RunFailed if the newest best checkpoint has not been copied to its address."""
    if copy is not None and copy.problem:
        raise RunFailed(
            f"The best checkpoint could not be copied to {copy.remote.url} ({copy.problem}): give the same command "
            f"again with --resume, or copy {folder.checkpoints / BEST} there by hand."
        )


def _outcome(session: Session) -> str:
    target = session.options.stops.target_accuracy
    if target is not None and session.trainer.callback_metrics.get("val/top1", 0.0) >= target:
        return "target accuracy reached"
    if session.trainer.global_step >= session.trainer.max_steps:
        return "completed"
    return "time is up" if session.stop_request.time_is_up else "interrupted"


def _test(session: Session) -> tuple[TestResult | None, str | None]:
    """The test result of the best checkpoint, or the reason why there is none. Missing test images are no failure."""
    best = session.folder.checkpoints / BEST
    checkpoint = best if best.exists() else session.snapshots.path
    try:
        result = evaluate(checkpoint, session.options.files.data_dir, session.plan.micro_batch, session.device)
    except InputError as problem:
        return None, str(problem)
    result.write(session.folder.path / "test.json", session.folder.path / "confusion.png")
    return result, None


def _training(session: Session, outcome: str) -> dict[str, Any]:
    """Entries of the summary. Times, rates and resources count updates since the run resumed; accuracy and loss all."""
    resumed_step, last_step = session.beginning.resumed_step, session.trainer.global_step
    lines = read_metrics(session.folder.metrics)
    own_lines = [line for line in lines if line["step"] > (resumed_step or 0)]
    accuracies, losses = _values(lines, "val/top1"), _values(lines, "val/loss")
    own_samples = (last_step - (resumed_step or 0)) * session.plan.global_batch
    parts = ("data", "compute", "communication")
    step_time = {part: sum(_values(own_lines, f"perf/{part}_seconds")) for part in parts}
    return {
        "run_id": session.beginning.run_id,
        "outcome": outcome,
        "steps": last_step,
        "samples": last_step * session.plan.global_batch,
        "seconds": session.seconds,
        "val_accuracy": accuracies[-1] if accuracies else None,
        "train_loss": (_values(lines, "train/loss") or [None])[-1],
        "best_val_accuracy": max(accuracies, default=None),
        "best_val_loss": min(losses, default=None),
        "samples_per_second": own_samples / sum(step_time.values()) if own_samples else None,
        "step_time_seconds": step_time,
        "resources": _resources(own_lines),
        "resumed_step": resumed_step,
        "best_checkpoint": session.copy and {"url": session.remote.url, "sha256": session.copy.sha256},
    }


def _resources(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean and highest value of each process's resources, as {"rank0/cpu_percent": {"mean": ..., "peak": ...}}."""
    tags = sorted({tag for line in lines for tag in line if tag.startswith("resources/")})
    values = {tag.removeprefix("resources/"): _values(lines, tag) for tag in tags}
    return {tag: {"mean": statistics.mean(found), "peak": max(found)} for tag, found in values.items()}


def _setting(session: Session) -> dict[str, Any]:
    plan = session.plan
    return {
        "strategy": session.strategy_name,
        "processes": plan.processes,
        "nodes": session.processes.nodes,
        "precision": session.precision,
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "largest_batch": session.largest_batch,
        "learning_rate": session.recipe.learning_rate,
        "steps_per_epoch": session.data.num_train_samples / plan.global_batch,
    }


def _values(lines: list[dict[str, Any]], tag: str) -> list[float]:
    return [line[tag] for line in lines if line.get(tag) is not None]
