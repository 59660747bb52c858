"""Let somebody else sign in your place: a second key with fewer rights, for a time.

    swarm deputy ben.key --days 14                    # may let people in and remove them
    swarm deputy desk.key --rights enrol              # for swarm enrol on your machine; your own key goes into a drawer

Give ben.key and ben.key.warrant to Ben, with a copy of the folder of the run in OUTPUT_DIR/organiser. His commands take
--organiser-key ben.key. Who enrols has to do so on a machine whose address the join lines name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from recipe.command_line import arg, exit_status, read_options
from swarm.cli.organiser.organiser_options import OrganiserOptions

RightName = Literal["members", "enrol", "remove", "control", "all"]


@dataclass(frozen=True)
class DeputyOptions:
    """Let somebody else sign in your place: a second key with fewer rights, for a time."""

    file: tyro.conf.Positional[Annotated[Path, arg("FILE")]]
    """Where the new key goes; beside it comes FILE.warrant, in which you have signed what it may do."""
    rights: RightName = "members"
    """enrol: let people in; remove: remove members; members: both; control: pause the run, end it, steer it; all:
    all of these. What is trained, only your own key can say."""
    days: Annotated[float, arg("DAYS")] = 30.0
    """For how long. The certificates that it signs end then, too."""
    organiser: Annotated[OrganiserOptions, tyro.conf.arg(name="your run")] = field(default_factory=OrganiserOptions)


def main(arguments: list[str], say: Callable[[str], None] = print) -> int:
    """Returns the exit status: 0, or 2 for input that cannot work."""

    def run() -> None:
        options = read_options(DeputyOptions, arguments, "swarm deputy")
        folder = options.organiser.opened()
        from swarm.enrolment.organiser_key import VARIABLE, make_deputy, warrant_path
        from swarm.protocol.certificates import Right

        members = Right.ENROL | Right.REMOVE
        rights = {"members": members, "all": members | Right.CONTROL}.get(options.rights) or Right[
            options.rights.upper()
        ]
        path, passphrase = options.file.expanduser(), os.environ.get(VARIABLE) or None
        make_deputy(folder.signer(), folder.run_id, rights, options.days, path, passphrase)
        say(
            f"{path} may sign in your place for run {folder.run_id}, for {options.days:g} days. Give it away with "
            f"{warrant_path(path)} and a copy of {folder.path} without your own key."
        )

    return exit_status(run)
