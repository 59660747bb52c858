"""See which peers train in a swarm and whether it makes progress, without taking part.

    swarm watch swarm://JOIN_LINE
    swarm watch swarm://JOIN_LINE --seconds 300 || mail -s "the swarm stands still" ...
    swarm watch swarm://JOIN_LINE --json >> swarm.jsonl

The table shows what the peers say about themselves. The command ends with Ctrl-C, or after `--seconds`. After
`--seconds` the exit status is 0 if the swarm has made an update meanwhile, or is paused, and its loss has not risen a
lot. Else it is 1.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from recipe.command_line import arg, read_options
from recipe.errors import InputError
from recipe.interrupts import raise_again
from swarm.cli.demo import wide_console
from swarm.enrolment.join_line import whom_to_join
from swarm.peer.status import percent, shown, shown_rate
from swarm.runtime.hivemind_version import check_hivemind_version
from swarm.runtime.imports import quick_imports
from swarm.runtime.log_filters import silence_libraries

if TYPE_CHECKING:
    from swarm.membership.progress_record import PeerProgress
    from swarm.membership.run_manifest import RunManifest
    from swarm.protocol.orders import Orders

LOOK_SECONDS = 2.0
LINE_SECONDS = 30.0
"""Time between two tables where the output is no terminal."""
MAX_ROWS = 50
WIDE_COLUMNS = 130
"""Width from which a terminal has room for the device and the version of each peer."""
MAX_COMING = 3
"""Coming orders that are shown at most."""


@dataclass(frozen=True)
class WatchOptions:
    """Show which peers train in a swarm, and how far they are. The swarm is not joined or disturbed."""

    addresses: tyro.conf.Positional[Annotated[tuple[str, ...], arg("ADDRESS ...", "the variable INITIAL_PEERS")]] = ()
    """The join line that the organiser has sent, or addresses of peers as they print them."""
    initial_peers: Annotated[tuple[str, ...] | None, arg("ADDRESS ...", "none")] = None
    """Another way to give ADDRESS, as other programs name it."""
    run_id: Annotated[str | None, arg("NAME", "the only one there")] = None
    """Name of the run, if there are several runs at the addresses."""
    seconds: Annotated[float | None, arg("SECONDS", "until Ctrl-C")] = None
    """Watch for this time. The exit status is 1 if no update was made meanwhile, or if the loss has risen a lot."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print a JSON line for each look instead of a table."""

    @property
    def given(self) -> tuple[str, ...] | None:
        """The addresses of the command line, or None."""
        return self.addresses or self.initial_peers


def _no_orders() -> Orders:
    from swarm.protocol.orders import Orders

    return Orders("")


