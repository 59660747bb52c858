"""Records once a second how a run uses the machine: processor time, bytes on the hosts' links, and memory."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil

from analysis.wan.lab import Lab

PERIOD_SECONDS = 1.0
MEMORY_SECONDS = 20.0
"""Seconds between two looks at memory, each of which takes the kernel milliseconds per gigabyte."""


class Watch:
    """Writes `watch.jsonl` while a `with` block lasts.

    Each line has `time` (Unix seconds), `busy` (mean number of busy cores since the last line), `lab` (the same for
    processes of this lab) and `traffic` ({host: [bytes sent, bytes received] since the lab began}). Now and then a line
    has `memory`: bytes of all processes of this lab, with shared memory counted once.

    Args:
        lab: the lab to watch.
        file: the file for the lines.
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
        looked_at_memory = at
        with self._file.open("w", buffering=1) as file:
            closing = False
            while not closing:
                closing = self._closing.wait(PERIOD_SECONDS)  # the last line covers the time just before the end
                now_busy, now_lab, now = busy_seconds(), self._lab_seconds(), time.monotonic()
                elapsed = now - at
                line = {"time": time.time(), "busy": (now_busy - busy) / elapsed, "lab": (now_lab - lab) / elapsed}
                line["traffic"] = self._lab.traffic()
                if now - looked_at_memory >= MEMORY_SECONDS:
                    line["memory"], looked_at_memory = lab_memory(), now
                file.write(json.dumps(line) + "\n")
                busy, lab, at = now_busy, now_lab, now

    def _lab_seconds(self) -> float:
        """Processor time of all processes in this lab's process namespace, including those that have ended."""
        # An ended process keeps its last entry, so its time still counts.
        for process in psutil.process_iter():
            try:
                used = process.cpu_times()
            except psutil.Error:
                continue
            self._seconds_of[process.pid] = used.user + used.system
        return sum(self._seconds_of.values())


def lab_memory() -> int:
    """Bytes of all processes in this process namespace: private memory, and each process's share of shared memory."""
    found = 0
    for process in psutil.process_iter():
        try:
            found += process.memory_full_info().pss
        except psutil.Error:
            continue
    return found


def busy_seconds() -> float:
    """Processor time that the whole machine has used, in core-seconds; time that a hypervisor took away counts as
    used."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
