"""Try programs on an emulated wide-area network, and check that network.

    python -m analysis wan check
    python -m analysis wan run --hosts 3 --rtt-ms 100 --bandwidth-mbps 100 -- ping -c 3 {first_address}
    python -m analysis wan run --topology continents --hosts 4 -- python my_program.py --name {host} --listen {address}

Linux only. It needs root, or permission to make user namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Annotated

import tyro
from rich.progress import track

from analysis.program import wide_console
from analysis.wan import sandbox
from analysis.wan.lab import Backend, Lab
from analysis.wan.topology import Host, Topology, load, shipped_names, uniform
from recipe.command_line import arg, exit_status
from recipe.errors import InputError


@dataclass(frozen=True)
class LabOptions:
    """How the lab carries packets."""

    backend: Backend = "router"
    """router is ours, with which all of the report was measured; netem is the kernel's emulator, if it has one."""
    congestion_control: Annotated[str | None, arg("NAME", "the machine's")] = None
    """TCP's algorithm on all hosts, such as bbr, cubic or reno."""


@dataclass(frozen=True)
class Check:
    """Measure round-trip times, goodput, loss and jitter against what was set; exit 1 if one is out of bounds."""

    lab: LabOptions = field(default_factory=LabOptions)
    seconds: Annotated[float, arg("SECONDS")] = 3.0
    """Length of each TCP measurement."""
    output: Annotated[File | None, arg("FILE", "none")] = None
    """Also write the rows as JSON."""


@dataclass(frozen=True)
class Run:
    """Run the command after -- on every host; {host}, {address}, {number} and {first_address} are filled in."""

    hosts: Annotated[int | None, arg("HOSTS", "3, or those of the topology")] = None
    """Number of hosts."""
    topology: Annotated[str | None, arg("NAME", "equal hosts", f"{', '.join(shipped_names())}, or a .toml file.")] = (
        None
    )
    rtt_ms: Annotated[float, arg("MS")] = 0.0
    """Round-trip time between any two hosts."""
    bandwidth_mbps: Annotated[float | None, arg("MBPS", "unlimited")] = None
    """Rate of each host's uplink and downlink."""
    jitter_ms: Annotated[float, arg("MS")] = 0.0
    """Standard deviation of the one-way delay."""
    loss: Annotated[float, arg("FRACTION")] = 0.0
    """Probability that a packet is lost, in each direction."""
    queue_ms: Annotated[float, arg("MS")] = 100.0
    """Longest wait in a link's queue."""
    lab: LabOptions = field(default_factory=LabOptions)

    def network(self) -> Topology:
        """The topology that the options describe; raises InputError if they contradict each other."""
        if self.topology is None:
            options = {"jitter_ms": self.jitter_ms, "loss": self.loss, "queue_ms": self.queue_ms}
            return uniform(self.hosts or 3, self.rtt_ms, self.bandwidth_mbps, **options)
        plain = Run(hosts=self.hosts, topology=self.topology, lab=self.lab)
        if self != plain:
            raise InputError("A topology has its own delays and rates: leave out --topology, or the other numbers.")
        topology = load(self.topology)
        return topology.with_hosts(self.hosts) if self.hosts else topology


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 if a command failed or a link is out of bounds, 2 for bad input."""
    arguments = sys.argv[1:] if arguments is None else arguments
    split = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[split + 1 :]
    options = tyro.cli(
        Check | Run, args=arguments[:split], prog="python -m analysis wan", config=(tyro.conf.OmitArgPrefixes,)
    )

    def run() -> int:
        if isinstance(options, Check):
            sandbox.enter("analysis", ["wan", *arguments])
            return _check(options)
        topology = options.network()
        if not command:
            raise InputError("There is no command: write it after --, such as: -- ping -c 3 {first_address}")
        if shutil.which(command[0]) is None:
            raise InputError(f"There is no program {command[0]}: install it, or give another command after --.")
        sandbox.enter("analysis", ["wan", *arguments])
        return _run(options, topology, command)

    return exit_status(run)


def _check(options: Check) -> int:
    from analysis.wan.check import links, measure, table, to_json

    rows, done = links(), []
    console = wide_console()
    with tempfile.TemporaryDirectory() as folder:
        lab = options.lab
        measured = measure(rows, File(folder), lab.backend, lab.congestion_control, options.seconds)
        for row in track(measured, "Measuring", total=len(rows), console=console, transient=True):
            done.append(row)
    load = os.getloadavg()[0]
    control = lab.congestion_control or File("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    machine = f"load average {load:.1f} on {os.cpu_count()} cores"
    title = f"Set against measured: {lab.backend}, default TCP {control}, {machine}"
    console.print(table(done, title))
    if options.output:
        options.output.write_text(to_json(done, lab.backend))
    return int(any(row.problems for row in done))


def _run(options: Run, topology: Topology, command: list[str]) -> int:
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(topology, File(folder), options.lab.backend, options.lab.congestion_control)
        with lab:
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            processes = [lab.start(host, fill_in(command, host, lab.hosts[0]), **output) for host in lab.hosts]
            readers = [
                threading.Thread(target=_show, args=(host, process, lock), daemon=True)
                for host, process in zip(lab.hosts, processes, strict=True)
            ]
            for reader in readers:
                reader.start()
            statuses = [process.wait() for process in processes]
            for reader in readers:
                reader.join(1)
    return int(any(statuses))


def fill_in(command: list[str], host: Host, first: Host) -> list[str]:
    """The command with a host's values in place of the words in braces."""
    values = {
        "{host}": host.name,
        "{address}": host.address,
        "{number}": str(host.number),
        "{first_address}": first.address,
    }
    filled = list(command)
    for word, value in values.items():
        filled = [part.replace(word, value) for part in filled]
    return filled


def _show(host: Host, process: subprocess.Popen, lock: threading.Lock) -> None:
    for line in process.stdout:
        with lock:
            print(f"{host.name} | {line.decode(errors='replace').rstrip()}", flush=True)
