"""See what each peer gave to a run, as the peers have signed it.

    swarm ledger fetch swarm://JOIN_LINE --to ledger     # again later: only what is new comes
    swarm ledger verify ledger
    swarm ledger verify runs/mine --json                 # the run folders of this machine

docs/howto/ledger.md says what this proves, and what it does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich import box
from rich.markup import escape
from rich.table import Table

from recipe.command_line import arg, exit_status, read_options
from recipe.errors import InputError
from recipe.interrupts import raise_again
from recipe.run_folder import make_writable
from swarm.cli.demo import wide_console
from swarm.cli.organiser.organiser_options import short
from swarm.enrolment.join_line import JoinLine, whom_to_join
from swarm.runtime.hivemind_version import check_hivemind_version
from swarm.runtime.imports import quick_imports
from swarm.runtime.log_filters import silence_libraries

if TYPE_CHECKING:
    from swarm.ledger.audit import Audit
    from swarm.ledger.collector import Collected

MAX_ROWS = 100
"""Peers that the table shows; JSON has them all."""
MAX_SHOWN_FINDINGS = 20


@dataclass(frozen=True)
class LedgerOptions:
    """See what each peer gave to a run: fetch the ledgers that the peers have signed, and add them up again."""

    action: tyro.conf.Positional[Literal["fetch", "verify"]]
    """fetch: ask all peers for their ledgers; verify: add up ledgers, and find lines that were changed in them."""
    given: tyro.conf.Positional[
        Annotated[tuple[str, ...], arg("ADDRESS ... | PATH ...", "the variable INITIAL_PEERS")]
    ] = ()
    """With fetch: a join line, or addresses of running peers. With verify: ledgers, or folders that have some."""
    to: Annotated[Path, arg("FOLDER")] = Path("ledger")
    """With fetch: folder where ledgers are kept, those of each run in a folder of their own. What is there already is
    not fetched again."""
    most_mib: Annotated[int, arg("MIB")] = 4096
    """With fetch: most MiB that all ledgers of a run may take together. What does not fit is not fetched."""
    run_id: Annotated[str | None, arg("NAME", "the only one there")] = None
    """With fetch: name of the run, if there are several runs at the addresses."""
    of: Annotated[str | None, arg("JOIN_LINE", "any run")] = None
    """With verify: refuse ledgers that are not of the run and the organiser in this join line."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Returns the exit status: 0; 1 if a ledger was tampered with or no peer answered; 2 for input that cannot work."""
    silence_libraries()

    def run() -> int:
        options = read_options(LedgerOptions, arguments, "swarm ledger")
        return (_fetch if options.action == "fetch" else _verify)(options, say)

    return exit_status(run)


# ---- verify ---------------------------------------------------------------------------------------------------------


def _verify(options: LedgerOptions, say: Callable[[str], None]) -> int:
    if not options.given:
        raise InputError("Name what to verify: a ledger.jsonl, a run folder, or a folder of swarm ledger fetch.")
    line = None if options.of is None else JoinLine.parse(options.of)
    with quick_imports():
        from swarm.ledger.audit import audit

    run_id, organiser = ("", b"") if line is None else (line.run_id, line.organiser)
    found = audit([Path(path) for path in options.given], run_id, organiser)
    if options.json:
        say(json.dumps(found.as_json()))
    else:
        console = wide_console()
        console.print(table(found))
        say(summary(found))
    for finding in found.findings[:MAX_SHOWN_FINDINGS]:
        print(f"tampered: {finding}", file=sys.stderr)
    more = len(found.findings) + found.more_findings - MAX_SHOWN_FINDINGS
    if more > 0:
        print(f"tampered: and {more} more.", file=sys.stderr)
    return 0 if not found.findings else 1


