"""Tests a swarm on an emulated internet with a fault every half minute: the faults of a night within minutes.

    python -m analysis soak --minutes 30 --seed 0       # make soak MINUTES=30
    python -m analysis soak --system hivemind           # the same with Hivemind's own Optimizer: soak-hivemind.json

Afterwards OUTPUT_DIR has `runs/` and `logs/` of the volunteers, and `soak.json`. That says what happened when, what the
swarm lost by it, whether all peers had the same weights at the end, and whether all ledgers agreed.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from inspect import isgeneratorfunction
from pathlib import Path
from typing import Annotated, Literal

import tyro

from analysis.endurance.faults import Faults
from analysis.endurance.ledgers import compare
from analysis.endurance.soak_result import Event, common_checkpoint, summarise, summarise_stock, table
from analysis.endurance.volunteers import CALM_RUNS, RECIPE, RUN_ID, StockVolunteer, Volunteer, calm_runs
from analysis.program import environment_of_result, wide_console
from analysis.wan import sandbox
from analysis.wan.lab import Lab
from analysis.wan.topology import uniform
from recipe.command_line import arg, at_least, exit_status
from recipe.errors import InputError
from recipe.run_folder import make_writable, write_json

LAST_SECONDS = 5.0
"""Time that may pass until all processes are gone. torch's manager of shared memory outlives the last process that used
it by some seconds."""
CALM_SECONDS = 180.0
"""Longest time until all peers train again after the last fault."""


@dataclass(frozen=True)
class SoakOptions:
    """Inject faults into a swarm, and measure how it recovers."""

    system: Literal["swarm", "hivemind"] = "swarm"
    """System that the faults happen to: our swarm, or Hivemind's Optimizer with its defaults."""
    minutes: float = 30.0
    """Minutes during which faults are injected."""
    seed: int = 0
    """Seed of the choice of faults and victims."""
    peers: int = 5
    """Number of hosts, each with one peer."""
    every_seconds: float = 30.0
    """Time from one fault to the next."""
    faults: Annotated[tuple[str, ...], arg("FAULT ...", "all")] = ()
    """Kinds of faults, such as frozen, link-down and first-peer-killed."""
    rtt_ms: float = 100.0
    """Round-trip time between any two hosts."""
    bandwidth_mbps: float = 100.0
    """Rate of each host's link."""
    paced_samples_per_second: float = 60.0
    """Speed of each host's pretended device."""
    averaging: Literal["sync", "local"] = "sync"
    """How the swarm averages; local makes one local step, which hides the averaging."""
    codec: Literal["none", "fp16", "int8"] = "none"
    """Codec of the swarm's gradients."""
    outbound_only: int = 0
    """Number of client-mode peers, the last ones: they only call others, as behind NAT."""
    calm_runs: int = CALM_RUNS
    """Peers that train alone for as many updates afterwards, without faults, to compare accuracies. Accuracies are
    judged if 10 steps or more were validated both with faults and without."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs/soak")
    """Folder for results; its runs/, logs/ and calm/ are deleted first."""

    def check(self) -> None:
        """Raises InputError: a value cannot work."""
        at_least(self, 3, "peers")
        at_least(self, 0, "calm_runs", "outbound_only")
        if self.system == "hivemind" and (self.averaging, self.codec, self.outbound_only) != ("sync", "none", 0):
            raise InputError("--averaging, --codec and --outbound-only are our swarm's: leave them out for hivemind.")
        if self.outbound_only > self.peers - 2:
            raise InputError(
                "--outbound-only leaves fewer than two peers that can be called: give fewer, or more --peers."
            )
        if not 0 < self.minutes <= 24 * 60 or self.every_seconds < 5:
            raise InputError("--minutes has to be more than 0 and at most 1440, --every-seconds at least 5.")
        made = (name for name, method in vars(Faults).items() if isgeneratorfunction(method) and name[0] != "_")
        known = sorted(name.replace("_", "-") for name in made)
        if unknown := set(self.faults) - set(known):
            raise InputError(f"--faults has no {min(unknown)}: choose from {', '.join(known)}.")

    @property
    def recipe(self) -> tuple[str, ...]:
        """Options of the peer that starts the run."""
        local = ("--averaging", "local", "--local-steps", "1") if self.averaging == "local" else ()
        return (*RECIPE, *local, "--codec", self.codec)


class Soak(Faults):
    """A swarm, and the faults that happen to it.

    Args:
        options: duration and frequency of the faults, and the swarm.
        lab: the network, open.
        say: prints a line.
    """

    def __init__(self, options: SoakOptions, lab: Lab, say: Callable[[str], None]) -> None:
        self.options, self.lab, self.say = options, lab, say
        self.random = random.Random(options.seed)
        self.folder = options.output_dir.resolve()
        self.volunteers = self._volunteers()
        self.events: list[Event] = []

    def _volunteers(self) -> list[Volunteer]:
        rate, recipe = self.options.paced_samples_per_second, self.options.recipe
        num_full = self.options.peers - self.options.outbound_only
        return [Volunteer(host, self.lab, self.folder, rate, recipe, host.number > num_full) for host in self.lab.hosts]

    def run(self) -> dict:
        """Runs the soak; returns the content of `soak.json`."""
        self._start()
        names = [name.replace("-", "_") for name in self.options.faults]
        faults = [fault for fault in self.faults() if not names or fault.__name__ in names]
        ends = time.monotonic() + 60 * self.options.minutes
        order: list[Callable[[], Iterator[float]]] = []
        while time.monotonic() < ends:
            order = order or self.random.sample(faults, len(faults))  # each fault once before any comes again
            self._happen(order.pop())
        self.say("No more faults; waiting until all train together again.")
        return self._result()

    def _result(self) -> dict:
        problems, step, hashes, calm = [], 0, {}, []
        try:
            step, hashes = self._calm_down()
        except InputError as error:
            problems.append(str(error))
        ended, left = time.time(), self._stop()
        if step and self.options.calm_runs:
            self.say(f"All left at step {step} or later; the same number of updates without faults follows.")
            calm = calm_runs(self.lab, self.folder / "calm", self.options.recipe, step, self.options.calm_runs)
        runs = self.folder / "runs" / RUN_ID
        ledgers = compare(runs)
        problems += ledgers.pop("problems")
        found = summarise(runs, self.events, step, hashes, left, calm, problems, asdict(self.options), ended)
        return found | {"ledgers": ledgers}

    def _start(self) -> None:
        self.say(f"Starting {len(self.volunteers)} peers; their logs are in {self.folder / 'logs'}")
        self.volunteers[0].start(None)
        address = self.volunteers[0].wait_for_address()
        for peer in self.volunteers[1:]:
            peer.start(address)
        self._until(lambda: all(peer.trains_since(0.0) for peer in self.volunteers), "all train")

    def _happen(self, fault: Callable[[], Iterator[float]]) -> None:
        began = time.monotonic()
        name = fault.__name__.replace("_", " ")
        self.events.append(event := Event(name, began=time.time()))
        waits = fault()
        seconds = next(waits)
        self.say(f"{event.fault}: {', '.join(event.victims)}")
        time.sleep(seconds)
        next(waits, None)
        event.mended = time.time()
        while time.monotonic() < began + self.options.every_seconds:
            for peer in self.volunteers:
                peer.restart_if_ended(self._address())
            time.sleep(0.5)

    def _calm_down(self) -> tuple[int, dict[str, str]]:
        now = time.time()
        self._until(lambda: all(peer.trains_since(now) for peer in self.volunteers), "all train again")
        folders = {peer.name: peer.folder for peer in self.volunteers}
        return self._until(lambda: common_checkpoint(folders, since=now), "all have a checkpoint of the same step")

    def _stop(self) -> list[str]:
        """Lets all peers leave; returns the names of hosts on which processes are left."""
        for peer in self.volunteers:
            peer.interrupt()
        for peer in self.volunteers:
            peer.wait()
        deadline = time.monotonic() + LAST_SECONDS
        while (left := [peer.name for peer in self.volunteers if peer.processes()]) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left

    def _until(self, condition: Callable, what: str):
        deadline = time.monotonic() + CALM_SECONDS
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise InputError(f"Not within {CALM_SECONDS:.0f} s: {what}. Look at {self.folder / 'logs'}.")
            for peer in self.volunteers:
                peer.restart_if_ended(self._address())
            time.sleep(0.5)
        return value


class StockSoak(Soak):
    """The same faults for Hivemind's Optimizer, without a comparison of weights and accuracies."""

    def _volunteers(self) -> list[Volunteer]:
        rate, hosts = self.options.paced_samples_per_second, self.lab.hosts
        return [StockVolunteer(host, self.lab, self.folder, rate, num_peers=len(hosts)) for host in hosts]

    def _revive(self, peer: Volunteer) -> None:
        super()._revive(peer)
        if self._address() is None:  # no other peer is running: the next ones need its address
            peer.wait_for_address()

    def _result(self) -> dict:
        problems = []
        try:
            now = time.time()
            self._until(lambda: all(peer.trains_since(now) for peer in self.volunteers), "all train again")
        except InputError as error:
            problems.append(str(error))
        ended, left = time.time(), self._stop()
        runs = {peer.name: peer.folder for peer in self.volunteers}
        return summarise_stock(runs, self.events, left, problems, asdict(self.options), ended)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns the exit status: 0, 1 if there was a problem, 2 for bad input, 130 after Ctrl-C."""
    options = tyro.cli(SoakOptions, args=arguments, prog="python -m analysis soak", description=__doc__)
    console = wide_console(120)

    def run() -> int:
        options.check()
        make_writable(options.output_dir)
        sandbox.enter("analysis", ["soak", *(sys.argv[1:] if arguments is None else arguments)])
        for name in ("runs", "logs", "calm"):
            shutil.rmtree(options.output_dir / name, ignore_errors=True)
        file = options.output_dir / ("soak.json" if options.system == "swarm" else "soak-hivemind.json")
        file.unlink(missing_ok=True)
        began, environment = time.monotonic(), environment_of_result()

        def say(line: str) -> None:
            console.print(f"{time.monotonic() - began:6.0f} s  {line}", highlight=False, markup=False)

        topology = uniform(options.peers, options.rtt_ms, options.bandwidth_mbps)
        with Lab(topology, options.output_dir.resolve()) as lab:
            found = (Soak if options.system == "swarm" else StockSoak)(options, lab, say).run()
        write_json(file, found | {"environment": environment})
        console.print(table(found))
        for problem in found["problems"]:
            console.print(f"Not good: {problem}", style="red")
        return int(bool(found["problems"]))

    return exit_status(run, "Interrupted: no result was written, the peers' folders are still there.")
