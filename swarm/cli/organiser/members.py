"""See the members of your run, also those that were removed, and the invitations that are open.

    swarm members
    swarm members --json > members.json

This shows your books, not which peers train at this moment: swarm watch shows that. Samples are counted only in updates
in which a peer of this machine took part.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from recipe.command_line import exit_status, read_options
from recipe.run_folder import RunFolder, read_metrics
from swarm.cli.demo import wide_console
from swarm.cli.organiser.organiser_options import RunOptions, date, roles_shown, short

if TYPE_CHECKING:
    from swarm.enrolment.registry import Invitation, Member


@dataclass(frozen=True)
class MembersOptions:
    """Show the members of your run, also those that were removed, and the invitations that are open."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a table: with whole peer ids, and with times in seconds since 1970."""
    run: Annotated[RunOptions, tyro.conf.arg(name="your run")] = field(default_factory=RunOptions)


@dataclass(frozen=True)
class Books:
    """What is in the organiser's books.

    Args:
        run_id: name of the run
        members: all of them, also those that were removed
        invitations: those that can still be used
        samples: what each member gave, by peer id, to the updates in which a peer of this machine took part
    """

    run_id: str
    members: Sequence[Member]
    invitations: Sequence[Invitation]
    samples: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The books as `--json` prints them."""
        members = [
            {
                "name": member.name,
                "peer_id": str(member.peer_id),
                "serial": member.serial,
                "since": member.enrolled_at,
                "roles": roles_shown(member.roles),
                "samples": self.samples.get(str(member.peer_id), 0),
                "certificate_until": member.certificate_ends_at or None,
                "why_removed": member.why_removed,
            }
            for member in self.members
        ]
        invitations = [
            {
                "name": invitation.name or None,
                "roles": roles_shown(invitation.roles),
                "uses_left": invitation.uses_left,
                "until": invitation.expires_at,
            }
            for invitation in self.invitations
        ]
        return {"run_id": self.run_id, "members": members, "invitations": invitations}

    def table(self, now: float) -> Group:
        """The books as a person sees them in a terminal.

        Args:
            now: seconds since 1970
        """
        removed = sum(member.why_removed is not None for member in self.members)
        members = f"{len(self.members)} member{'s' * (len(self.members) != 1)}"
        head = f"run {self.run_id}: {members}" + (f", {removed} of them removed" if removed else "")
        shown = [Text(head, style="bold")]
        if self.members:
            shown.append(self._members_table(now))
        if self.invitations:
            shown += [Text("open invitations", style="bold"), self._invitations_table()]
        else:
            shown.append(Text("No invitation is open: swarm invite makes one."))
        return Group(*shown)

    def _members_table(self, now: float) -> Table:
        table = _table("name", "peer", "since", "roles", "samples", "certificate until", "removed")
        for member in self.members:
            table.add_row(
                escape(member.name),
                short(member.peer_id),
                date(member.enrolled_at),
                roles_shown(member.roles),
                f"{self.samples.get(str(member.peer_id), 0):,}",
                _certificate(member, now),
                "" if member.why_removed is None else escape(member.why_removed or "no reason given"),
                style=None if member.why_removed is None else "dim",
            )
        return table

    def _invitations_table(self) -> Table:
        table = _table("for", "uses left", "until", "roles")
        for invitation in self.invitations:
            table.add_row(
                escape(invitation.name) or "anyone with it",
                str(invitation.uses_left),
                date(invitation.expires_at),
                roles_shown(invitation.roles),
            )
        return table


def samples_given(folder: Path) -> Counter[str]:
    """Samples that each member gave to the updates in which peers of this machine took part, by peer id.

    Args:
        folder: of the run, with a folder for each peer
    """
    given: Counter[str] = Counter()
    seen: set[tuple[int, tuple[str, ...]]] = set()
    for path in sorted(folder.glob(f"*/{RunFolder('').rounds.name}")):
        for line in read_metrics(path):
            members, samples = line.get("members"), line.get("member_samples")
            if line.get("outcome") != "averaged" or not members or not samples:
                continue
            round_ = line["step"], tuple(members)
            if round_ not in seen:  # else it was counted: several peers of this machine were in it
                seen.add(round_)
                given.update(dict(zip(members, samples, strict=False)))
    return given


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in ("uses left", "samples") else "left", overflow="fold")
    return table


def _certificate(member: Member, now: float) -> str:
    if not member.certificate_ends_at:
        return "none yet"
    day = date(member.certificate_ends_at)
    return day if member.certificate_ends_at > now else f"[yellow]ended {day}[/]"


def main(
    arguments: list[str], say: Callable[[str], None] = print, make_console: Callable[[], Console] = wide_console
) -> int:
    """Returns the exit status: 0, or 2 for input that cannot work."""

    def run() -> None:
        options = read_options(MembersOptions, arguments, "swarm members")
        folder = options.run.opened()
        registry = folder.registry
        samples = samples_given(options.run.output_dir.expanduser() / folder.run_id)
        books = Books(folder.run_id, registry.members(), registry.invitations(), samples)
        if why := registry.why_peers_refuse_the_list:
            print(f"warning: {why}", file=sys.stderr)
        if options.json:
            say(json.dumps(books.as_json(), indent=2))
        else:
            make_console().print(books.table(time.time()))

    return exit_status(run)
