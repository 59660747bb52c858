"""Watches a run from outside once a second: processor time, whose it was, and bytes on the hosts' links."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil

from analysis.wan.lab import Lab

PERIOD_SECONDS = 1.0


class Watch:
    """Writes `watch.jsonl` while a `with` block lasts.

    Each line: `time` (Unix seconds), `busy` (cores that were busy since the last line), `lab` (cores that processes of
    this lab kept busy), `memory` (bytes in use on the whole machine), `traffic` ({host: [bytes sent, bytes received]
    since the lab began}).

    Args:
        lab: whose hosts.
        file: where lines go.
    """

    def __init__(self, lab: Lab, file: Path) -> None:
        self._lab, self._file = lab, file
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._seconds_of: dict[int, float] = {}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        busy, lab, at = busy_seconds(), self._lab_seconds(), time.monotonic()
        with self._file.open("w", buffering=1) as file:
            closing = False
            while not closing:
                closing = self._closing.wait(PERIOD_SECONDS)  # the last line covers what happened just before
                now_busy, now_lab, now = busy_seconds(), self._lab_seconds(), time.monotonic()
                elapsed = now - at
                line = {"time": time.time(), "busy": (now_busy - busy) / elapsed, "lab": (now_lab - lab) / elapsed}
                line |= {"memory": psutil.virtual_memory().used, "traffic": self._lab.traffic()}
                file.write(json.dumps(line) + "\n")
                busy, lab, at = now_busy, now_lab, now

    def _lab_seconds(self) -> float:
        """Processor time of all processes in this lab's process namespace, those that have ended included."""
        for process in psutil.process_iter():
            try:
                used = process.cpu_times()
            except psutil.Error:
                continue
            self._seconds_of[process.pid] = used.user + used.system
        return sum(self._seconds_of.values())


def busy_seconds() -> float:
    """Processor time that the whole machine has used, in core-seconds; what a hypervisor took away counts as used."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
