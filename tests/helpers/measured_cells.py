"""Files of benchmark cells as a swarm writes them, with numbers that can be worked out by hand."""

import json
from pathlib import Path

from analysis.campaigns.cells import Cell
from analysis.campaigns.measure import measure, rounds_of
from analysis.campaigns.systems import SYSTEMS
from recipe.run_folder import write_json


def write_run(
    folder: Path,
    cell: Cell,
    seconds: float = 2.0,
    received: float = 1.0,
    busy: float = 1.0,
    waiting: float = 0.0,
    rate: int = 10_000_000,
    top1: float | None = None,
    samples: int = 512,
) -> None:
    """Write the files of a swarm whose updates of `samples` took `seconds` each, 1.5 of them computing.

    Each host sends `rate` bytes a second. A validation after the fourth update finds the accuracy `top1`.
    """
    lines, watched, router = [], [], []
    is_late = cell.peers > 1 and not SYSTEMS[cell.system].joins  # DDP writes a line when the next update ends
    for step in range(1, cell.steps + 1):
        is_on_time = not is_late or step == cell.steps or (step == 4 and top1 is not None)
        line = {
            "time": 1000 + seconds * (step if is_on_time else step + 1),
            "step": step,
            "swarm/samples": samples,
            "swarm/peers": cell.peers,
        }
        line |= {"perf/swarm_samples_per_second": samples / seconds, "round/compute_seconds": 1.5}
        line |= {"round/meeting_seconds": 0.1, "round/exchange_seconds": seconds - 1.7}
        line |= {"round/blocked_seconds": waiting}
        lines.append(line | {"round/parts_received_fraction": received})
    if top1 is not None:
        quality = dict.fromkeys(("val/macro_f1", "val/precision", "val/recall", "val/top1"), top1)
        lines.insert(4, {"time": 1000 + seconds * 4 + 0.5, "step": 4, **quality})
    for second in range(int(seconds * cell.steps) + 1):
        traffic = {f"h{n + 1}": [second * rate, second * rate] for n in range(cell.peers)}
        watched.append({"time": 1000 + second, "busy": busy, "lab": busy, "traffic": traffic})
        counts = {"sent": 100, "late": 0, "very_late": 0, "late_max_ms": 0.4, "overflows": 0, "queue_drops": 0}
        router.append({"time": 1000 + second, "cpu_seconds": second * 0.1, **counts})
    files = {"runs/run/h1/metrics.jsonl": lines, "watch.jsonl": watched, "router.jsonl": router}
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in content))
    (folder / "cell.json").write_text(cell.to_json())
    result = measure(folder, cell, rounds_of(folder, cell)) | {"backend": "router", "seconds": 60.0}
    write_json(folder / "result.json", result)


CELL = Cell("swarm", recipe="digits", steps=10, warm_up_steps=2, paced_samples_per_second=200.0)
