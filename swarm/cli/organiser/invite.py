"""Invite people into your run: print the line with which they join.

    swarm invite --name ada
    swarm invite --uses 30 --days 7                      # one line for a whole group
    swarm invite --peer-id QmYyQSo1c1... --name ada      # a certificate, for a volunteer who cannot reach your machine

Anyone who has the line can join with it. It counts only at the machine that enrols, whose books have its invitation. It
is shown only once: the books keep a digest of its invitation. Beside your peer, the line names up to two other members
that answer now. Through them people can join while your peer is off and swarm enrol runs.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import io
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from recipe.command_line import arg, at_least, exit_status, read_options
from recipe.errors import InputError
from swarm.cli.organiser.organiser_options import OrganiserOptions, RoleName, date, role_of, roles_shown, short
from swarm.network.addresses import EXAMPLE, closed_ports, parse_initial_peers

if TYPE_CHECKING:
    from hivemind.p2p import PeerID

    from swarm.enrolment.organiser_folder import OrganiserFolder
    from swarm.enrolment.registry import Member, Registry

QR_PACKAGE = "segno"
DAY_SECONDS = 24 * 3600
MAX_CERTIFICATE_DAYS = 365.0
"""The same as at the enrolment server, whose module takes seconds to import."""
OF_A_COPY = (
    "warning: This may be a copy of the organiser's folder: the organiser's key is not here, and the join lines name "
    "no address of this machine. If it is one, the machine that enrols does not learn of this change: give the "
    "command there"
)
OR_CERTIFY = ", or make a certificate here, with --peer-id QM... and --organiser-key FILE"


def _is_shown_by_default() -> bool:
    return sys.stdout.isatty() and importlib.util.find_spec(QR_PACKAGE) is not None


@dataclass(frozen=True)
class InviteOptions:
    """Invite people into your run. It prints the line with which they join."""

    name: Annotated[str, arg("NAME", "the volunteer chooses")] = ""
    """Name of the invited person. You see the member under this name, and can remove it by this name."""
    uses: Annotated[int, arg("PEOPLE")] = 1
    """How many people may become members with this line."""
    days: Annotated[float, arg("DAYS")] = 30.0
    """How long the invitation can be used; with --peer-id, how long the certificate counts."""
    roles: RoleName = "everything"
    """What these members may do. everything: all of it; train: train, but never be called by other peers; helper: be a
    helper, which never trains."""
    peer_id: Annotated[str | None, arg("QM...", "none: they become members when they join")] = None
    """Instead of an invitation, make a certificate for the peer with this id: for a volunteer who cannot reach your
    enrolment port."""
    close: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Close all invitations that were made so far, and make no new one. Members stay members."""
    qr: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: in a terminal)")] = field(
        default_factory=_is_shown_by_default
    )
    """Also show the join line as a QR code."""
    organiser: Annotated[OrganiserOptions, tyro.conf.arg(name="your run")] = field(default_factory=OrganiserOptions)

    def check(self) -> None:
        """Raises InputError: a value cannot work"""
        at_least(self, 1, "uses")
        if not self.days > 0:
            raise InputError(f"--days is {self.days:g}: it has to be more than 0.")
        if self.peer_id is not None:
            self._check_peer()

    def _check_peer(self) -> None:
        if not _is_peer_id(self.peer_id):
            raise InputError(
                f"--peer-id {ascii(self.peer_id)[:80]} is no peer id: it has 46 letters and digits and begins with Qm, "
                f"such as {EXAMPLE.rpartition('/')[2]}."
            )
        if self.uses != 1:
            raise InputError("A certificate is for one peer: leave out --uses, or --peer-id.")
        if self.days > MAX_CERTIFICATE_DAYS:
            raise InputError(f"--days is {self.days:g}: a certificate counts for at most {MAX_CERTIFICATE_DAYS:g}.")


def _is_peer_id(text: str) -> bool:
    """Whether this is the peer id of an RSA key, the kind that peers of a swarm have."""
    try:
        return text.startswith("Qm") and text.isalnum() and bool(parse_initial_peers([f"/dns/a/tcp/1/p2p/{text}"]))
    except InputError:
        return False


def main(arguments: list[str], say: Callable[[str], None] = print) -> int:
    """Returns the exit status: 0, or 2 for input that cannot work."""
    return exit_status(lambda: _invite(read_options(InviteOptions, arguments, "swarm invite"), say))


