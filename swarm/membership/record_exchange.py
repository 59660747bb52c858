"""A thread that publishes this peer's progress record and reads those of the other peers, again and again."""

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
    """Exchanges progress records at least every `report_seconds`, and more often when a round is near.

    Args:
        store: where records are kept
        own: returns this peer's record as it is now
        take_in: gets the records of all other peers, as they were read and with their clocks corrected
        seconds_to_round: returns the estimated seconds until the next round
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
        """Called from this thread each time that the records have been read."""
        self._clocks, self._own_clock = Clocks(), OwnClock()
        self._telling: Future | None = None
        self._telling_since = 0.0
        self._told = own()

    def wake(self) -> None:
        """Publish and read soon: the own record has changed."""
        self._wake.set()

    def hurry(self) -> None:
        """Exchange now, with a search of the DHT: a caller waits for `refreshes`."""
        self._has_to_search = True
        self._wake.set()

    def ask_refreshed(self) -> int:
        """Have the records read again. They have come when `refreshes` is as large as the number returned."""
        wanted = self.refreshes + 2  # the refresh that is running may have sent its query before this call
        self.hurry()
        return wanted

    def wait_refreshed(self, timeout_seconds: float) -> bool:
        """Wait for records that are read after this call. Returns whether they came in time."""
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
            pause_seconds = self._timeouts.report_seconds
            try:
                self._tell()
                self.look()
                with self._refreshed:
                    self.refreshes += 1
                    self._refreshed.notify_all()
                self.on_refreshed()
                pause_seconds = min(max(self._pause_seconds(), MIN_REFRESH_SECONDS), pause_seconds)
            except Exception as error:
                logger.debug(f"could not exchange progress records: {error!r}")
            self._wake.wait(pause_seconds)
            self._wake.clear()

    def look_at_clock(self) -> None:
        """Warn if this machine's clock was set: other peers could take this one for absent."""
        if seconds := self._own_clock.set_by_seconds():
            self._clocks = Clocks()
            said = "if it is wrong by some seconds now, other peers ignore this peer: check it with `timedatectl`"
            logger.warning(f"This machine's clock has just changed by {seconds:+.0f} s: {said}")

    def _tell(self) -> None:
        """Post this peer's record, unless the last one is still on its way. A post that takes too long is given up."""
        now = time.monotonic()
        is_telling = self._telling is not None and not self._telling.done()
        if is_telling and now < self._telling_since + self._timeouts.record_seconds / 3:
            return
        own = self._own()
        self._telling, self._telling_since = self._store.post(own), now
        self._told = own

    def look(self) -> None:
        """Read the records of the other peers."""
        if search := self._has_to_search:
            self._has_to_search = False  # the search that begins now serves every caller until here
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
        """Stop the exchange.

        Args:
            says_goodbye: also tell the other peers that this one has left
        """
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
