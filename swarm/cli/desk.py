"""Show a swarm on a web page: whether it is well, how far it is, which peers train, and how to join.

    swarm desk swarm://JOIN_LINE
    swarm desk /ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1... --host 0.0.0.0
    swarm desk swarm://JOIN_LINE --alert mailto://user:password@example.org
    swarm desk swarm://JOIN_LINE --deputy desk.key     # made with swarm deputy desk.key --rights control

The desk takes no part in the training. What it has seen is kept in OUTPUT_DIR/RUN_ID/desk.json, and a desk that is
started again goes on from there. It ends with Ctrl-C.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import tyro

from recipe.command_line import arg, exit_status, read_options
from recipe.errors import InputError
from recipe.interrupts import raise_again
from recipe.run_folder import make_writable
from swarm.enrolment.join_line import MAX_ADDRESSES, JoinLine, whom_to_join
from swarm.runtime.hivemind_version import check_hivemind_version
from swarm.runtime.imports import quick_imports
from swarm.runtime.log_filters import silence_libraries

if TYPE_CHECKING:
    from swarm.desk.report import RunCard
    from swarm.membership.run_manifest import RunManifest
    from swarm.protocol.certificates import Signer

LOOK_SECONDS = 2.0
HISTORY_FILE = "desk.json"
ALERTS_VARIABLE = "SWARM_DESK_ALERTS"
EXAMPLE_URL = "https://github.com/OWNER/swarm-vit"


@dataclass(frozen=True)
class DeskOptions:
    """Show a swarm on a web page, with its curves, its peers, and how to join. It needs the extra packages of
    `pip install -e '.[desk]'`."""

    addresses: tyro.conf.Positional[Annotated[tuple[str, ...], arg("ADDRESS ...", "the variable INITIAL_PEERS")]] = ()
    """A join line, or addresses of running peers. An invitation in the line is not shown on the page."""
    run_id: Annotated[str | None, arg("NAME", "the only one there")] = None
    """Name of the run, if there are several runs at the addresses."""
    host: Annotated[str, arg("ADDRESS")] = "127.0.0.1"
    """Address of this machine at which the page is served; 0.0.0.0 shows it to everyone that can reach the machine."""
    port: Annotated[int, arg("NUMBER")] = 8080
    """TCP port of the page; 0 takes any free one."""
    page_url: Annotated[str | None, arg("URL", "this machine only")] = None
    """Address at which a web server with a certificate shows the page to others, such as https://desk.example.org. You
    can log in there."""
    deputy: Annotated[Path | None, arg("FILE", "no orders")] = None
    """A deputy's key with the right control, and its warrant beside it. With it, an organiser that logs in can give
    orders on the page."""
    invitation: Annotated[str | None, arg("JOIN_LINE", "no invitation is shown")] = None
    """Show this join line, with its invitation, to everyone that sees the page."""
    project_url: Annotated[str | None, arg("URL", "the page does not say")] = None
    """Repository of this program. The page then shows how to clone and install it, above the join line."""
    alert: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], arg("URL", f"the variable {ALERTS_VARIABLE}")]] = ()
    """Send a message to this URL, as Apprise reads it, when something is wrong with the run, and when it is well again.
    The option can be given several times."""
    ledger_mib: Annotated[int, arg("MIB")] = 128
    """Most MiB on disk for the run's ledger, which is fetched and added up every ten minutes. 0: fetch none, and show
    what the peers claim to have given."""
    still_minutes: Annotated[float, arg("NUMBER")] = 10.0
    """Minutes without an update after which the page and the alerts say that something is wrong."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs")
    """Folder in which the history is kept, in OUTPUT_DIR/RUN_ID/desk.json."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 after Ctrl-C, 1 if the connection to the swarm broke, 2 for input that cannot work."""
    silence_libraries()
    return exit_status(lambda: _run(read_options(DeskOptions, arguments, "swarm desk")))


