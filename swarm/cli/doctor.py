"""See whether this machine can join a swarm, and what to do if not.

    swarm doctor swarm://JOIN_LINE
    swarm doctor swarm://JOIN_LINE --json > report.json        # to send to the organiser

The exit status is 1 if joining would fail.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich import box
from rich.markup import escape
from rich.table import Table

from recipe.command_line import arg, check_port, read_options
from recipe.errors import InputError
from recipe.run_folder import RunFolder
from swarm.cli.checks import (
    Check,
    check_data,
    check_images,
    check_micro_batch,
    check_shared_memory,
    judged,
    machine_checks,
)
from swarm.cli.demo import wide_console
from swarm.enrolment.join_line import JoinLine, whom_to_join
from swarm.network.addresses import check_reachable, connects, host_and_port, reachable
from swarm.runtime.imports import quick_imports
from swarm.runtime.log_filters import silence_libraries
from swarm.runtime.processes import descendants, kill
from swarm.runtime.threads import yield_cores

if TYPE_CHECKING:
    # these take seconds to import
    import hivemind

    from swarm.cli.probe import ProbeResult
    from swarm.membership.run_manifest import RunManifest

MAX_ADDRESSES = 8
CONNECT_SECONDS = 5.0
CLOCK_FAILS_SECONDS, CLOCK_WARNS_SECONDS = 3.0, 1.5  # the DHT refuses peers that are further off than 3 s
ADDRESSES = "addresses"
"""Name of the check of the addresses. Without it in the list, the connection to a swarm was not checked."""
STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}


@dataclass(frozen=True)
class AdvancedOptions:
    """Options that most volunteers leave as they are."""

    initial_peers: Annotated[tuple[str, ...] | None, arg("ADDRESS ...", "none")] = None
    """Another way to give ADDRESS, as other programs name it."""
    run_id: Annotated[str | None, arg("NAME", "the only one there")] = None
    """Name of the run, if there are several runs at the addresses."""
    port_mapping: bool = True
    """Ask your router to open the port for a moment (UPnP, NAT-PMP), as a peer would."""
    check_images: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also read every image in --data-dir (a folder of images by class), and name those that are damaged."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class DoctorOptions:
    """Check this machine, the connection to a swarm and what it trains. The swarm is not joined or disturbed."""

    addresses: tyro.conf.Positional[Annotated[tuple[str, ...], arg("ADDRESS ...", "the variable INITIAL_PEERS")]] = ()
    """The join line that the organiser has sent, or addresses of peers as they print them."""
    port: Annotated[int, arg("PORT")] = 0
    """TCP port on which your peer is going to listen; 0: any free one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device on which your peer is going to compute."""
    data_dir: Annotated[Path, arg("FOLDER")] = Path("data")
    """Folder of the data set."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs")
    """Folder where your peer is going to keep metrics and checkpoints."""
    advanced: Annotated[AdvancedOptions, tyro.conf.arg(name="advanced")] = field(default_factory=AdvancedOptions)

    @property
    def given(self) -> tuple[str, ...] | None:
        """The addresses of the command line, or None."""
        return self.addresses or self.advanced.initial_peers


def diagnose(options: DoctorOptions) -> Iterator[Check]:
    """All checks, one after the other. If one fails on which later checks depend, these are left out."""
    machine = machine_checks(options.device, options.output_dir.expanduser())
    yield from machine
    if machine[0].state == "failed":
        return  # nothing else can be imported
    if options.advanced.check_images:
        yield check_images(options.data_dir.expanduser(), lambda line: print(line, file=sys.stderr, flush=True))
    try:
        peers, line = whom_to_join(options.given)
    except InputError as error:
        yield Check(ADDRESSES, "failed", str(error), "paste the whole line that the organiser has sent")
        return
    if not peers:
        yield check_shared_memory(0)
        yield Check("swarm", "warning", "not checked", "give the join line: swarm doctor JOIN_LINE")
        return
    yield Check(ADDRESSES, "ok", f"{len(peers)} well-formed")
    probes = [_probed(address) for address in peers[:MAX_ADDRESSES]]
    answering = [found for found in probes if found.trouble is None]
    yield from (_judged(found, bool(answering)) for found in probes)
    if not answering:
        return
    yield clock_check(max((found.clock_ahead_seconds for found in answering), key=abs))
    yield check_inbound(peers, options)
    if line is not None and line.server_endpoints:
        yield check_enrolment(line, options.output_dir)
    yield from check_run(peers, line, options)


def _probed(address: str) -> ProbeResult:
    from swarm.cli.probe import ProbeResult, probe

    trouble = reachable(address, CONNECT_SECONDS)
    return ProbeResult(address, trouble) if trouble else probe(address)


def _judged(found: ProbeResult, others_answer: bool) -> Check:
    _, _, host, _, port, *_ = found.address.split("/")
    over = f"{'QUIC over UDP' if '/udp/' in found.address else 'TCP'} port {port}"
    if found.trouble is None:
        return Check(f"peer {host}", "ok", f"answers over {over} in {1000 * found.round_trip_seconds:.0f} ms")
    fix = "ask for its present address; check that its port is open and that your network allows the connection"
    return Check(f"peer {host}", "warning" if others_answer else "failed", f"{over}: {found.trouble}", fix)


def clock_check(ahead_seconds: float) -> Check:
    off = abs(ahead_seconds)
    found = f"{off:.2f} s {'ahead of' if ahead_seconds > 0 else 'behind'} the swarm's"
    fix = "switch on NTP: `timedatectl set-ntp true`"
    return judged("clock", -off, -CLOCK_FAILS_SECONDS, -CLOCK_WARNS_SECONDS, found, fix)


