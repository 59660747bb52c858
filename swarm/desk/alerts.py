"""Sends people a message when something is wrong with a run, and one more when it is well again."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import apprise

from recipe.errors import InputError
from swarm.desk.health import UNKNOWN_WHILE, Finding

SURE_SECONDS = 15.0
"""How long something has to be wrong before a message is sent. A peer that is started again is no reason for one."""
SETTLED_SECONDS = 60.0
"""How long it has to be over before a message says so."""
RETRY_SECONDS = 60.0
"""Time until the next attempt after a message that could not be sent."""

logger = logging.getLogger(__name__)
logging.getLogger("apprise").setLevel(logging.CRITICAL)  # its log messages hold URLs, which hold passwords


@dataclass
class _Matter:
    """Something that is wrong, or was a moment ago.

    Args:
        finding: as it was found last
        since: when it was found first
        seen_at: when it was found last, or may have been there unseen
        is_told: a message about it was sent
    """

    finding: Finding
    since: float
    seen_at: float
    is_told: bool = False


class Alerts:
    """Sends messages to all places that the organiser has named, from a thread of its own.

    Args:
        urls: of these places, as Apprise reads them: mailto://, slack://, json:// and a hundred others
        clock: tells seconds

    Raises:
        InputError: Apprise cannot read one of the URLs
    """

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._places = apprise.Apprise()
        for position, url in enumerate(urls, 1):
            if not self._places.add(url):  # the URL may hold a password, so the error does not repeat it
                raise InputError(
                    f"--alert number {position} is no URL that Apprise can send to: see its list of services for the "
                    "form, such as mailto://user:password@example.org or json://host/path."
                )
        self._matters: dict[str, _Matter] = {}
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="alerts")
        self._sending: tuple[str, bool, Future[bool]] | None = None
        """The message on its way: kind of finding, whether it says that this is over, and whether it was sent."""
        self._quiet_until = -math.inf

    def update(self, found: Sequence[Finding], title: str) -> None:
        """Take in what is wrong now, begin to send the next message if there is one, and return at once.

        Args:
            found: what is wrong now
            title: of the message
        """
        now = self._clock()
        if self._sending is not None and self._sending[2].done():
            self._settle(*self._sending)
            self._sending = None
        for finding in found:
            matter = self._matters.setdefault(finding.kind, _Matter(finding, now, now))
            matter.finding, matter.seen_at = finding, now
        for kind in set().union(*(UNKNOWN_WHILE.get(finding.kind, ()) for finding in found)):
            if kind in self._matters and self._matters[kind].is_told:
                self._matters[kind].seen_at = now  # hidden by something worse, which does not mean that it is over
        on_its_way = self._sending and self._sending[0]
        for kind, matter in [*self._matters.items()]:
            if not matter.is_told and kind != on_its_way and matter.seen_at < now:
                del self._matters[kind]
        if len(self._places) and self._sending is None and now >= self._quiet_until:
            self._send_next(now, title)

    def wait(self) -> None:
        """Waits until the message on its way was sent, or could not be sent."""
        if self._sending is not None:
            wait([self._sending[2]])

    def stop(self) -> None:
        """Sends no more messages. The one on its way may still arrive."""
        self._sender.shutdown(wait=False, cancel_futures=True)

    def _send_next(self, now: float, title: str) -> None:
        for kind, matter in self._matters.items():
            if not matter.is_told and now - matter.since >= SURE_SECONDS:
                return self._send(kind, title, matter.finding.text, is_over=False)
            if matter.is_told and now - matter.seen_at >= SETTLED_SECONDS:
                return self._send(kind, title, f"This is over: {matter.finding.text}", is_over=True)
        return None

    def _send(self, kind: str, title: str, text: str, is_over: bool) -> None:
        notify_type = apprise.NotifyType.SUCCESS if is_over else apprise.NotifyType.FAILURE
        sent = self._sender.submit(
            self._places.notify,
            body=text,  # may hold a name that a stranger chose: plain text only
            title=title,
            notify_type=notify_type,
            body_format=apprise.NotifyFormat.TEXT,
        )
        self._sending = kind, is_over, sent

    def _settle(self, kind: str, is_over: bool, sent: Future[bool]) -> None:
        if sent.exception() is not None or not sent.result():
            logger.warning(
                "An alert could not be sent: try its URL with the command `apprise`. Another attempt comes in %.0f s",
                RETRY_SECONDS,
            )
            self._quiet_until = self._clock() + RETRY_SECONDS
        elif is_over:
            del self._matters[kind]
        else:
            self._matters[kind].is_told = True
