"""Runs one cell in a lab of its own and writes its result.

    python -m analysis cell FOLDER        # FOLDER holds cell.json; everything else is written there

Afterwards FOLDER has `runs/` (run folders of the peers), `logs/` (their output), `commands.json`, `topology.json`,
`started.json` (Unix seconds at which each host's command was started), `router.jsonl` and `watch.jsonl`. `result.json`
is written last. If FOLDER had a result with problems, `earlier_problems.json` beside FOLDER keeps them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from analysis.campaigns.calibration import machine_gflops
from analysis.campaigns.cells import Cell, network_of
from analysis.campaigns.home import STARTED, home_numbers, measures_home
from analysis.campaigns.measure import measure, problems_of_broken, rounds_of, steps_done
from analysis.campaigns.payload import too_few_bytes
from analysis.campaigns.peer_processes import environment_without_peers, last_words
from analysis.campaigns.systems import RUN_ID, check_learning, system_of
from analysis.campaigns.watch import Watch
from analysis.wan import sandbox
from analysis.wan.lab import Lab
from analysis.wan.topology import Host
from recipe.command_line import exit_status
from recipe.errors import InputError
from recipe.run_folder import RunFolder, write_json
from recipe.training.pacing import ALL_SAMPLES, VARIABLE

EARLIER = "earlier_problems.json"
"""File beside the folders of cells: problems of earlier runs of those that ran again, by name of the folder."""
_ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.2
_ADDRESS_SECONDS = 120.0


class RunError(Exception):
    """Raised if the cell gives no result; the message says why."""


class CellRun:
    """A cell while it runs.

    Args:
        cell: what to run.
        folder: folder of the cell, for all files.
        lab: the network, open.
    """

    def __init__(self, cell: Cell, folder: Path, lab: Lab) -> None:
        self.cell, self.folder, self.lab = cell, folder, lab
        self.system = system_of(cell)
        self.runs, self.logs = folder / "runs", folder / "logs"
        self.processes: dict[str, subprocess.Popen] = {}
        self.commands: dict[str, list[str]] = {}
        self.started: dict[str, float] = {}
        self.killed: set[str] = set()
        self.deadline = time.monotonic() + cell.time_limit_seconds

    def run(self) -> None:
        """Starts every host as a user would, and waits until all have ended.

        Raises:
            RunError: a host failed, or the time limit is over.
        """
        self.logs.mkdir()
        first, *others = self.lab.hosts[: self.cell.peers_at_start]
        self._start(first, ())
        addresses = self._addresses(first) if self.system.joins and self.cell.peers > 1 else ()
        for host in others:
            self._start(host, addresses)
        while any(process.poll() is None for process in self.processes.values()):
            self._check()
            self._kill_if_due()
            self._start_last_if_due(addresses)
            time.sleep(_POLL_SECONDS)
        self._check()

    def _start(self, host: Host, addresses: tuple[str, ...]) -> None:
        command = self.system.command(self.system, self.cell, host, self.lab.hosts[0], self.runs, addresses)
        cores = own_cores(host.number, self.cell.peers)
        threads = max(1, len(os.sched_getaffinity(0)) // self.cell.peers)
        variables = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "eth0"}
        if self.cell.paced_rates:
            variables[VARIABLE] = str(self.cell.paced_rates[host.number - 1])
            variables[ALL_SAMPLES] = str(int(self.cell.paced_all_samples))
        self.commands[host.name] = command
        self.started[host.name] = time.time()
        with (self.logs / f"{host.name}.log").open("wb") as log:
            self.processes[host.name] = self.lab.start(
                host,
                ["taskset", "--cpu-list", ",".join(map(str, cores)), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
                env=environment_without_peers() | variables,
            )
        write_json(self.folder / "commands.json", self.commands)
        write_json(self.folder / STARTED, self.started)

    def _addresses(self, first: Host) -> tuple[str, ...]:
        """Waits for the first peer's address inside the lab."""
        deadline = time.monotonic() + _ADDRESS_SECONDS
        while time.monotonic() < deadline:
            self._check()
            try:
                status = json.loads(RunFolder(self.runs / RUN_ID / first.name).status.read_text())
            except (OSError, ValueError):
                status = {}
            if found := [address for address in status.get("addresses", ()) if first.address in address]:
                return tuple(found[:1])
            time.sleep(_POLL_SECONDS)
        raise RunError(f"{first.name} had no address after {_ADDRESS_SECONDS:.0f} s")

    def _check(self) -> None:
        for name, process in self.processes.items():
            if process.poll() not in (None, 0) and name not in self.killed:
                log = self.logs / f"{name}.log"
                raise RunError(f"{name} ended with status {process.returncode}: {last_words(log)}")
        if time.monotonic() > self.deadline:
            raise RunError(f"not done after {self.cell.time_limit_seconds:.0f} s")

    def _kill_if_due(self) -> None:
        if self.cell.kill_at_step is None or self.killed:
            return
        first, last = self.lab.hosts[0], self.lab.hosts[-1]
        if steps_done(self.runs / RUN_ID / first.name) >= self.cell.kill_at_step:
            self.killed.add(last.name)
            self.lab.unplug(last)  # so that its kernel cannot close its connections
            os.killpg(self.processes[last.name].pid, signal.SIGKILL)

    def _start_last_if_due(self, addresses: tuple[str, ...]) -> None:
        first, last = self.lab.hosts[0], self.lab.hosts[-1]
        if self.cell.last_joins_at_step is None or last.name in self.processes:
            return
        if steps_done(self.runs / RUN_ID / first.name) >= self.cell.last_joins_at_step:
            self._start(last, addresses)


