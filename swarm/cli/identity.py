"""See a volunteer's identity, back it up, and move it to another machine.

    swarm identity show
    swarm identity export ada.backup
    swarm identity import ada.backup            # on the other machine

A peer's credit and its memberships belong to its identity and not to its machine. The backup is encrypted with a
passphrase, which is asked for, or taken from the variable SWARM_KEY_PASSPHRASE.
"""

from __future__ import annotations

import getpass
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from recipe.command_line import arg, exit_status, read_options
from recipe.errors import InputError
from recipe.interrupts import raise_again
from swarm.cli.organiser.organiser_options import date
from swarm.runtime.hivemind_version import check_hivemind_version
from swarm.runtime.imports import quick_imports
from swarm.runtime.log_filters import silence_libraries

if TYPE_CHECKING:
    from swarm.peer.membership.identity_backup import Identity, Kept


@dataclass(frozen=True)
class IdentityOptions:
    """See your peer's identity, back it up, or move it to another machine: its credit and memberships come along."""

    action: tyro.conf.Positional[Literal["show", "export", "import"]]
    """show: list the identities that are here, and the runs of which they are members; export: write an encrypted
    backup; import: take over the identity in a backup."""
    file: tyro.conf.Positional[Annotated[Path | None, arg("FILE", "none: show needs no file")]] = None
    """File of the backup, for export and import."""
    public_name: Annotated[str | None, arg("NAME", "the only one here; with import, that of the backup")] = None
    """Public name of the peer whose identity is meant."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs")
    """The peer's own --output-dir: identities are in OUTPUT_DIR/identities, memberships in OUTPUT_DIR/RUN_ID/NAME."""
    identity_path: Annotated[Path | None, arg("FILE", "OUTPUT_DIR/identities/NAME.key")] = None
    """File of the peer's private key, if it lies somewhere else."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """With export: replace a backup that is there already. With import: replace another identity of that name."""


def main(arguments: list[str], say: Callable[[str], None] = print) -> int:
    """Returns the exit status: 0, or 2 for input that cannot work."""
    return exit_status(lambda: _run(read_options(IdentityOptions, arguments, "swarm identity"), say))


def _run(options: IdentityOptions, say: Callable[[str], None]) -> None:
    if (options.file is None) != (options.action == "show"):
        raise InputError("Give the backup's file with export and import, and none with show.")
    silence_libraries()
    check_hivemind_version()
    with quick_imports():
        import swarm.peer.membership.identity_backup  # noqa: F401 -- takes seconds
    raise_again()  # a passphrase may be asked for: a process killed then leaves a terminal that shows no letters
    {"show": _show, "export": _export, "import": _import}[options.action](options, say)


def _show(options: IdentityOptions, say: Callable[[str], None]) -> None:
    from swarm.peer.membership.identity_backup import chosen_identity, identities

    there = identities(options.output_dir)
    if options.public_name is not None or options.identity_path is not None or not there:
        there = [chosen_identity(options.output_dir, options.public_name, options.identity_path)]
    for identity in there:
        say(f"{identity.name}  {identity.peer_id}  {identity.path}")
        memberships = list(identity.memberships())
        for kept in memberships:
            say(f"  {_told(kept)}")
        if not memberships:
            say(f"  a member of no run, as far as {identity.output_dir} says")


def _told(kept: Kept) -> str:
    run_id, end = kept.certificate.run_id, kept.certificate.end
    if (why := kept.why_removed) is not None:
        return f"removed from run {run_id}: {why}"
    until = f"until {date(end)}" if end > time.time() else f"whose certificate has ended on {date(end)}"
    return f"member {kept.certificate.name} of run {run_id}, {until}"


def _export(options: IdentityOptions, say: Callable[[str], None]) -> None:
    from swarm.peer.membership.identity_backup import chosen_identity, export_identity

    identity = chosen_identity(options.output_dir, options.public_name, options.identity_path)
    if options.file.exists() and not options.overwrite:
        raise InputError(f"{options.file} is there already: choose another name, or add --overwrite.")
    number, left_out = export_identity(identity, options.file, _new_passphrase(), options.overwrite)
    memberships = "1 membership" if number == 1 else f"{number} memberships"
    lacks = "1 that ends earlier is" if left_out == 1 else f"{left_out} that end earlier are"
    older = f" {lacks} left out: a backup holds {number}." if left_out else ""
    say(
        f"{options.file} has the identity {identity.peer_id} of {identity.name} with {memberships}.{older} Anyone with "
        "it and the passphrase can act as this peer: keep both apart. The passphrase cannot be replaced.\n"
        "Use it on one machine at a time: a swarm takes no second peer with the same identity."
    )


def _import(options: IdentityOptions, say: Callable[[str], None]) -> None:
    from swarm.enrolment.organiser_key import passphrase_from
    from swarm.peer.membership.identity_backup import check_passphrase, import_identity, read_backup

    backup = read_backup(options.file)
    passphrase = check_passphrase(passphrase_from(os.environ, f"Passphrase of {options.file}: "))
    identity = import_identity(
        backup, passphrase, options.output_dir, options.public_name, options.identity_path, options.overwrite
    )
    say(f"{identity.path} is the identity {identity.peer_id} now.")
    for kept in identity.memberships():
        say(f"{identity.name} is {_told(kept)}. To train on:\n  {_join_command(options, identity, kept)}")
    say("End the peer on the old machine first: a swarm takes no second one with the same identity.")


def _join_command(options: IdentityOptions, identity: Identity, kept: Kept) -> str:
    words = ["swarm", "join", str(kept.credentials.line), "--public-name", identity.name]
    if options.output_dir != Path("runs"):
        words += ["--output-dir", str(options.output_dir)]
    if options.identity_path is not None:
        words += ["--identity-path", str(options.identity_path)]
    return shlex.join(words)


def _new_passphrase() -> str:
    """A passphrase for a new backup, asked for twice: a backup with a mistyped one could never be opened.

    Raises:
        InputError: there is none, it is not good enough, or the two differ
    """
    from swarm.enrolment.organiser_key import VARIABLE, passphrase_from
    from swarm.peer.membership.identity_backup import check_passphrase

    passphrase = check_passphrase(passphrase_from(os.environ, "New passphrase of the backup: "))
    if VARIABLE not in os.environ and sys.stdin.isatty() and getpass.getpass("The same again: ") != passphrase:
        raise InputError("The two passphrases differ: try again.")
    return passphrase