def check_inbound(peers: list[str], options: DoctorOptions) -> Check:
    """Check whether other peers could call this machine.

    Args:
        peers: addresses of peers, which are asked to call back
    """
    from swarm.network.dht_options import NetworkOptions
    from swarm.peer.role import measured

    try:
        network = NetworkOptions(initial_peers=tuple(check_reachable(peers)), port=options.port)
        found, _ = measured(network, ask_router=options.advanced.port_mapping)
    except InputError as error:
        return Check("inbound port", "failed", str(error), "choose another --port")
    text = f"{found.mode} peer, {found.reason}. {found.router}".removesuffix(". ")
    if found.opened is not None:
        found.opened.close()
    if found.mode == "server-mode":
        return Check("inbound port", "ok", text)
    fix = "you can join and contribute. To be a server-mode peer, forward a TCP port and give it as --port"
    return Check("inbound port", "warning", text, fix)


def check_enrolment(line: JoinLine, output_dir: Path) -> Check:
    """Check whether a newcomer can become a member now. A member need not. The invitation is not used up.

    Args:
        output_dir: where a membership from before would be
    """
    found = {host_and_port(*endpoint): connects(*endpoint, CONNECT_SECONDS) for endpoint in line.server_endpoints}
    answering = [endpoint for endpoint, trouble in found.items() if trouble is None]
    if answering:
        return Check("enrolment", "ok", f"answers at {answering[0]}")
    tried = ", ".join(f"{endpoint} ({trouble})" for endpoint, trouble in found.items())
    if line.token and not any(output_dir.expanduser().glob(f"{line.run_id}/*/{RunFolder('').membership.name}")):
        fix = "ask the organiser to switch her machine on; if you are a member, give the same --output-dir as before"
        return Check("enrolment", "failed", tried, fix)
    return Check(
        "enrolment",
        "warning",
        tried,
        "members can still join; if you are new, ask the organiser to start it (swarm start or swarm enrol)",
    )


def check_run(peers: list[str], line: JoinLine | None, options: DoctorOptions) -> Iterator[Check]:
    """Check what is trained there, and whether this machine has what that takes."""
    from recipe.model import build_model
    from swarm.membership.run_manifest import NoAnswerError, OtherProtocolError, choose_manifest, read_manifests
    from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht

    try:
        dht = start_dht(NetworkOptions(initial_peers=tuple(peers), client_mode=True))
    except InputError as error:
        yield Check(
            "joining",
            "failed",
            str(error),
            "do what the text says; if it fails again, ask the organiser for a new join line",
        )
        return
    try:
        run_id, organiser = (options.advanced.run_id, b"") if line is None else (line.run_id, line.organiser)
        manifest = choose_manifest(read_manifests(dht, peers, run_id, organiser), run_id, organiser)
        recipe = manifest.recipe
        yield Check("run manifest", "ok", f"run {manifest.run_id}: {recipe.model} on {recipe.dataset}")
        model = build_model(replace(recipe, pretrained=False))
        shapes = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
        yield _traffic(dht, manifest, shapes)
    except InputError as error:
        has_fix = isinstance(error, OtherProtocolError | NoAnswerError)
        fix = "do what the text says" if has_fix else "ask the organiser which run to join"
        yield Check("run manifest", "failed", str(error), fix)
        return
    finally:
        stop_dht(dht)
    yield check_micro_batch(model, recipe, options.device)
    yield check_shared_memory(sum(map(math.prod, shapes)))
    yield check_data(manifest, options.data_dir.expanduser())


def _traffic(dht: hivemind.DHT, manifest: RunManifest, shapes: Sequence[Sequence[int]]) -> Check:
    from swarm.cli.probe import expected_traffic

    try:
        return Check("traffic", "ok", str(expected_traffic(dht, manifest, shapes)))
    except TimeoutError:
        return Check("traffic", "warning", "the swarm did not list its peers in time", "try again in a minute")


def table(checks: list[Check]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("check", "", "found", "what to do"):
        shown.add_column(column, overflow="fold")
    for check in checks:
        style = STYLES[check.state]
        shown.add_row(check.name, f"[{style}]{check.state}[/]", escape(check.found), escape(check.fix))
    return shown


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Returns the exit status: 0, 1 if joining would fail, or 2 for input that cannot work."""
    options = read_options(DoctorOptions, arguments, "swarm doctor", description=__doc__)
    try:
        check_port("--port", options.port)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    silence_libraries()
    yield_cores()  # as a peer does, before torch is imported: else a busy machine seems to be many times slower
    with quick_imports():
        checks = list(diagnose(options))
    fails = any(check.state == "failed" for check in checks)
    if options.advanced.json:
        say(json.dumps({"can_join": not fails, "checks": [asdict(check) for check in checks]}, indent=2))
        return int(fails)
    console = wide_console()
    console.print(table(checks))
    passed = (
        "This machine can join."
        if any(check.name == ADDRESSES for check in checks)
        else "This machine is ready to join. To check the connection to a swarm as well: swarm doctor JOIN_LINE."
    )
    console.print("Joining would fail." if fails else passed, style="red" if fails else "green")
    return int(fails)


def _leave_at_once(signal_number: int, _frame: FrameType | None) -> None:
    """Handler of Ctrl-C: kill all child processes and end at once.

    Some imports would swallow a KeyboardInterrupt, and nothing that a check has begun needs an orderly end.
    """
    kill(descendants(os.getpid()))
    os._exit(128 + signal_number)


def program(arguments: list[str]) -> int:
    """`main`, but Ctrl-C ends it at once."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave_at_once)
    return main(arguments)
