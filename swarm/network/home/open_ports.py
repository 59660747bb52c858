"""Ports that the home router opens for this peer: leased, renewed as long as the peer runs, and closed when it ends."""

from __future__ import annotations

import asyncio
import random
import threading

from hivemind.utils import get_logger

from swarm.network.home.router import PortTaken, Router, RouterRefuses
from swarm.network.home.search import find_router
from swarm.runtime.timeouts import seconds_since_boot

logger = get_logger(__name__)

LEASE_SECONDS = 3600
"""Length of a lease. If the peer is killed, its port stays open for at most so long."""
RENEWALS_PER_LEASE, SHORTEST_PAUSE_SECONDS = 3, 20.0
"""How often a lease is renewed before it would end, and the shortest pause between two renewals."""
LOOK_SECONDS = 15.0
"""Time between two looks at the clock. A wait does not count the time for which the machine sleeps; the router does."""
CALL_SECONDS = 1.5
"""Time limit for each request to the router."""
OTHER_PORTS, NUM_OTHERS = range(20_000, 60_000), 2
"""Ports to choose from, and how many are tried, where another machine at home has the wanted one."""


class OpenPorts:
    """The ports that a router has opened for this peer.

    Args:
        router: the router that opens them
        shortest_pause_seconds: pause between renewals, however short a lease the router gives
    """

    def __init__(self, router: Router, shortest_pause_seconds: float = SHORTEST_PAUSE_SECONDS):
        self._router, self._shortest_pause_seconds = router, shortest_pause_seconds
        self._opened: dict[int, tuple[int, int]] = {}
        """By port of this machine: the router's port, and the seconds of its lease."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep_open, name="open-ports", daemon=True)

    @property
    def host(self) -> str:
        """Address on the internet that the router says it has. It is not measured."""
        return self._router.external_host

    @property
    def ports(self) -> dict[int, int]:
        """The router's ports, by port of this machine."""
        return {port: outside for port, (outside, _) in self._opened.items()}

    async def open(self, port: int, may_differ: bool = True) -> int:
        """Open a port of the router, with the same number if possible.

        Args:
            port: port of this machine
            may_differ: whether another number will do

        Returns:
            the router's port

        Raises:
            RouterRefuses: it opens none
        """
        others = random.sample(OTHER_PORTS, NUM_OTHERS) if may_differ else []
        for wanted in (port, *others):
            try:
                outside, seconds = await self._call(self._router.open(port, wanted, LEASE_SECONDS))
            except PortTaken:
                continue
            if outside != port and not may_differ:
                await self._call(self._router.close(port, outside))
                break
            with self._lock:
                self._opened[port] = outside, min(seconds, LEASE_SECONDS)
            return outside
        raise RouterRefuses(f"port {port} is taken there")

    def open_same(self, port: int) -> bool:
        """Open a port of the router with the same number; return whether that succeeded."""
        try:
            asyncio.run(self.open(port, may_differ=False))
        except RouterRefuses as why:
            logger.debug(f"the router does not open port {port}: {why}")
            return False
        return True

    def keep(self) -> None:
        """Renew the leases from now on, in a thread."""
        self._keeper.start()

    def close(self) -> None:
        """Close all ports, in a few seconds at most. Never raises: a port that stays open ends with its lease."""
        self._closed.set()
        if self._keeper.is_alive():
            self._keeper.join(2 * CALL_SECONDS)  # it ends with the request that it is making
        # In a thread of its own: this one may have an event loop, as in a notebook, and `asyncio.run` refuses that.
        closing = threading.Thread(target=lambda: asyncio.run(self.close_all()), name="close-ports")
        closing.start()
        closing.join()

    async def close_all(self) -> None:
        """As `close`, where `keep` was not called yet."""
        with self._lock:
            opened, self._opened = self._opened, {}
        for port, (outside, _) in opened.items():
            try:
                await self._call(self._router.close(port, outside))
            except RouterRefuses as why:
                logger.debug(f"the router does not close port {outside}: {why}")

    def _keep_open(self) -> None:
        in_trouble: set[int] = set()
        renewed_at = seconds_since_boot()
        while not self._closed.wait(min(LOOK_SECONDS, max(0.01, self._seconds_left(renewed_at)))):
            if self._seconds_left(renewed_at) > 0:
                continue
            renewed_at = seconds_since_boot()
            for port, (outside, _) in list(self._opened.items()):
                if self._closed.is_set():
                    return
                try:
                    got, _ = asyncio.run(self._call(self._router.open(port, outside, LEASE_SECONDS)))
                    trouble = "" if got == outside else f"it opened port {got}"
                except RouterRefuses as why:
                    trouble = str(why)
                if not trouble:
                    in_trouble.discard(port)
                elif port not in in_trouble:
                    in_trouble.add(port)
                    logger.warning(f"The router no longer opens port {outside} for this peer ({trouble}).")

    def _seconds_left(self, renewed_at: float) -> float:
        """Seconds until the leases have to be renewed."""
        return renewed_at + self._pause_seconds() - seconds_since_boot()

    def _pause_seconds(self) -> float:
        shortest = min((seconds for _, seconds in list(self._opened.values())), default=LEASE_SECONDS)
        return max(shortest / RENEWALS_PER_LEASE, self._shortest_pause_seconds)

    @staticmethod
    async def _call(wish):
        try:
            return await asyncio.wait_for(wish, CALL_SECONDS)
        except TimeoutError:
            raise RouterRefuses("it does not answer in time") from None


async def open_port(port: int) -> OpenPorts | None:
    """Ask the home router to open a port, under any number; None if no router that opens ports was found.

    Raises:
        RouterRefuses: there is such a router, and it does not open this one
    """
    if (router := await find_router()) is None:
        return None
    opened = OpenPorts(router)
    await opened.open(port)
    return opened
