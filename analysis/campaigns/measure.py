"""Computes a cell's numbers from its files: rounds, samples per second, bytes, processor time, and problems."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from analysis.campaigns.cells import Cell
from analysis.campaigns.home import home_numbers
from analysis.campaigns.payload import too_few_bytes
from analysis.campaigns.systems import RUN_ID, SYSTEMS
from analysis.wan.router import VERY_LATE_MS
from recipe.run_folder import RunFolder, read_metrics, write_json

FOREIGN_CORES = 0.15
"""Cores that other programs may use on average."""
PACED_BUSY = 0.7
"""Largest share of busy cores in a paced cell; above it, the cell measures the machine and not the network."""
LATE_SHARE = 0.01
"""Largest share of the router's packets that may be later than its `VERY_LATE_MS`."""
CLOCK_SHARE = 0.05
"""Largest difference, as a share, of a system's own seconds of its updates from the seconds between their ends."""

PARTS = ("compute_seconds", "meeting_seconds", "exchange_seconds", "waiting_seconds")
"""Parts of an update; a system may report only some of them."""
OF_THE_MACHINE = re.compile(
    r"nobody watched|"  # as earlier versions said it
    r"the machine was (not watched|saturated)|\d+ peers computed on|other programs|"
    r"the router (was not watched|was late|missed)|it ended without a result|by its own account"
)
"""Beginnings of problems that are those of the lab, and not of the system in it."""
_SPEEDS = {"perf/step_seconds", "perf/swarm_samples_per_second"}
"""The line that is written at the end of an update has one of these."""


@dataclass(frozen=True)
class Round:
    """A global update, as the first host recorded it; seconds are wall time without validation."""

    step: int
    ended_at: float
    """Unix seconds."""
    seconds: float
    samples: float
    """Samples of all peers."""
    peers: int | None = None
    compute_seconds: float | None = None
    meeting_seconds: float | None = None
    """Time of matchmaking."""
    exchange_seconds: float | None = None
    """Time of the transfer."""
    waiting_seconds: float | None = None
    """Time without computing, because an average had to arrive first."""
    received: float | None = None
    """Share of the parts of the average that arrived."""
    follows_validation: bool = False
    """Whether the update follows a validation, and so does not count for a system's speed.

    Such an update does work that a validation leaves: DDP's processes agree on their best checkpoint, which costs some
    round trips. Or it is spared work that went on meanwhile, such as a swarm's average.
    """


def steps_done(folder: Path) -> int:
    """The last global update that a running peer has logged; 0 for none."""
    return max((int(line.get("step") or 0) for line in read_metrics(RunFolder(folder).metrics)), default=0)


def rounds_of(folder: Path, cell: Cell) -> list[Round]:
    """All updates of a cell, oldest first; empty if the first host has written nothing."""
    lines = _lines(folder, "h1")
    own_samples = [_lines(folder, f"h{number}") for number in range(2, cell.peers + 1)]
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line.get("step"):
            known = steps.setdefault(int(line["step"]), {})
            ended = line if _SPEEDS & line.keys() else known  # the line of a validation comes later
            known.update(line | {"time": ended.get("time", line["time"])})
    found, validated = [], {step for step, line in steps.items() if line.get("val/top1") is not None}
    for step, line in sorted(steps.items()):
        if not _SPEEDS & line.keys():
            continue
        item = _round(step, line, [_own_samples(peer, step) for peer in own_samples])
        found.append(replace(item, follows_validation=bool(found) and found[-1].step in validated))
    return found if SYSTEMS[cell.system].joins or cell.peers == 1 else _on_time(found, validated)


def _on_time(rounds: list[Round], validated: set[int]) -> list[Round]:
    """The rounds with corrected ends.

    Several processes of DDP write the line of an update only when the next one ends, or before a validation.
    """
    late = pairwise(rounds)
    ends = [item.ended_at - (0.0 if item.step in validated else following.seconds) for item, following in late]
    return [replace(item, ended_at=end) for item, end in zip(rounds, [*ends, rounds[-1].ended_at], strict=True)]