def _run(options: DeskOptions) -> int:
    check_hivemind_version()
    given, line = whom_to_join(options.addresses or None)
    if not given:
        raise InputError("No address was given: swarm desk ADDRESS, or a join line.")
    if not 0 < options.still_minutes < math.inf:
        raise InputError(f"--still-minutes is {options.still_minutes:g}: it has to be above 0.")
    if options.ledger_mib < 0:
        raise InputError(f"--ledger-mib is {options.ledger_mib}: give 0 or more.")
    invitation = None if options.invitation is None else _invitation(options.invitation, line)
    project_url = "" if options.project_url is None else _project_url(options.project_url)
    make_writable(options.output_dir)
    raise_again()  # from now on Ctrl-C is the usual end
    with quick_imports():
        _import_extra()
    return _watch_and_serve(options, given, line, invitation, project_url)


def _import_extra() -> None:
    try:
        import swarm.desk.desk
        import swarm.desk.watcher  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(
            f"The desk needs a package that is not there ({error.name}): install them with pip install -e '.[desk]'"
        ) from None


def _watch_and_serve(
    options: DeskOptions, given: Sequence[str], line: JoinLine | None, invitation: JoinLine | None, project_url: str
) -> int:
    from swarm.cli.probe import looking_at
    from swarm.desk.alerts import Alerts
    from swarm.desk.desk import Desk, is_for_others, open_socket, page_url, served
    from swarm.desk.history import remembered_addresses
    from swarm.desk.ledger.bookkeeper import Bookkeeper
    from swarm.desk.organiser.controls import SwarmControls
    from swarm.desk.organiser.door import Door
    from swarm.desk.watcher import Watcher
    from swarm.runtime.processes import is_alive

    Door(None, options.page_url)  # a page URL that cannot be one is refused before anything is started
    signer = None if options.deputy is None else _deputy(options.deputy.expanduser())
    alerts = Alerts(options.alert or os.environ.get(ALERTS_VARIABLE, "").split())
    listener = open_socket(options.host, options.port)
    run_id, output_dir = line.run_id if line else options.run_id, options.output_dir.expanduser()
    remembered = remembered_addresses(output_dir / run_id / HISTORY_FILE) if run_id else []
    with looking_at(given, line, options.run_id, also=remembered) as (dht, manifest):
        card = run_card(manifest, given, line, invitation, project_url)
        if signer is not None:
            signer = able_to_order(signer, manifest)
        folder = output_dir / manifest.run_id
        history = history_in(folder)
        books = Bookkeeper.of_run(dht, manifest, folder, options.ledger_mib * 2**20) if options.ledger_mib else None
        desk = Desk(card, history, alerts, options.still_minutes, books and books.credits)
        watcher = Watcher(dht, manifest, given, remembered)
        controls = SwarmControls(dht, manifest, signer) if manifest.organiser else None
        desk.turn(watcher.look(), controls and controls.look(), watcher.ending)
        with served(lambda: desk.newest, listener, Door(manifest.authority, options.page_url), controls):
            others = " (elsewhere, use an address of this machine and the same port)" if is_for_others(listener) else ""
            print(f"The desk of run {manifest.run_id}: {page_url(listener)}{others}", flush=True)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                if books is not None:
                    books.start()
                while dht.is_alive() and all(map(is_alive, dht.processes)):  # it lives on without its p2pd
                    began = time.monotonic()
                    desk.turn(watcher.look(), controls and controls.look(), watcher.ending)
                    desk.remember(watcher.keep_contact())
                    time.sleep(max(0.0, began + LOOK_SECONDS - time.monotonic()))
            except KeyboardInterrupt:
                return 0
            finally:
                alerts.stop()
                desk.save()
                if books is not None:
                    books.stop()
        print("error: The connection to the swarm broke: start the desk again.", file=sys.stderr)
        return 1


def history_in(folder: Path) -> Path:
    """The file of the history, locked for this desk until it ends.

    Raises:
        InputError: the folder cannot be written, or another desk keeps its history there
    """
    from swarm.runtime.processes import claim

    make_writable(folder)
    if not claim(folder / f"{HISTORY_FILE}.lock"):
        raise InputError(
            f"Another desk keeps what it sees in {folder}: stop that desk, or give this one another --output-dir."
        )
    return folder / HISTORY_FILE


