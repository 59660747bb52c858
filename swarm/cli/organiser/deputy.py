"""Let another person sign in your place: a second key with fewer rights, for a time.

    swarm deputy ben.key --days 14                    # may let people in and remove them
    swarm deputy enrol.key --rights enrol             # for swarm enrol on your machine; your own key goes into a drawer
    swarm deputy desk.key --revoke                    # from now on it orders nothing, and opens no desk

Give Ben ben.key, ben.key.warrant, and a copy of the folder of the run in OUTPUT_DIR/organiser. Leave out of the copy
your own key, first_line.json, which holds an invitation, and tls.pem, with which a machine could pass for the one where
people enrol. Ben adds --organiser-key ben.key to his commands. On a machine of his own he can remove members, steer the
run, and make certificates (swarm invite --peer-id), as far as his rights go. Join lines of swarm invite count only if
they are made at the machine that enrols, whose books have their invitations.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from recipe.command_line import arg, exit_status, read_options
from recipe.errors import InputError
from swarm.cli.organiser.calling import Lookout, handed_to, reaching
from swarm.cli.organiser.organiser_options import OrganiserOptions, date, listed

if TYPE_CHECKING:
    from swarm.enrolment.organiser_folder import OrganiserFolder
    from swarm.protocol.certificates import Right

RightName = Literal["members", "enrol", "remove", "control", "all"]


@dataclass(frozen=True)
class DeputyOptions:
    """Let another person sign in your place: a second key with fewer rights, for a time. On another machine, a person
    with this key can remove members, steer the run, and make certificates (swarm invite --peer-id), as far as the key's
    rights go. A join line of swarm invite counts only if it was made at the machine that enrols. If the variable
    SWARM_KEY_PASSPHRASE is set, the new key gets that passphrase."""

    file: tyro.conf.Positional[Annotated[Path, arg("FILE")]]
    """File of the new key. Beside it comes FILE.warrant, in which you sign what the key may do."""
    rights: RightName = "members"
    """enrol: let people in; remove: remove members; members: both of these; control: pause, end and steer the run; all:
    everything named here. Only your own key can say what is trained."""
    days: Annotated[float, arg("DAYS")] = 30.0
    """How long the key counts. The certificates that it signs end then at the latest."""
    revoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Take back a deputy's right to control the run, in the swarm and at the desk. FILE is the deputy's key, its
    warrant, or the name of its key file."""
    initial_peers: Annotated[tuple[str, ...] | None, arg("ADDRESS ...", "where your peer was last")] = None
    """With --revoke: addresses of peers of the run. One that answers is enough."""
    organiser: Annotated[OrganiserOptions, tyro.conf.arg(name="your run")] = field(default_factory=OrganiserOptions)


def main(arguments: list[str], say: Callable[[str], None] = print) -> int:
    """Returns the exit status: 0; 2 for input that cannot work, or if the run cannot be reached."""

    def run() -> None:
        options = read_options(DeputyOptions, arguments, "swarm deputy")
        if options.initial_peers is not None and not options.revoke:
            raise InputError("--initial-peers goes with --revoke: leave it out, for no peer is called.")
        (_revoke if options.revoke else _make)(options, options.organiser.opened(), say)

    return exit_status(run)


def _make(options: DeputyOptions, folder: OrganiserFolder, say: Callable[[str], None]) -> None:
    from swarm.enrolment.organiser_folder import FIRST_LINE_FILE
    from swarm.enrolment.organiser_key import VARIABLE, make_deputy, warrant_path
    from swarm.enrolment.tls import TLS_FILE
    from swarm.protocol.certificates import Right

    members = Right.ENROL | Right.REMOVE
    rights = {"members": members, "all": members | Right.CONTROL}.get(options.rights) or Right[options.rights.upper()]
    path, passphrase = options.file.expanduser(), os.environ.get(VARIABLE) or None
    deputy = make_deputy(folder.signer(), folder.run_id, rights, options.days, path, passphrase)
    folder.keep_warrant(path.name, deputy)
    folder.note_fingerprint()
    say(
        f"{path} may sign in your place for run {folder.run_id}, for {options.days:g} days. A desk needs only this key "
        f"and {warrant_path(path)}. A person on another machine also needs a copy of {folder.path} without your own "
        f"key, {FIRST_LINE_FILE} and {TLS_FILE}."
    )
    if passphrase is None:
        say(f"It has no passphrase: set {VARIABLE} to make a key with one.")
    else:
        say(f"It has the passphrase that is in {VARIABLE}: a person who uses the key needs it.")
    if Right.ENROL in rights:
        say(
            "On another machine, the deputy can make certificates (swarm invite --peer-id), but no join lines that "
            "count: only the machine that enrols can make them."
        )


def _revoke(options: DeputyOptions, folder: OrganiserFolder, say: Callable[[str], None]) -> None:
    from swarm.protocol.certificates import Right

    lookout = Lookout.of(options.initial_peers, options.organiser)
    key, rights, end = _deputy(options.file.expanduser(), folder)
    if Right.CONTROL not in rights:
        raise InputError(
            f"{options.file.name} has no right to give orders, and only that right can be taken back. Its other rights "
            f"count until {date(end)}: undo what it does with swarm remove, or with swarm remove --restore."
        )
    signer = folder.signer()
    if signer.warrant:
        raise InputError("A deputy cannot revoke another one: use the organiser's own key.")
    with reaching(lookout, folder.authority) as (dht, manifest):
        from swarm.membership.control.revoking import revoke_deputy

        done = revoke_deputy(dht, manifest, signer, key)
    say(f"{options.file.name} can no longer give orders in run {folder.run_id}. The list {handed_to(done.num_peers)}")
    for orders, what in ((done.kept, "still counts"), (done.dropped, "does not count any more")):
        for order in orders:
            say(f"- {order}: {what}")
    if rights & ~Right.CONTROL:
        say(
            f"Its other rights count until {date(end)}: undo what it does with swarm remove, or with swarm remove "
            "--restore."
        )


def _deputy(file: Path, folder: OrganiserFolder) -> tuple[bytes, Right, int]:
    """The public key of the deputy that is meant, its rights, and when they end, in seconds since 1970.

    Args:
        file: the deputy's key or warrant, or a path with the name of a key file that was made here

    Raises:
        InputError: this run has no such deputy, or has several
    """
    from swarm.enrolment.organiser_key import warrant_path
    from swarm.protocol.certificates import MAX_WARRANT_BYTES, NotSigned

    beside = file if file.suffix == ".warrant" else warrant_path(file)
    made_here = folder.warrants()
    try:
        found = [beside.read_bytes()[: MAX_WARRANT_BYTES + 1]] if beside.is_file() else made_here.get(file.name, [])
        warrants = [folder.authority.read_warrant(warrant) for warrant in found]
    except OSError as error:
        raise InputError(f"{beside} cannot be read ({error.strerror}): give this user the right to.") from None
    except NotSigned as error:
        raise InputError(f"{beside} is no warrant of run {folder.run_id}: it {error}.") from None
    if len(warrants) > 1:
        raise InputError(f"Several deputies were made as {file.name}: name the .warrant of the one that you mean.")
    if not warrants:
        known = f"give one of {listed(sorted(made_here))}" if made_here else "none was made here"
        raise InputError(
            f"No deputy {ascii(file.name)[:80]} of run {folder.run_id} is known: {known}, or its .warrant file."
        )
    key, rights, _, end = warrants[0]
    return key, rights, end