def _invite(options: InviteOptions, say: Callable[[str], None]) -> None:
    options.check()
    draw = _drawing() if options.qr and options.peer_id is None else None
    folder = options.organiser.opened()
    registry = folder.registry
    if options.close:
        closed = registry.close_invitations()
        what = "1 invitation" if closed == 1 else f"{closed} invitations"
        say(f"{what} of run {folder.run_id} can no longer be used. Members stay members.")
        _warn_of_a_copy(folder, say, way_out="")
        return
    folder.join_line()  # before anything is written: there is no join line if no peer has started the run yet
    _check_name(options.name)
    if options.peer_id is not None:
        _certify(options, folder, registry, say)
        return
    token = registry.invite(options.name, options.days, options.uses, role_of(options.roles))
    line = str(folder.join_line(token, folder.others_there()))
    if draw is not None:
        say(draw(line))
    say(f"swarm join {line}\n")
    say(_about_line(options, folder.run_id))
    if warning := closed_ports(folder.addresses, folder.public_ip, folder.enrolment_port):
        say(warning)
    _warn_of_a_copy(folder, say)


def _warn_of_a_copy(folder: OrganiserFolder, say: Callable[[str], None], way_out: str = OR_CERTIFY) -> None:
    if folder.may_be_a_copy:
        say(f"{OF_A_COPY}{way_out}.")


def _check_name(name: str) -> None:
    from swarm.enrolment.messages import printable

    if printable(name) != name.strip():
        raise InputError("--name has letters that cannot be shown, or more than 64: choose another one.")


def _about_line(options: InviteOptions, run_id: str) -> str:
    who = "One person" if options.uses == 1 else f"{options.uses} people"
    until = date(time.time() + options.days * DAY_SECONDS)
    name = shlex.quote(options.name.strip()) if options.name.strip() else "NAME"
    return (
        f"{who} can join run {run_id} with this line until {until}. Anyone with the line can use it. If something goes "
        f"wrong, `swarm remove {name}` takes the member out again."
    )


# ---- without the enrolment server -----------------------------------------------------------------------------------


def _certify(options: InviteOptions, folder: OrganiserFolder, registry: Registry, say: Callable[[str], None]) -> None:
    """Make a member of a volunteer who cannot reach this machine, and print the certificate."""
    from hivemind.p2p import PeerID

    from swarm.enrolment.organiser_key import check_right
    from swarm.protocol.certificates import Certificate, Right

    signer, authority = folder.signer(), folder.authority
    check_right(signer, authority, Right.ENROL)  # before the peer is enrolled
    member = _enrolled(options, registry, PeerID.from_base58(options.peer_id))
    signed = registry.certify(member, signer, authority, options.days)
    end = Certificate.read(signed, authority).end
    text = base64.b64encode(signed).decode()
    line = folder.join_line(others=folder.others_there())
    say(f"swarm join {line} --certificate {text}\n")
    say(
        f"{member.name} ({short(member.peer_id)}) is a member of run {folder.run_id} (roles: "
        f"{roles_shown(member.roles)}): with this line its volunteer joins until {date(end)}, and no other peer can "
        f"use it; `swarm remove {shlex.quote(member.name)}` takes that back."
    )
    if warning := closed_ports(line.addresses, folder.public_ip):
        say(warning)


def _enrolled(options: InviteOptions, registry: Registry, peer_id: PeerID) -> Member:
    """The peer as a member, which it becomes if it is none yet. A member that is there keeps its name and roles.

    Raises:
        InputError: the member was removed, or the books take no more members
    """
    from swarm.enrolment.registry import NotInvited

    member = registry.member_of(peer_id)
    if member is None:
        try:
            token = registry.invite(options.name, 1, 1, role_of(options.roles))
            return registry.use_invitation(token, peer_id, options.name)
        except NotInvited as error:
            raise InputError(f"No certificate can be made, for {error}.") from None
    if member.why_removed is not None:
        raise InputError(
            f"{member.name} ({short(peer_id)}) was removed: `swarm remove {peer_id} --restore` takes that back, then "
            "make the certificate."
        )
    return member


# ---- QR code --------------------------------------------------------------------------------------------------------


def _drawing() -> Callable[[str], str]:
    """A function that draws a line as a QR code, or says why the terminal cannot show one.

    Raises:
        InputError: the package for QR codes is missing
    """
    try:
        package = importlib.import_module(QR_PACKAGE)
    except ImportError:
        raise InputError(f"--qr needs a package that is missing: pip install {QR_PACKAGE}.") from None

    def draw(line: str) -> str:
        if not _has_blocks():
            return "(For a QR code the terminal needs UTF-8.)"
        code = package.make(line, error="l", micro=False)
        width, _ = code.symbol_size(border=2)
        if width > shutil.get_terminal_size().columns:
            return f"(For a QR code the terminal needs {width} columns.)"
        drawn = io.StringIO()
        code.terminal(drawn, border=2, compact=True)
        return drawn.getvalue()

    return draw


def _has_blocks() -> bool:
    """Whether the terminal can show the characters with which the code is drawn."""
    try:
        return bool("▀▄█".encode(sys.stdout.encoding or "ascii"))
    except UnicodeEncodeError:
        return False
