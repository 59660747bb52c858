"""Chooses the donor that a state is taken from: the first one, unless others turn out to be faster.

In a race all donors share this peer's own line. So the winner then has to show that it fills this line alone. If it
does not, the second best gets the same chance. The faster of the two goes on with what has arrived from it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from hivemind.p2p import PeerID

from swarm.protocol.messages import RoundFailed
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.state_sync.download import Busy, Download, NoState
from swarm.state_sync.pull import Pull

MAX_RUNNING = 3
ENOUGH = 0.85
"""Share of the rate at which all donors sent together. A donor that is so fast alone is not the bottleneck."""


class DonorRace:
    """Downloads from several donors until one download is complete.

    A small state is complete before a second donor has to be asked.

    Args:
        downloads: one for each donor, the best first
        pull: makes the `Pull` of a download
        until_lost: waits until a peer is lost
    """

    def __init__(
        self,
        downloads: Sequence[Download],
        pull: Callable[[Download], Pull],
        until_lost: Callable[[PeerID], Awaitable[None]],
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ):
        self._timeouts = timeouts
        self._waiting, self._places = [*downloads], {id(download): i for i, download in enumerate(downloads)}
        self._pull, self._until_lost = pull, until_lost
        self._running: dict[asyncio.Task, Download] = {}
        self._reasons: dict[PeerID, str] = {}
        self._busy_seconds: list[float] = []
        self._has_begun = False
        self._second: Download | None = None
        self._race_rate = 0.0
        self._alone = 0.0, 0
        """Since when the running download is the only one, and how many bytes it had then."""
        self._alone_rates: dict[int, float] = {}
        """Bytes per second of a download (by `id`) while it ran alone."""
        self.broken: list[Download] = []
        """Failed downloads with pieces that are still good; the one with the most bytes is the last."""

    async def run(self, look_at: Callable[[int, Download], None]) -> Download:
        """Run the race and return the complete download.

        Args:
            look_at: called now and then with the place of the leading donor, and its download

        Raises:
            NoState: no download was completed
        """
        began, race_began, times = time.monotonic(), 0.0, self._timeouts
        try:
            self._start()
            while self._running:
                done, _ = await asyncio.wait(
                    self._running, timeout=times.look_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    download = self._running.pop(task)
                    if self._has_succeeded(task, download):
                        return download
                if not self._running:
                    self._start()
                    continue
                ahead = min(self._running.values(), key=lambda download: download.seconds_left)
                look_at(self._places[id(ahead)], ahead)
                now = time.monotonic()
                if self._second is not None and len(self._running) == 1 and now > self._alone[0] + times.alone_seconds:
                    self._compare_alone(ahead)
                elif race_began and self._is_decided(race_began) and ahead.seconds_left < math.inf:
                    self._leave_only(ahead)
                if (
                    not race_began
                    and now - began > times.first_donor_seconds
                    and ahead.seconds_left > times.fast_donor_seconds
                ):
                    race_began = now
                    while self._waiting and len(self._running) < MAX_RUNNING:
                        self._start()
        finally:
            await self._stop([*self._running])
        busy_seconds = min(self._busy_seconds, default=0.0)
        raise NoState(self._reasons, "no peer has it", busy_seconds, self._has_begun)

    def _is_decided(self, race_began: float) -> bool:
        """Whether each donor has had its time, or the race has lasted for too long: one may never send anything."""
        now = time.monotonic()
        had_time = [
            download.began is not None and now > download.began + self._timeouts.race_seconds
            for download in self._downloads
        ]
        return all(had_time) or now > race_began + self._timeouts.longest_race_seconds

    @property
    def _downloads(self) -> list[Download]:
        """The running downloads."""
        return [*self._running.values()]

    def _start(self) -> None:
        if self._waiting:
            download = self._waiting.pop(0)
            download.begin_again()  # silence counts from now on, not from when all downloads were made
            self._alone = time.monotonic(), download.num_bytes
            self._running[asyncio.ensure_future(self._watched(download))] = download

    async def _watched(self, download: Download) -> None:
        """Pull a download until it is complete.

        Raises:
            RoundFailed: its donor is lost or too slow, or the pull has failed
        """
        pulling = asyncio.ensure_future(self._pull(download).run())
        lost = asyncio.ensure_future(self._until_lost(download.donor))
        try:
            while not pulling.done():
                await asyncio.wait(
                    [pulling, lost], timeout=self._timeouts.look_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if not pulling.done():
                    if lost.done():
                        raise RoundFailed(f"{download.donor} fell silent")
                    download.judge()
            pulling.result()
        finally:
            for task in (pulling, lost):
                task.cancel()
            await asyncio.gather(pulling, lost, return_exceptions=True)

    def _has_succeeded(self, task: asyncio.Task, download: Download) -> bool:
        try:
            task.result()
            return True
        except Busy as busy:
            self._busy_seconds.append(busy.seconds)
        except RoundFailed as error:
            self._reasons[download.donor] = str(error)
            self._keep(download)
        return False

    def _keep(self, download: Download) -> None:
        if download.offer is not None and download.num_bytes and download.is_sound:
            self._has_begun = True
            self.broken = sorted([*self.broken, download], key=lambda one: one.num_bytes)

    def _leave_only(self, ahead: Download) -> None:
        """Go on with the leading download only. The others wait, the second best first."""
        if len(self._running) == 1:
            return
        others = sorted(self._downloads, key=lambda download: download.seconds_left)
        others.remove(ahead)
        self._race_rate = ahead.bytes_per_second + sum(download.bytes_per_second for download in others)
        if others[0].seconds_left < math.inf and ahead.seconds_left > 2 * self._timeouts.alone_seconds:
            self._second = others[0]
        for download in others:
            self._set_aside(download)
        self._waiting.sort(key=lambda download: download.seconds_left)
        self._alone = time.monotonic(), ahead.num_bytes

    def _compare_alone(self, running: Download) -> None:
        """Go on with the running download or with another one, now that its rate without rivals is known."""
        since, num_bytes = self._alone
        rate = (running.num_bytes - num_bytes) / (time.monotonic() - since)
        self._alone_rates[id(running)] = max(rate, 1.0)
        second = self._second
        if running is not second:
            if rate < ENOUGH * self._race_rate and second in self._waiting:
                self._change_to(second)
            else:
                self._second = None
            return
        self._second = None
        for first in self._waiting:
            if id(first) in self._alone_rates and self._seconds_alone(first) < self._seconds_alone(second):
                self._change_to(first)
                return

    def _seconds_alone(self, download: Download) -> float:
        return (download.offer.num_bytes - download.num_bytes) / self._alone_rates[id(download)]

    def _change_to(self, other: Download) -> None:
        for download in self._downloads:
            self._set_aside(download)
        self._waiting.remove(other)
        self._waiting.insert(0, other)
        self._start()

    def _set_aside(self, download: Download) -> None:
        """Stop a download for now. It can go on later with what has arrived."""
        (task,) = (task for task, one in self._running.items() if one is download)
        del self._running[task]
        task.cancel()
        self._waiting.insert(0, download)

    async def _stop(self, tasks: Sequence[asyncio.Task]) -> None:
        for task in tasks:
            self._keep(self._running[task])
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
