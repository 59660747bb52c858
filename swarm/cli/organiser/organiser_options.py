"""What the organiser's commands have in common: which run they mean, and how its members are shown."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from recipe.command_line import arg
from recipe.errors import InputError
from recipe.interrupts import raise_again
from recipe.run_folder import check_name
from swarm.enrolment.contact import BOOKS_FILE, CONTACT_FILE, FOLDER, Contact
from swarm.runtime.hivemind_version import check_hivemind_version
from swarm.runtime.imports import quick_imports
from swarm.runtime.log_filters import silence_libraries

if TYPE_CHECKING:
    from hivemind.p2p import PeerID

    from swarm.enrolment.organiser_folder import OrganiserFolder
    from swarm.protocol.certificates import Role

RoleName = Literal["everything", "train", "helper"]
SHORT_ID_LETTERS = 8
MAX_NAMES = 20
"""Names that one sentence lists."""


@dataclass(frozen=True)
class RunOptions:
    """Your run."""

    run_id: Annotated[str | None, arg("NAME", "the one that you have started last")] = None
    """Name of the run."""
    output_dir: Annotated[Path, arg("FOLDER")] = Path("runs")
    """The same folder as for swarm start: members and invitations are in OUTPUT_DIR/organiser/RUN_ID."""

    def opened(self) -> OrganiserFolder:
        """The organiser's folder of that run. From here on Ctrl-C raises KeyboardInterrupt.

        Raises:
            InputError: there is no such run
        """
        return _opened(self, None)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the organiser's peer was last. Reading this imports nothing slow.

        Raises:
            InputError: there is no such run, or no peer has started it yet
        """
        folder = self.output_dir.expanduser() / FOLDER
        return Contact.read(folder / _chosen(folder, self.run_id)).addresses


@dataclass(frozen=True)
class OrganiserOptions(RunOptions):
    """Your run and your key."""

    organiser_key: Annotated[Path | None, arg("FILE", "OUTPUT_DIR/organiser/RUN_ID/organiser.key")] = None
    """Your key as the organiser, if it lies somewhere else."""

    def opened(self) -> OrganiserFolder:
        """As `RunOptions.opened`, with the key that `--organiser-key` names."""
        return _opened(self, self.organiser_key)


def _opened(options: RunOptions, key: Path | None) -> OrganiserFolder:
    run_id = _chosen(options.output_dir.expanduser() / FOLDER, options.run_id)
    silence_libraries()
    check_hivemind_version()
    with quick_imports():
        from swarm.enrolment.organiser_folder import OrganiserFolder
    raise_again()  # a passphrase may be asked for: a process killed then leaves a terminal that shows no letters
    return OrganiserFolder(options.output_dir, run_id, key)


def _chosen(folder: Path, run_id: str | None) -> str:
    """The name of the run that is meant. No folder is made here: a mistyped name must not leave one.

    Raises:
        InputError: there is no such run, or it is another user's
    """
    there = _started_at(folder)
    if not there:
        raise InputError(
            f"No run of yours is in {folder}: start one with swarm start, or give the --output-dir with which it was "
            "started."
        )
    if run_id is None:
        return max(there, key=lambda name: (there[name], name))
    if check_name(run_id, "--run-id") not in there:
        raise InputError(f"No run {run_id} of yours is in {folder}: give --run-id one of {listed(sorted(there))}.")
    return run_id


def _started_at(folder: Path) -> dict[str, float]:
    """When the organiser's peer last started each run, by the name of the run; 0 if it never did.

    Raises:
        InputError: there are only runs of another user
    """
    found, locked = {}, None
    try:
        for path in folder.iterdir():
            try:
                if (started := _started(path)) is not None:
                    found[path.name] = started
            except PermissionError:
                locked = path
    except PermissionError:
        locked = folder
    except OSError:  # it is not there, or is no folder
        pass
    if locked is not None and not found:
        raise InputError(
            f"{locked} cannot be read by this user: give the command as the user whose run it is (sudo -u USER)."
        )
    return found


def _started(run: Path) -> float | None:
    """When the organiser's peer last started this run; 0 if it never did; None if this is no run.

    Raises:
        PermissionError: the folder is another user's
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (run / CONTACT_FILE).stat().st_mtime
    return 0.0 if (run / BOOKS_FILE).exists() else None


def listed(names: list[str]) -> str:
    """Names as part of a sentence: the first 20 of them, and how many more there are."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def date(seconds: float) -> str:
    """A day in this machine's time zone, such as 2026-07-28.

    Args:
        seconds: since 1970
    """
    return time.strftime("%Y-%m-%d", time.localtime(seconds))


def short(peer_id: PeerID | str) -> str:
    """The end of a peer id, where peers differ from each other."""
    return f"…{str(peer_id)[-SHORT_ID_LETTERS:]}"


def role_of(name: RoleName) -> Role:
    """The roles that this word of the command line gives to a member."""
    from swarm.protocol.certificates import EVERYTHING, HELPER, Role

    return {"everything": EVERYTHING, "train": Role.TRAIN | Role.WATCH, "helper": HELPER}[name]


def roles_shown(roles: Role) -> str:
    """The word of the command line for these roles, or one word for each role if there is none."""
    from swarm.protocol.certificates import Role

    for name in get_args(RoleName):
        if role_of(name) == roles:
            return name
    return ", ".join(role.name.lower() for role in Role if role in roles)
