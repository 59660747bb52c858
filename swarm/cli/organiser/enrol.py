"""Renew members' certificates, and let people become members, while your own peer does not run, until Ctrl-C.

    swarm enrol
    swarm enrol --run-id digits-20260728-140312

Your own peer does the same as long as it runs. Newcomers also need a join line that names a running peer:
a line of swarm invite names other members, that of swarm start names only your peer.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from recipe.command_line import arg, check_port, exit_status, read_options
from recipe.errors import InputError
from swarm.cli.organiser.organiser_options import OrganiserOptions
from swarm.network.addresses import host_and_port

if TYPE_CHECKING:
    from swarm.enrolment.organiser_folder import OrganiserFolder

NEEDS_A_PEER = (
    "Members renew their certificates here. Newcomers also need a running peer that their join line names. While your "
    "peer is off, send them a line of swarm invite that was made while other members run."
)


@dataclass(frozen=True)
class EnrolOptions:
    """Renew members' certificates, and let people become members, while your own peer does not run, until Ctrl-C.
    Newcomers also need a join line that names a running peer: a line of swarm invite names other members, that of swarm
    start names only your peer."""

    port: Annotated[int | None, arg("PORT", "the one that your join lines name")] = None
    """TCP port to listen on; 0 takes any free one."""
    certificate_days: Annotated[float, arg("DAYS")] = 7.0
    """How long a certificate counts. Members renew theirs when half of this time is over."""
    organiser: Annotated[OrganiserOptions, tyro.conf.arg(name="your run")] = field(default_factory=OrganiserOptions)

    def check(self) -> None:
        """Raises InputError: a value cannot work"""
        check_port("--port", self.port or 0)
        if not self.certificate_days > 0:
            raise InputError(f"--certificate-days is {self.certificate_days:g}: it has to be more than 0.")


def wait_for_ctrl_c() -> None:
    """Waits until Ctrl-C raises KeyboardInterrupt."""
    threading.Event().wait()


def main(arguments: list[str], say: Callable[[str], None] = print, wait: Callable[[], None] = wait_for_ctrl_c) -> int:
    """Returns the exit status: 0 after Ctrl-C, or 2 for input that cannot work.

    Args:
        wait: called while the server runs; it ends with KeyboardInterrupt
    """

    def run() -> None:
        options = read_options(EnrolOptions, arguments, "swarm enrol")
        options.check()
        _enrol(options, say, wait)

    return exit_status(run)


def _enrol(options: EnrolOptions, say: Callable[[str], None], wait: Callable[[], None]) -> None:
    folder = options.organiser.opened()
    from swarm.enrolment.server import EnrolmentServer
    from swarm.network.home.interfaces import every_host

    registry, authority, named = folder.registry, folder.authority, folder.enrolment_port
    port = named if options.port is None else options.port
    server = EnrolmentServer(
        registry, folder.signer(), authority, every_host()[-1], port, certificate_days=options.certificate_days
    )  # listens at `::` where the machine has IPv6, which takes IPv4 as well
    with _shown(EnrolmentServer.__module__):
        port = server.start()
        try:
            with _sigterm_is_ctrl_c():
                if port != named:
                    folder.note_enrolment_port(port)
                say(_where(folder, port, named))
                invitations = registry.invitations()
                say(_how_many(len(invitations), sum(invitation.uses_left for invitation in invitations)))
                if why := registry.why_peers_refuse_the_list:
                    say(f"warning: {why}")
                say(NEEDS_A_PEER)
                say("Ctrl-C ends it.")
                sys.stdout.flush()  # the output may be a file, and the next line may come tomorrow
                wait()
        except KeyboardInterrupt:
            say("Enrolment has ended here; members stay members as long as their certificates count.")
        finally:
            server.stop()


def _where(folder: OrganiserFolder, port: int, named: int) -> str:
    endpoints = " ".join(host_and_port(*endpoint) for endpoint in folder.join_line().server_endpoints)
    said = f"People enrol for run {folder.run_id} at {endpoints}; this machine listens on TCP port {port}."
    if port != named:
        said += f" Join lines that were made before name port {named}: make new ones with swarm invite."
    return said


def _how_many(num_invitations: int, uses_left: int) -> str:
    if not num_invitations:
        return "No invitation is open: swarm invite makes one."
    invitations = "1 invitation is open" if num_invitations == 1 else f"{num_invitations} invitations are open"
    return f"{invitations}, for {uses_left} {'person' if uses_left == 1 else 'people'}."


@contextlib.contextmanager
def _shown(name: str) -> Iterator[None]:
    """Shows what the logger of this name says of newcomers and members, with the time, as long as the block lasts."""
    logger, handler = logging.getLogger(name), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def _sigterm_is_ctrl_c() -> Iterator[None]:
    """As long as the block lasts, SIGTERM does what Ctrl-C does: a service manager ends this program in order, too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