def table(found: Audit) -> Table:
    """A table of what each peer gave. `--json` has whole peer ids."""
    total = sum(credit.samples for credit in found.credits.values())
    shown = Table(title=f"run {escape(found.run)}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    columns = ["name", "peer", "updates", "samples", "share", "not confirmed", "alone"]
    if found.organiser:
        columns.insert(1, "member")
    for column in columns:
        shown.add_column(column, justify="left" if column in ("name", "peer") else "right", no_wrap=True)
    for peer, credit in found.ranked[:MAX_ROWS]:
        row = [
            escape(credit.name) or "–",
            short(peer),
            f"{credit.updates:,}",
            f"{credit.samples:,}",
            f"{credit.samples / total:.1%}" if total else "–",
            f"{credit.unconfirmed_samples:,}",
            f"{credit.alone_samples:,}",
        ]
        if found.organiser:
            row.insert(1, "–" if credit.serial is None else str(credit.serial))
        shown.add_row(*row)
    if (more := len(found.ranked) - MAX_ROWS) > 0:
        shown.add_row(f"and {more} more")
    return shown


def summary(found: Audit) -> str:
    """Sentences about what was counted, and what was found wrong."""
    counts, total = found.updates, sum(credit.samples for credit in found.credits.values())
    lines = [
        f"Updates that two thirds of their members confirm: {counts['confirmed']:,}, with {total:,} samples. "
        f"Not confirmed: {counts['unconfirmed']:,}. Made by a peer alone: {counts['alone']:,}."
    ]
    if found.unsigned:
        lines.append(f"{found.unsigned:,} lines are not signed (yet), so they confirm nothing.")
    if forked := found.forked_steps:
        lines.append(
            f"At {forked:,} steps there are confirmed updates of more than one group. Possible reasons: the network "
            "was divided, the swarm went on from an earlier checkpoint, or members have invented rounds."
        )
    if found.equal_states or found.different_states:
        lines.append(
            f"States that several peers have hashed: {found.equal_states + found.different_states:,}, of which "
            f"{found.equal_states:,} were equal."
        )
    lines.append(
        "Nothing was tampered with. The members stated these samples and agreed on them; this command recomputes none."
        if not found.findings
        else "Something was tampered with: see below."
    )
    return "\n".join(lines)


# ---- fetch ----------------------------------------------------------------------------------------------------------


def _fetch(options: LedgerOptions, say: Callable[[str], None]) -> int:
    check_hivemind_version()
    given, line = whom_to_join(options.given or None)
    if not given:
        raise InputError("No address was given: swarm ledger fetch ADDRESS, or a join line.")
    if options.most_mib < 1:
        raise InputError(f"--most-mib is {options.most_mib}: it has to be at least 1.")
    folder = options.to.expanduser()
    make_writable(folder, "--to")
    raise_again()
    with quick_imports():
        from swarm.cli.probe import looking_at
        from swarm.ledger.collector import collect
        from swarm.membership.progress_store import progress_records
        from swarm.protocol.admission import Admission
    try:
        with looking_at(given, line, options.run_id) as (dht, manifest):
            records = progress_records(dht, manifest, Admission(manifest.authority))
            if not records:
                raise InputError(f"No peer trains run {manifest.run_id} now: verify the run folders of its peers.")
            is_client = {peer: record.client_mode for peer, record in records.items()}
            names = {peer.to_base58(): record.name for peer, record in records.items()}
            folder /= manifest.key_prefix  # a peer of two runs has a ledger of each under the same peer id
            collected = collect(dht, manifest.key_prefix, is_client, folder, max_folder_bytes=options.most_mib * 2**20)
    except TimeoutError:
        raise InputError("The swarm does not answer: check the connection, and try again.") from None
    as_json = vars(collected) | {"folder": str(folder)}
    say(json.dumps(as_json) if options.json else told(collected, names, folder))
    return 0 if collected.answered else 1


def told(collected: Collected, names: dict[str, str], folder: Path) -> str:
    """Sentences about what was fetched, and which peers handed over nothing.

    Args:
        names: of the peers, by peer id
        folder: of the ledgers
    """
    peers = len(collected.answered)
    lines = [f"{peers} peer{'s' * (peers != 1)} handed over {collected.num_bytes / 1e6:,.1f} MB that are new."]
    lines += [f"{names.get(peer, peer)} ({peer}) {problem}." for peer, problem in collected.silent.items()]
    if collected.is_full:
        lines.append(f"{folder} is full: give more with --most-mib, or fetch into another folder.")
    lines.append(f"Add them up: swarm ledger verify {folder}")
    return "\n".join(lines)
