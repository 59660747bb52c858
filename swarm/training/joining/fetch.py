"""How the trainer waits for a download, and for newer records, without blocking."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from swarm.runtime.async_utils import POLL_SECONDS
from swarm.state_sync.download import Downloaded, DownloadRequest, NoState
from swarm.training.joining.attempt import Attempt, Steps
from swarm.training.joining.listener import NEAR_SECONDS, Listener
from swarm.training.own_peer import OwnPeer

logger = get_logger(__name__)

MAX_DONORS = 8
"""Most donors that are asked for the same thing at once."""
TELL_SECONDS = 5.0
"""Seconds from one log line about a download to the next."""


class Fetcher:
    """Lets the averaging process download, and watches it.

    Args:
        own: this peer
        listener: goes to the next round when the download is nearly done
    """

    def __init__(self, own: OwnPeer, listener: Listener):
        self._averager, self._tracker = own.averager, own.tracker
        self._listener, self._should_stop = listener, own.should_stop

    def fetch(self, donors: Sequence[PeerID], attempt: Attempt, request: DownloadRequest) -> Steps[Downloaded]:
        """Download in the averaging process.

        Args:
            donors: donors that may have what is wanted, the best first
            attempt: the attempt that this download is for
            request: what is wanted

        Raises:
            NoState: none of the donors has handed it over
        """
        averager = self._averager
        download = averager.download_state(donors, request)
        looks, silent_seconds = averager.transfers.looks, 0.0
        looked_at = told_at = time.monotonic()
        try:
            while not download.done():
                if self._should_stop():
                    raise NoState({}, "this peer is leaving")
                averager.check_alive()
                yield download
                now = time.monotonic()
                # Not by the clock alone, which also runs while this process itself is suspended.
                silent_seconds += min(now - looked_at, POLL_SECONDS)
                looked_at = now
                if looks != (looks := averager.transfers.looks):
                    silent_seconds = 0.0
                if silent_seconds > averager.timeouts.hangs_seconds:
                    averager.kill()  # it hangs: the watch over this peer's processes sees its death and restarts
                if attempt.may_listen and averager.transfers.arrived.seconds_left < NEAR_SECONDS:
                    self._listener.begin()
                if attempt.corroboration.is_denied:
                    raise NoState({}, "all witnesses deny that the swarm has gone on")
                if now - told_at > TELL_SECONDS:
                    told_at = now
                    self._tell(donors, "state" if request.average_of is None else "average")
        finally:
            if not download.done():
                averager.cancel_download()
        return download.result()

    def _tell(self, donors: Sequence[PeerID], what: str) -> None:
        """Log how far the download is."""
        arrived = self._averager.transfers.arrived
        # Until the averaging process begins, these numbers are those of the download before, from other donors.
        if arrived.total_bytes and arrived.donor < len(donors):
            name = self._tracker.name_of(donors[arrived.donor])
            so_far = f"{arrived.num_bytes / 1e6:.0f} of {arrived.total_bytes / 1e6:.0f} MB from {name}"
            left = f", {arrived.seconds_left:.0f} s left" if arrived.seconds_left < float("inf") else ""
            logger.warning(f"{what}: {so_far}{left}")

    def until_refreshed(self, seconds: float, at_least: bool = False) -> Steps[None]:
        """Wait until records have come that were asked for in this call.

        Args:
            seconds: most seconds to wait
            at_least: wait for all these seconds even if the records have come
        """
        deadline, wanted = time.monotonic() + seconds, self._tracker.exchange.ask_refreshed()
        while time.monotonic() < deadline and not self._should_stop():
            if not at_least and self._tracker.exchange.refreshes >= wanted:
                return
            self._tracker.exchange.hurry()
            yield None
