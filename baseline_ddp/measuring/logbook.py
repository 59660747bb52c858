"""Writes `logbook.md`: settings and results of a run, from the files in its folder."""

import json
import shlex
from datetime import timedelta
from pathlib import Path
from typing import Any

from baseline_ddp.measuring.pictures import draw_curves
from recipe.run_folder import RunFolder, read_metrics


def write_logbook(folder: RunFolder) -> Path:
    """Writes `logbook.md` and `curves.png` from the folder's other files; `test.json` may be missing.

    Args:
        folder: a run folder that has its `summary.json`.

    Returns:
        The logbook's path.
    """
    summary, environment = _read(folder.summary), _read(folder.environment)
    test_file = folder.path / "test.json"
    test = _read(test_file) if test_file.exists() else None
    draw_curves(read_metrics(folder.metrics), folder.path / "curves.png")
    parts = [
        f"# {summary['run_id']}, {folder.path.name}",
        f"{summary['outcome'].capitalize()} after {summary['steps']} steps{_duration(summary)}.",
        _section("Command", f"```bash\n{_command(environment, summary)}\n```"),
        _section("Code and machine", _table(_machine(environment, summary))),
        _section("Recipe", f"```json\n{json.dumps(_read(folder.recipe), indent=1)}\n```"),
        _section("Batch", _table(_batch(summary))),
        _section("Results", _table(_results(summary, test))),
        _section("Time", _table(_times(summary))),
        _section("Memory and utilisation", _table(_resources(summary))),
        _section("Curves", "![Curves](curves.png)"),
    ]
    if test is not None:
        parts.append(_section("Confusion matrix on the test split", "![Confusion matrix](confusion.png)"))
    path = folder.path / "logbook.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _duration(summary: dict[str, Any]) -> str:
    """The duration in words. The time before a run was resumed was not measured."""
    resumed, seconds = summary["resumed_step"], _time(summary["seconds"])
    if resumed is None:
        return f" and {seconds}"
    return f", resumed at step {resumed}: {summary['steps'] - resumed} of them in {seconds}"


def _command(environment: dict[str, Any], summary: dict[str, Any]) -> str:
    nodes, processes = summary["nodes"], summary["processes"]
    launcher = "python" if summary["strategy"] == "single" else f"torchrun --standalone --nproc-per-node {processes}"
    if nodes > 1:  # the line of each node differs; --print-launch prints them
        launcher = f"torchrun --nnodes {nodes} --nproc-per-node {processes // nodes} --node-rank ... --master-addr ..."
    return f"{launcher} {shlex.join(environment['command_line'])}"


def _machine(environment: dict[str, Any], summary: dict[str, Any]) -> dict[str, str]:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    return {
        "commit": environment["git_commit"] or "not from a git checkout",
        "processor": f"{environment['cpu']}, {environment['cores']} cores, {environment['memory_gib']} GiB",
        "GPUs": ", ".join(environment["gpus"]) or "none",
        "versions": versions,
        "started": environment["started_at"],
        "strategy": f"{summary['strategy']}, {summary['processes']} process(es), precision {summary['precision']}",
    }


def _batch(summary: dict[str, Any]) -> dict[str, str]:
    found = summary["largest_batch"]
    largest = "not searched (--batch-size auto does)" if found is None else f"{found} samples"
    return {
        "samples per update": f"{summary['global_batch']:,}",
        "micro-batch": str(summary["micro_batch"]),
        "accumulation": str(summary["accumulation"]),
        f"largest micro-batch ({summary['strategy']}, {summary['precision']})": largest,
        "learning rate": f"{summary['learning_rate']:g}",
    }


def _results(summary: dict[str, Any], test: dict[str, Any] | None) -> dict[str, str]:
    results = {
        "last training loss": _number(summary["train_loss"]),
        "last validation accuracy": _percent(summary["val_accuracy"]),
        "best validation accuracy": _percent(summary["best_val_accuracy"]),
        "best validation loss": _number(summary["best_val_loss"]),
    }
    if test is None:
        return results | {"test": summary["test_problem"] or "not measured"}
    label = f"test ({test['checkpoint']} of step {test['step']}, {test['samples']:,} samples)"
    shares = ("top1", "top5", "macro_f1", "precision", "recall")
    results |= {f"{label}, {share}": _percent(test[share]) for share in shares}
    worst = [(share, index) for index, share in enumerate(test["per_class_accuracy"]) if share is not None]
    return results | {f"{label}, worst class": f"{_percent(min(worst)[0])} (class {min(worst)[1]})"}


def _times(summary: dict[str, Any]) -> dict[str, str]:
    """Rows of the table of times; those of a resumed run count from there."""
    parts, resumed = summary["step_time_seconds"], summary["resumed_step"]
    total = sum(parts.values()) or 1.0
    shares = {f"of it {name}": f"{_time(seconds)} ({seconds / total:.1%})" for name, seconds in parts.items()}
    return {
        "whole training" if resumed is None else f"training since step {resumed}": _time(summary["seconds"]),
        "training samples per second": _number(summary["samples_per_second"], ",.1f"),
        "steps, without validation": _time(sum(parts.values())),
        **shares,
    }


def _resources(summary: dict[str, Any]) -> dict[str, str]:
    return {tag: f"mean {of['mean']:.2f}, highest {of['peak']:.2f}" for tag, of in summary["resources"].items()}


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}"


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else str(timedelta(seconds=round(seconds)))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _number(value: float | None, spec: str = ".4f") -> str:
    return "-" if value is None else format(value, spec)