def own_cores(number: int, peers: int) -> list[int]:
    """The cores of host `number` (1 is the first): if there are enough, each host gets its own cores, else all of
    them."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // peers
    return cores[(number - 1) * share : number * share] or cores


def run_cell(folder: Path) -> None:
    """Runs the cell in the folder; the process has to be inside its sandbox.

    Raises:
        InputError: the cell cannot work.
    """
    cell = Cell.from_json((folder / "cell.json").read_text())
    system_of(cell)
    check_learning(cell)
    network = network_of(cell, folder)
    set_result_aside(folder)
    _empty(folder)
    began, speeds, problem = time.time(), [machine_gflops()], None
    with Lab(network, folder, congestion_control=cell.congestion_control) as lab, Watch(lab, folder / "watch.jsonl"):
        congestion_control = lab.congestion_control_in_use()
        try:
            CellRun(cell, folder, lab).run()
        except RunError as error:
            problem = str(error)
    speeds.append(machine_gflops())
    rounds = rounds_of(folder, cell)
    if problem is None:
        result = measure(folder, cell, rounds)
    else:
        result = {"problems": problems_of_broken(folder, cell, began, problem)}
    result |= {"backend": lab.backend, "congestion_control": congestion_control}
    result |= {"seconds": time.time() - began, "machine_gflops": speeds}
    result["problems"] += too_few_bytes(cell, result)
    if measures_home(cell):
        result["home"] = home_numbers(folder, cell)
    if earlier := _json(folder.parent / EARLIER).get(folder.name):
        result |= {"earlier_problems": earlier, "earlier_runs": len(earlier)}
    write_json(folder / "result.json", result)


def read_result(folder: Path) -> dict[str, Any]:
    """The content of a cell's `result.json`; empty if there is none."""
    return _json(folder / "result.json")


def set_result_aside(folder: Path) -> None:
    """Notes the problems of a cell's result, in a file that survives an interrupted run, and deletes the result."""
    if problems := read_result(folder).get("problems"):
        earlier = _json(folder.parent / EARLIER)
        noted = [*earlier.get(folder.name, []), "; ".join(problems)]
        write_json(folder.parent / EARLIER, earlier | {folder.name: noted})
    (folder / "result.json").unlink(missing_ok=True)


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def _empty(folder: Path) -> None:
    """Deletes the files of an interrupted run, so that they are not taken for those of this one."""
    for path in folder.iterdir():
        if path.name != "cell.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(arguments: list[str] | None = None) -> int:
    """Runs the cell; returns the exit status: 0 with a result, even an invalid one, 2 for what cannot work, 130 after
    Ctrl-C."""

    def run() -> None:
        names = sys.argv[1:] if arguments is None else arguments
        if len(names) != 1:
            raise InputError("Name one folder of a cell.")
        folder = Path(names[0]).resolve()
        if not (folder / "cell.json").exists():
            raise InputError(f"{folder} holds no cell.json: name a cell's folder.")
        sandbox.enter("analysis", ["cell", str(folder)])
        run_cell(folder)

    return exit_status(run)
