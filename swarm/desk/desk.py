"""The desk: keeps what was seen of a run, sends alerts, and serves the page."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn

from recipe.errors import InputError
from swarm.desk.alerts import Alerts
from swarm.desk.app import build_app
from swarm.desk.guard import MAX_CONNECTIONS, Connection
from swarm.desk.health import Finding, findings
from swarm.desk.history import History
from swarm.desk.ledger.credits import Credits
from swarm.desk.organiser.controls import SwarmControls
from swarm.desk.organiser.door import Door
from swarm.desk.page import MAX_LEADERS, Snapshot
from swarm.desk.report import (
    Plan,
    RunCard,
    history_report,
    leaders_report,
    peers_report,
    plan,
    swarm_report,
    timeline_report,
)
from swarm.membership.progress_record import PeerProgress
from swarm.network.addresses import check_port_free, host_and_port
from swarm.protocol.certificates import Certificate
from swarm.protocol.orders import Orders

SAVE_SECONDS = 30.0
LEAST_FREE_BYTES = 2**30
"""Free space on the desk's own disk below which it warns."""
MAX_HEADER_BYTES = 2**14
END_SECONDS = 3.0

logger = logging.getLogger(__name__)


class Desk:
    """Keeps the history of one run, and makes a new snapshot after each look.

    Args:
        card: what does not change about the run
        path: file of the history; that of an earlier desk is continued
        alerts: where messages go about what is wrong
        still_minutes: minutes without an update after which something is wrong
        credits: by the run's ledger; None if it is not fetched
        clock: tells seconds since 1970
    """

    def __init__(
        self,
        card: RunCard,
        path: Path,
        alerts: Alerts,
        still_minutes: float,
        credits: Credits | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self._card, self._path, self._alerts = card, path, alerts
        self._still_minutes, self._clock = still_minutes, clock
        self.history = History.load(path, card.key, card.target_batch_size, clock())
        self._began_at = self._saved_at = clock()
        self._trouble = ""
        """Why the history could not be saved the last time; empty if it was saved."""
        self._credits = credits
        self._orders = Orders(card.key)
        self._ending: Sequence[Certificate] = ()
        self.newest = self._snapshot()

    def turn(
        self,
        records: dict[str, PeerProgress] | None,
        orders: Orders | None = None,
        ending: Sequence[Certificate] = (),
    ) -> None:
        """Take in what a look has found, and make a new snapshot.

        Args:
            records: by peer id; None if the swarm did not answer
            orders: of the organiser; None if they are as before
            ending: certificates of members that should have been renewed by now and end soon
        """
        self._ending = ending
        if orders is not None:
            self._take(orders)
        if self._credits is not None:
            self._credits.look()
        if records is not None:
            self.history.look(records, self._clock(), self._plan().is_paused)
        self.newest = self._snapshot()
        if not 0 <= self._clock() - self._saved_at < SAVE_SECONDS:  # or the clock was set back
            self.save()

    def remember(self, addresses: list[str]) -> None:
        """Keep the addresses of peers for the next desk. They are saved at once if they are new."""
        if addresses != self.history.addresses:
            self.history.addresses = addresses
            self.save()

    def save(self) -> None:
        """Save the history. If the disk is full, the page goes on, and says that the history is not saved."""
        self._saved_at = self._clock()
        try:
            self.history.save(self._path)
            self._trouble = ""
        except OSError as error:
            self._trouble = error.strerror or "unknown error"

    def _take(self, orders: Orders) -> None:
        before, after = ({(order.given_at, order) for order in known.given} for known in (self._orders, orders))
        for given_at, order in sorted(after - before, key=lambda found: found[0]):
            if given_at / 1000 >= self._began_at:  # earlier ones are no news; a busy swarm may hand them over late
                self.history.note(f"The organiser ordered: {order}.", self._clock())
        for _, order in sorted(before - after, key=lambda found: found[0]):
            self.history.note(f"An order no longer counts, as its deputy was revoked: {order}.", self._clock())
        self._orders = orders

    def _plan(self) -> Plan:
        return plan(self._card, self._orders, self.history.step or 0)

    def _snapshot(self) -> Snapshot:
        now, run = self._clock(), self._plan()
        self.history.target_batch_size = run.target_batch_size
        found = findings(self.history, run.total_steps, self._still_minutes, now, run.is_paused, self._ending)
        found += self._disk()
        self._alerts.update(found, f"Swarm {self._card.run_id}")
        peers = peers_report(self.history, now)
        return Snapshot(
            self._card,
            swarm_report(self._card, run, self.history, found, now),
            peers,
            leaders_report(self.history, MAX_LEADERS, self._credits),
            history_report(self.history, now),
            timeline_report(self.history, peers),
            self._orders,
        )

    def _disk(self) -> list[Finding]:
        free, trouble = LEAST_FREE_BYTES, self._trouble
        try:
            free = shutil.disk_usage(self._path.parent).free
        except OSError as error:  # the folder was deleted, for example
            trouble = trouble or error.strerror or "unknown error"
        if trouble:
            text = f"The desk cannot save its history ({trouble}): check its folder and its disk."
            return [Finding("disk", "warning", text)]
        if free >= LEAST_FREE_BYTES:
            return []
        return [Finding("disk", "warning", f"The desk's own disk is nearly full: {free / 2**20:,.0f} MiB are free.")]


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at this address.

    Args:
        host: address or name of this machine
        port: TCP port; 0 for any free one

    Raises:
        InputError: the port is taken or not allowed, or the host is not this machine's
    """
    check_port_free(port, host)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InputError(f"The desk cannot listen on {host}, port {port} ({error.strerror}): choose others.") from None


def page_url(listener: socket.socket) -> str:
    """What to type into a browser on this machine."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:  # an address to listen at, which cannot be called on Windows
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://{host_and_port(host, port)}"


def is_for_others(listener: socket.socket) -> bool:
    """Whether the page is served at each address of this machine, and not only at that of `page_url`."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_unspecified


@contextlib.contextmanager
def served(
    newest: Callable[[], Snapshot],
    listener: socket.socket,
    door: Door | None = None,
    controls: SwarmControls | None = None,
) -> Iterator[None]:
    """Serves the page, in a thread of its own, as long as the block lasts.

    Args:
        newest: returns the newest snapshot
        listener: from `open_socket`; it is closed in the end
        door, controls: as in `build_app`
    """
    config = uvicorn.Config(
        build_app(newest, door, controls, only_here=ipaddress.ip_address(listener.getsockname()[0]).is_loopback),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        http=Connection,
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(END_SECONDS)
        listener.close()