def _deputy(file: Path) -> Signer:
    """The deputy's key, with its warrant.

    Raises:
        InputError: the file cannot be used, or is the organiser's own key
    """
    from swarm.enrolment.organiser_key import passphrase_from, read_key, warrant_path

    signer = read_key(file, lambda: passphrase_from(os.environ, f"Passphrase of {file}: "))
    if not signer.warrant:
        raise InputError(
            f"{warrant_path(file)} is not there, and the desk takes no organiser's key: make it one of its own with "
            "swarm deputy desk.key --rights control."
        )
    return signer


def able_to_order(signer: Signer, manifest: RunManifest) -> Signer | None:
    """The deputy's key; None, with a warning, if its warrant has ended: the page is of use without orders.

    Raises:
        InputError: the key could never sign orders for this run
    """
    from swarm.enrolment.organiser_key import check_right
    from swarm.protocol.certificates import NotSigned, Right, shown_date

    if manifest.authority is None:
        raise InputError(f"Run {manifest.run_id} has no organiser, so it takes no orders: leave out --deputy.")
    with contextlib.suppress(NotSigned):  # which is said below
        end = manifest.authority.end_of(signer)
        if end < time.time():
            print(
                f"warning: The warrant of --deputy has ended on {shown_date(end)}, so no orders can be given at this "
                "desk: make another key with swarm deputy FILE --rights control, and start the desk again with it.",
                file=sys.stderr,
                flush=True,
            )
            return None
    check_right(signer, manifest.authority, Right.CONTROL)
    return signer


def _invitation(text: str, line: JoinLine | None) -> JoinLine:
    """The join line to be shown.

    Args:
        line: join line with which the desk was started, or None

    Raises:
        InputError: it has no invitation, or is for another run
    """
    shown = JoinLine.parse(text)
    if not shown.token:
        raise InputError("--invitation is a join line without an invitation: make one with swarm invite.")
    if line is not None and (line.run_id, line.organiser) != (shown.run_id, shown.organiser):
        raise InputError(f"--invitation is for another run, {shown.run_id}: give one for {line.run_id}.")
    return shown


def _project_url(text: str) -> str:
    """The URL of the project, as it was given.

    Raises:
        InputError: a browser or git could not use it, or it holds a password, which every visitor would read
    """
    try:
        parts = urlsplit(text)
    except ValueError:
        parts = urlsplit("")
    is_plain = text.isascii() and text.isprintable() and " " not in text and "@" not in parts.netloc
    if not (is_plain and parts.scheme in ("http", "https") and parts.hostname):
        raise InputError(f"--project-url has to be like {EXAMPLE_URL}: every visitor of the page gets it.")
    return text


def run_card(
    manifest: RunManifest,
    given: Sequence[str],
    line: JoinLine | None,
    invitation: JoinLine | None,
    project_url: str = "",
) -> RunCard:
    """What the desk shows of a run all the time. It holds an invitation only if one was given to be shown.

    Args:
        given: addresses of peers of the run
        line: join line with which the desk was started, or None
        invitation: join line with an invitation that is to be shown, or None
        project_url: as in `RunCard`

    Raises:
        InputError: the invitation is for another run
    """
    from swarm.desk.report import RunCard

    recipe, organiser = manifest.recipe, manifest.organiser
    if organiser:
        public = line or JoinLine(manifest.run_id, organiser, tuple(given[:MAX_ADDRESSES]))
        shown = str(invitation or replace(public, token=b""))  # what lets people in is shown only on request
    else:
        shown = " ".join(given[:MAX_ADDRESSES])
    if invitation is not None and (invitation.run_id, invitation.organiser) != (manifest.run_id, organiser):
        raise InputError(f"--invitation is for another run than {manifest.run_id}, which is at these addresses.")
    return RunCard(
        manifest.key_prefix,
        manifest.run_id,
        recipe.model,
        recipe.dataset,
        recipe.total_steps,
        recipe.target_batch_size,
        by_invitation=bool(organiser),
        join_line=shown,
        has_invitation=invitation is not None,
        project_url=project_url,
    )