@dataclass
class SwarmView:
    """What has been seen of a run.

    Args:
        manifest: of the run
        orders: the newest orders of its organiser
        peers: the last record of each peer, by peer id, the fastest first
        answered_at: `time.monotonic` when the swarm last answered
        first_step: step of the swarm at the first look, or when the run went back; None before
        step: that at the last look
        updated_at: `time.monotonic` when an update was last seen; before that, as `began_at`
        began_at: `time.monotonic` when the watch began, or when the run went back
        lower_since: `time.monotonic` since when most peers are at an earlier update than `step`; None if they are not
        made_progress: an update was seen
        loss: median of the peers; nan before any is known
        lowest_loss: lowest of these medians so far, since the run last went back
    """

    manifest: RunManifest
    orders: Orders = field(default_factory=_no_orders)
    peers: dict[str, PeerProgress] = field(default_factory=dict)
    answered_at: float = field(default_factory=time.monotonic)
    first_step: int | None = None
    step: int = 0
    updated_at: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.monotonic)
    lower_since: float | None = None
    made_progress: bool = False
    loss: float = math.nan
    lowest_loss: float = math.inf

    def look(self, found: Mapping[str, PeerProgress]) -> None:
        """Take over what the peers say now.

        Args:
            found: records by peer id
        """
        from swarm.desk.history import LOWER_SECONDS
        from swarm.membership.progress_record import step_of_most, under_way

        self.answered_at = time.monotonic()
        self.peers = dict(sorted(found.items(), key=lambda item: -item[1].rate))
        steps = [record.step for record in under_way(self.records)]
        if not steps:
            return
        step, now = step_of_most(steps), time.monotonic()
        if self.first_step is None:
            self.first_step = self.step = step
        if step > self.step:
            self.step, self.updated_at, self.made_progress = step, now, True
        self.lower_since = (self.lower_since or now) if step < self.step else None
        if self.lower_since is not None and now - self.lower_since > LOWER_SECONDS:
            self.first_step = self.step = step  # the run went back, and goes on from here
            self.began_at = self.updated_at = now
            self.lowest_loss = math.inf  # earlier weights have a higher loss
            self.lower_since = None
        if losses := [record.loss for record in self.records if math.isfinite(record.loss)]:
            self.loss = statistics.median(losses)
            self.lowest_loss = min(self.lowest_loss, self.loss)

    @property
    def records(self) -> list[PeerProgress]:
        """The last record of each peer, the fastest first."""
        return [*self.peers.values()]

    @property
    def silent_seconds(self) -> float:
        """Seconds since any peer last answered."""
        return time.monotonic() - self.answered_at

    @property
    def updates_per_minute(self) -> float:
        """Pace since the watch began, or the run went back; nan before the first update is seen."""
        seconds = self.updated_at - self.began_at
        return 60 * (self.step - self.first_step) / seconds if self.made_progress and seconds > 0 else math.nan

    @property
    def loss_has_risen(self) -> bool:
        """Whether the median loss of the peers has risen a lot since the watch began, or the run went back.

        The reason may be bad data, or a peer that computes nonsense.
        """
        from swarm.desk.health import loss_has_risen

        return loss_has_risen(self.loss, self.lowest_loss)

    @property
    def warnings(self) -> list[str]:
        """Sentences about what an organiser should look at."""
        from swarm.desk.health import DEAF_SECONDS

        found, full = [], [record.name for record in self.records if not record.client_mode]
        if (seconds := self.silent_seconds) > DEAF_SECONDS:
            found.append(f"No peer has answered for {seconds:.0f} s: all have left, or this machine's network is down.")
        names = [record.name for record in self.records]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            found.append(f"Several peers call themselves {', '.join(twice)}.")
        if self.loss_has_risen:
            found.append(f"The loss has risen from {self.lowest_loss:.3f} to {self.loss:.3f}.")
        if self.records and not full:
            found.append("No peer can be called, so the peers cannot average. Start one with an open --port.")
        elif len(full) == 1 and len(self.records) > 1:
            found.append(
                f"Only {full[0]!r} can be called. Without it no peer can average or join: start another one, with a "
                "--port that is open to the internet."
            )
        return found

    @property
    def total_steps(self) -> int:
        """Updates after which the run ends, by the recipe and the orders that count now."""
        return self.orders.total_steps(self.step, self.manifest.recipe.total_steps)

    @property
    def is_paused(self) -> bool:
        """Whether the organiser has paused the run."""
        return self.orders.is_paused(self.step)

    @property
    def ordered(self) -> list[str]:
        """Sentences about a pause that counts now, and about orders that are coming."""
        paused = [f"paused at step {self.step}"] if self.is_paused else []
        return [*paused, *(f"ordered: {order}" for order in self.orders.coming(self.step)[:MAX_COMING])]

    def as_json(self) -> dict:
        """The view as `--json` prints it.

        Numbers that a peer does not know yet (NaN) are left out, and so are attestations of states.
        """
        peers = []
        for peer_id, record in self.peers.items():
            said = {key: value for key, value in asdict(record).items() if value == value}  # NaN is no JSON
            del said["attested"]
            peers.append({"peer_id": peer_id} | said | {"lineage": record.lineage.hex()})
        still = time.monotonic() - self.updated_at
        return {
            "time": time.time(),
            "run_id": self.manifest.run_id,
            "step": self.step,
            "still_seconds": still,
            "silent_seconds": self.silent_seconds,
            "warnings": self.warnings,
            "ordered": self.ordered,
            "peers": peers,
        }

    def table(self, now: float, width: int = 0) -> Group:
        """The view as a person sees it in a terminal.

        Args:
            now: DHT time in seconds
            width: columns of the terminal
        """
        recipe, still = self.manifest.recipe, time.monotonic() - self.updated_at
        rate, pace = sum(record.rate for record in self.records), shown(self.updates_per_minute, ".1f")
        peers = f"{len(self.records)} peer{'s' * (len(self.records) != 1)}"
        head = (
            f"run {self.manifest.run_id}: {recipe.model} on {recipe.dataset} · step {self.step}/{self.total_steps} · "
            f"{peers} · {shown_rate(rate)} samples/s · {pace} updates a minute"
        )
        is_still = still > 2 * LOOK_SECONDS or not self.made_progress
        last = f"no new update for {still:.0f} s" if is_still else "updates are being made"
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        texts, is_wide = ("peer", "now", "can be called", "device", "version"), width >= WIDE_COLUMNS
        for column in (
            "peer",
            "now",
            "step",
            "samples/s",
            "loss",
            "accuracy",
            "compute/average",
            "here for",
            "can be called",
            *(("device", "version") if is_wide else ()),
        ):
            table.add_column(column, justify="left" if column in texts else "right")
        for record in self.records[:MAX_ROWS]:
            table.add_row(
                escape(record.name),
                record.shown_phase,
                str(record.step),
                shown_rate(record.rate),
                shown(record.loss, ".3f"),
                percent(record.accuracy),
                shown(record.granularity, ".2g"),
                _duration(now - record.joined),
                "no" if record.client_mode else "yes",
                *(_machine(record) if is_wide else ()),
            )
        more = len(self.records) - MAX_ROWS
        rest = [Text(f"and {more} more, slower ones")] if more > 0 else []
        warnings = [Text(warning, style="yellow") for warning in (*self.ordered, *self.warnings)]
        line = Text(last, style="yellow" if still > 60 else "")
        return Group(Text(head, style="bold"), line, *warnings, table, *rest)