def _round(step: int, line: dict[str, Any], others: list[float]) -> Round:
    peers = line.get("swarm/peers")
    if "swarm/samples" in line:
        samples, seconds = line["swarm/samples"], line["swarm/samples"] / line["perf/swarm_samples_per_second"]
    elif "swarm/own_samples" in line:  # stock Hivemind: each peer knows only its own samples
        samples, seconds = line["swarm/own_samples"] + sum(others), line["perf/step_seconds"]
        peers = 1 + sum(own > 0 for own in others)
    else:
        seconds = line["perf/step_seconds"]
        samples = line["perf/samples_per_second"] * seconds
    return Round(
        step=step,
        ended_at=line["time"],
        seconds=seconds,
        samples=samples,
        peers=None if peers is None else int(peers),
        compute_seconds=line.get("round/compute_seconds", line.get("perf/compute_seconds")),
        meeting_seconds=line.get("round/meeting_seconds"),
        exchange_seconds=line.get("round/exchange_seconds", line.get("perf/communication_seconds")),
        waiting_seconds=line.get("round/blocked_seconds"),
        received=line.get("round/parts_received_fraction"),
    )


def _own_samples(lines: list[dict[str, Any]], step: int) -> float:
    return sum(line.get("swarm/own_samples", 0.0) for line in lines if line.get("step") == step)


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return read_metrics(RunFolder(folder / "runs" / RUN_ID / name).metrics)


def measured_rounds(cell: Cell, rounds: list[Round]) -> list[Round]:
    """The rounds without the warm-up.

    The warm-up's share of the rounds is that of the cell's steps, because a system may make more and smaller updates.
    """
    skip = math.ceil(len(rounds) * cell.warm_up_steps / cell.steps)
    return rounds[skip:]


def _undisturbed(rounds: list[Round]) -> list[Round]:
    """The rounds without those that follow a validation, unless nearly all do."""
    found = [item for item in rounds if not item.follows_validation]
    return found if len(found) > 1 else rounds


def measure(folder: Path, cell: Cell, rounds: list[Round]) -> dict[str, Any]:
    """All numbers that the report needs, as JSON values, and `problems`, which make the cell invalid."""
    kept = measured_rounds(cell, rounds)
    if len(kept) < 2:
        return {"problems": [f"only {len(rounds)} updates were logged"]}
    counted = _undisturbed(kept)
    seconds, samples = sum(item.seconds for item in counted), sum(item.samples for item in counted)
    since, until = kept[0].ended_at - kept[0].seconds, kept[-1].ended_at
    everything = read_metrics(folder / "watch.jsonl")
    watched = [line for line in everything if since <= line["time"] <= until]
    sent = _bytes_sent(since, until, everything)
    numbers = {
        "samples_per_second": samples / seconds,
        "step_seconds": seconds / len(counted),
        "samples_per_step": samples / len(counted),
        "bytes_sent": sent,
        "updates": len(kept),
        "bytes_per_sample": None if sent is None else sent / sum(item.samples for item in kept),
        "busy_cores": _mean(line["busy"] for line in watched),
        "lab_cores": _mean(line["lab"] for line in watched),
        **{name: _mean(getattr(item, name) for item in counted) for name in PARTS},
        "received": _received(folder, cell, {item.step for item in kept}),
        "rounds": len(counted),
        "own_warmup_steps": _own_warmup_steps(folder),
        **_quality(folder, cell, rounds),
    }
    router = read_metrics(folder / "router.jsonl")
    numbers |= _router_numbers([line for line in router if since <= line["time"] <= until])
    numbers["has_router"] = (folder / "router.jsonl").exists()
    spans = [(item.ended_at - item.seconds, item.ended_at) for item in rounds]
    table = [
        asdict(item) | {"bytes_sent": _bytes_sent(*span, everything)} for item, span in zip(rounds, spans, strict=True)
    ]
    return numbers | {"problems": problems(cell, kept, numbers), "all_rounds": table}


