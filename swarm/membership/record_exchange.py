"""A peer's record goes out and those of the others come in, again and again, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time, get_logger

from swarm.membership.progress_record import Clocks, OwnClock, PeerProgress
from swarm.membership.progress_store import ProgressStore
from swarm.runtime.timeouts import Timeouts

logger = get_logger(__name__)

MIN_REFRESH_SECONDS = 0.2


class RecordExchange(threading.Thread):
    """Within `report_seconds` others know how far this peer is; when a round is near, sooner.

    Args:
        store: where records are
        own: this peer's record as it is now
        take_in: gets all others' records: as they were read, and with their clocks corrected
        seconds_to_round: how long it still takes, as far as this peer can tell
    """

    def __init__(
        self,
        store: ProgressStore,
        own: Callable[[], PeerProgress],
        take_in: Callable[[dict[PeerID, PeerProgress], dict[PeerID, PeerProgress]], None],
        seconds_to_round: Callable[[], float],
        timeouts: Timeouts,
    ):
        super().__init__(name="progress", daemon=True)
        self._store, self._own, self._take_in, self._seconds_to_round = store, own, take_in, seconds_to_round
        self._timeouts = timeouts
        self._wake, self._closing, self._has_to_search = threading.Event(), threading.Event(), True
        self._refreshed = threading.Condition()
        self.refreshes = 0
        """How often the records have been read."""
        self.on_refreshed: Callable[[], None] = lambda: None
        """Called each time that the records have been read, from this thread."""
        self._clocks, self._own_clock = Clocks(), OwnClock()
        self._telling: Future | None = None
        self._telling_since = 0.0
        self._told = own()

    def wake(self) -> None:
        """There is something to tell."""
        self._wake.set()

    def hurry(self) -> None:
        """Somebody waits for `refreshes`."""
        self._has_to_search = True
        self._wake.set()

    def ask_refreshed(self) -> int:
        """Have the records read again; when `refreshes` is as large as what is returned, they have come."""
        wanted = self.refreshes + 2  # the refresh that is running may have asked before
        self.hurry()
        return wanted

    def wait_refreshed(self, timeout_seconds: float) -> bool:
        """Wait until records that were asked for after this call have come."""
        with self._refreshed:
            wanted = self.ask_refreshed()
            deadline = time.monotonic() + timeout_seconds
            while self.refreshes < wanted:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self.is_alive():
                    return False
                self._refreshed.wait(remaining)
                self.hurry()
            return True

    def run(self) -> None:
        while not self._closing.is_set():
            self.look_at_clock()
            try:
                self._tell()
                self.look()
            except Exception as error:
                logger.debug(f"could not exchange progress records: {error!r}")
            else:
                with self._refreshed:
                    self.refreshes += 1
                    self._refreshed.notify_all()
                self.on_refreshed()
            self._wake.wait(min(max(self._pause_seconds(), MIN_REFRESH_SECONDS), self._timeouts.report_seconds))
            self._wake.clear()

    def look_at_clock(self) -> None:
        """Say so if it was set: others would take this peer for one that is away."""
        if seconds := self._own_clock.set_by_seconds():
            self._clocks = Clocks()
            said = "if it is some seconds off now, the others do not see this peer (`timedatectl` tells)"
            logger.warning(f"This machine's clock was just set by {seconds:+.0f} s: {said}")

    def _tell(self) -> None:
        """Post this peer's record, unless the last one is still on its way; what takes too long is given up."""
        now = time.monotonic()
        is_telling = self._telling is not None and not self._telling.done()
        if is_telling and now < self._telling_since + self._timeouts.record_seconds / 3:
            return
        own = self._own()
        self._telling, self._telling_since = self._store.post(own), now
        self._told = own

    def look(self) -> None:
        """Read the others' records."""
        if search := self._has_to_search:
            self._has_to_search = False  # who asks from now on is served by the search that begins
        try:
            others = self._store.look(search)
        except Exception:
            self._has_to_search |= search
            raise
        self._take_in(others, self._clocks.corrected(others, get_dht_time()))

    def _pause_seconds(self) -> float:
        told, own = self._told, self._own()
        return 0.0 if (told.phase, told.round) != (own.phase, own.round) else self._seconds_to_round() / 2

    def close(self, says_goodbye: bool = True) -> None:
        """Stop, and tell the others that this peer has left; not where there is nobody to tell it."""
        self._closing.set()
        self._wake.set()
        if not says_goodbye:
            return
        if self.is_alive():
            self.join(timeout=2)
        try:
            self._store.post(None).result(timeout=self._timeouts.record_seconds / 3)
        except Exception as error:
            logger.debug(f"could not say goodbye: {error!r}")