def _machine(record: PeerProgress) -> tuple[str, str]:
    """Device and version that the peer states, or dashes."""
    if record.profile is None:
        return "–", "–"
    return escape(record.profile.device) or "–", escape(record.profile.version) or "–"


def _duration(seconds: float) -> str:
    minutes = int(max(0.0, seconds)) // 60
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def watch(options: WatchOptions, show: Callable[[SwarmView], None]) -> SwarmView:
    """Look every two seconds until the time is over or the DHT process has ended; returns what has been seen.

    While no peer answers, the given ones are called: after an outage of this machine's line the DHT knows no peer.

    Args:
        show: called after each look

    Raises:
        InputError: no peer answers, or the run is not known there
    """
    from swarm.cli.probe import looking_at
    from swarm.desk.watcher import Watcher
    from swarm.membership.control.giving import newest_orders

    raise_again()  # from now on Ctrl-C is the usual end
    peers, line = whom_to_join(options.given)
    if not peers:
        raise InputError("No address was given: swarm watch ADDRESS, or a join line.")
    with looking_at(peers, line, options.run_id) as (dht, manifest):
        view, watcher = SwarmView(manifest), Watcher(dht, manifest, peers)
        if manifest.authority is not None:
            dht.take_part(manifest.key_prefix, manifest.authority, b"")
        ends = view.began_at + (math.inf if options.seconds is None else options.seconds)
        while True:
            began = time.monotonic()
            if (found := watcher.look()) is None:  # what was seen last stays on the screen, and its age with it
                watcher.keep_contact()
            else:
                view.look(found)
                with suppress(InputError):  # no peer answers any more
                    view.orders = newest_orders(dht, manifest)
            show(view)
            if time.monotonic() >= ends or not dht.is_alive():
                return view
            time.sleep(max(0.0, min(began + LOOK_SECONDS, ends) - time.monotonic()))


class Display:
    """A table that is redrawn in place. Where the output is no terminal, a new table comes every 30 s.

    Args:
        console: where the table goes
    """

    def __init__(self, console: Console):
        self._console, self._shown_at = console, -math.inf
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext()

    def show(self, view: SwarmView, is_last: bool = False) -> None:
        """Shows the view as it is now.

        Args:
            is_last: show it in any case
        """
        from hivemind.utils.timed_storage import get_dht_time

        if isinstance(self.live, Live):
            self.live.update(view.table(get_dht_time(), self._console.width), refresh=True)
        elif is_last or time.monotonic() - self._shown_at >= LINE_SECONDS:
            self._shown_at = time.monotonic()
            self._console.print(view.table(get_dht_time(), self._console.width))


def say_at_once(line: str) -> None:
    """Print a line without delay, also into a pipe or a file: a reader may wait for it, or a signal end the program."""
    print(line, flush=True)


def main(arguments: list[str] | None = None, say: Callable[[str], None] = say_at_once) -> int:
    """Returns the exit status: 0, 1 if there is something wrong after `--seconds`, 2 for input that cannot work."""
    options = read_options(WatchOptions, arguments, "swarm watch", description=__doc__)
    if options.seconds is not None and not options.seconds >= 0:
        print(f"error: --seconds is {options.seconds:g}: give 0 or more.", file=sys.stderr)
        return 2
    silence_libraries()
    display = Display(wide_console())
    try:
        check_hivemind_version()
        with quick_imports():
            if options.json:
                view = watch(options, lambda view: say(json.dumps(view.as_json())))
            else:
                with display.live:
                    view = watch(options, display.show)
                    display.show(view, is_last=True)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    is_well = view.made_progress or view.is_paused
    if not is_well:
        seconds = time.monotonic() - view.began_at
        print(f"error: Run {view.manifest.run_id} has made no update in {seconds:.0f} s.", file=sys.stderr)
    for warning in view.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0 if is_well and not view.loss_has_risen else 1