def measure_again(folder: Path) -> dict[str, Any]:
    """Computes a finished cell's result again from its files; a result without numbers stays as it is."""
    result = json.loads((folder / "result.json").read_text())
    if "samples_per_second" in result:
        cell = Cell.from_json((folder / "cell.json").read_text())
        result |= measure(folder, cell, rounds_of(folder, cell))
        result["problems"] += too_few_bytes(cell, result)
        if "home" in result:  # results of an earlier version have none
            result["home"] = home_numbers(folder, cell)
        write_json(folder / "result.json", result)
    return result


def problems(cell: Cell, rounds: list[Round], numbers: dict[str, Any]) -> list[str]:
    """Reasons why the cell did not measure what it should; each is a sentence, those of the machine come first."""
    found = machine_problems(cell, numbers)
    if abs((share := own_over_wall(rounds)) - 1) > CLOCK_SHARE:
        found.append(f"by its own account its updates took {share:.0%} of the time that passed between their ends")
    if numbers["received"] is not None and numbers["received"] < 1:
        found.append(f"an average was partial: {numbers['received']:.1%} of its parts arrived")
    counted = [item.peers for item in rounds if item.peers is not None]
    if counted and min(counted) < cell.least_peers:
        found.append(f"only {min(counted)} of {cell.peers} peers took part in an update")
    if counted and cell.last_joins_at_step is not None and max(counted) < cell.peers:
        found.append("the last host never took part in an update")
    if counted and len(counted) < len(rounds):
        found.append(f"the first peer was not there in {len(rounds) - len(counted)} updates")
    return found


def own_over_wall(rounds: list[Round]) -> float:
    """Seconds of updates by the system's own account, over those between the times of their lines.

    Only consecutive updates count, and none next to a validation, because those lines are written at other times. If
    there are none, as when each update is validated, the result is 1.
    """
    validated = {item.step - 1 for item in rounds if item.follows_validation}
    beside = validated | {step + 1 for step in validated}
    pairs = [(one, item) for one, item in pairwise(rounds) if item.step == one.step + 1]
    pairs = [(one, item) for one, item in pairs if not {one.step, item.step} & beside]
    wall_seconds = sum(item.ended_at - one.ended_at for one, item in pairs)
    return sum(item.seconds for _, item in pairs) / wall_seconds if wall_seconds else 1.0


def problems_of_broken(folder: Path, cell: Cell, since: float, problem: str) -> list[str]:
    """Problems of a run that broke off. Those of the machine come first, since they may be the reason.

    Args:
        since: Unix seconds at which the run began
    """
    watched = [line for line in read_metrics(folder / "watch.jsonl") if line["time"] >= since]
    numbers = {
        name: _mean(line[key] for line in watched) for name, key in (("busy_cores", "busy"), ("lab_cores", "lab"))
    }
    numbers |= _router_numbers([line for line in read_metrics(folder / "router.jsonl") if line["time"] >= since])
    numbers["has_router"] = (folder / "router.jsonl").exists()
    return [*machine_problems(cell, numbers), problem]


def machine_problems(cell: Cell, numbers: dict[str, Any]) -> list[str]:
    """Problems of the lab, and not of the system in it."""
    found, cores = [], os.cpu_count() or 1
    if numbers["busy_cores"] is None:
        return ["the machine was not watched meanwhile"]
    if cell.paced_samples_per_second:
        if numbers["busy_cores"] > PACED_BUSY * cores:
            found.append(f"the machine was saturated: {numbers['busy_cores']:.1f} of {cores} cores were busy")
    elif cell.peers > cores:
        found.append(f"{cell.peers} peers computed on {cores} cores: pace them")
    foreign = numbers["busy_cores"] - numbers["lab_cores"]
    if foreign > FOREIGN_CORES:
        found.append(f"other programs, or other machines on the same hardware, used {foreign:.2f} cores")
    if "late_share" not in numbers and numbers.get("has_router"):
        found.append("the router was not watched meanwhile")
    if numbers.get("late_share", 0.0) > LATE_SHARE:
        found.append(
            f"the router was late: {numbers['late_share']:.1%} of its packets by more than {VERY_LATE_MS:g} ms"
        )
    if numbers.get("overflows"):
        found.append(f"the router missed {numbers['overflows']} packets")
    return found


def failed_by_itself(problems: Sequence[str]) -> bool:
    """Whether a run failed on a machine that was fit for it, which is a result of the system.

    For a run on a busy machine, this cannot be told, and the answer is no.
    """
    return bool(problems) and not any(OF_THE_MACHINE.match(problem) for problem in problems)


def runs_failed_by_themselves(result: dict[str, Any]) -> int:
    """Number of a cell's runs, this one and those before it, that failed by themselves.

    An earlier version ran a cell again after any problem. What it noted of several runs cannot be told apart, so they
    count as one at most.
    """
    before = [problem for problem in result.get("earlier_problems") or () if not OF_THE_MACHINE.match(problem)]
    return failed_by_itself(result["problems"]) + bool(before)


def tries_of(result: dict[str, Any]) -> int:
    """Number of runs, at least, until a cell had this result.

    An earlier version noted that a cell ran again, but not how often.
    """
    return 1 + result.get("earlier_runs", bool(result.get("earlier_problems")))


def _router_numbers(lines: list[dict[str, Any]]) -> dict[str, Any]:
    if len(lines) < 2:
        return {}
    sent = sum(line["sent"] for line in lines)
    return {
        "router_cores": (lines[-1]["cpu_seconds"] - lines[0]["cpu_seconds"]) / (lines[-1]["time"] - lines[0]["time"]),
        "late_share": sum(line["very_late"] for line in lines) / sent if sent else 0.0,
        "late_max_ms": max(line["late_max_ms"] for line in lines),
        "overflows": lines[-1]["overflows"] - lines[0]["overflows"],
        "queue_drops": lines[-1]["queue_drops"] - lines[0]["queue_drops"],
    }


def _quality(folder: Path, cell: Cell, rounds: list[Round]) -> dict[str, Any]:
    """The first host's last validation results, and the training time until the target accuracy.

    An update that follows a validation counts with the mean time of the others.
    """
    lines = [line for line in _lines(folder, "h1") if line.get("val/top1") is not None]
    values = {name: lines[-1].get(f"val/{name}") if lines else None for name in _QUALITIES}
    if cell.target_accuracy is None:
        return values
    reached = next((line["step"] for line in lines if line["val/top1"] >= cell.target_accuracy), None)
    if reached is None:
        return values | {"seconds_to_accuracy": None}
    until = [item for item in rounds if item.step <= reached]
    counted = _undisturbed(until)
    return values | {"seconds_to_accuracy": sum(item.seconds for item in counted) * len(until) / len(counted)}


_QUALITIES = ("top1", "macro_f1", "precision", "recall", "loss")


def _own_warmup_steps(folder: Path) -> int | None:
    """Warm-up steps of the recipe that the first host trained, in its own updates; None if it left no recipe."""
    try:
        return json.loads(RunFolder(folder / "runs" / RUN_ID / "h1").recipe.read_text())["warmup_steps"]
    except (OSError, ValueError, KeyError):
        return None


def _received(folder: Path, cell: Cell, steps: set[int]) -> float | None:
    """The least share of an average's parts that any host received in these updates; None if no host reports it."""
    lines = [line for number in range(1, cell.peers + 1) for line in _lines(folder, f"h{number}")]
    shares = [line.get("round/parts_received_fraction") for line in lines if line.get("step") in steps]
    return min((share for share in shares if share is not None), default=None)


def _bytes_sent(begin: float, end: float, watched: list[dict[str, Any]]) -> float | None:
    """Bytes that all hosts sent between two times, interpolated; None if the watch does not cover them."""
    times = [line["time"] for line in watched]
    if not times or begin < times[0] or end > times[-1]:
        return None
    totals = [float(sum(sent for sent, _ in line["traffic"].values())) for line in watched]
    return float(np.interp(end, times, totals) - np.interp(begin, times, totals))


def _mean(values: Any) -> float | None:
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None
