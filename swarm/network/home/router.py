"""The interface to a home router, whatever protocol it speaks.

Its answers are read with bounds and never believed: whether other peers can call this machine is measured.
"""

from __future__ import annotations

from typing import Protocol


class RouterRefuses(Exception):  # noqa: N818
    """A router does not open or close a port. The text says why, as the end of a sentence."""


class PortTaken(RouterRefuses):
    """The wanted port is taken; another might be free."""


class Router(Protocol):
    """A router that can open TCP ports."""

    external_host: str
    """IPv4 address that it says it has on the internet."""

    async def open(self, port: int, external_port: int, lease_seconds: int) -> tuple[int, int]:
        """Open a port of the router that leads to a port of this machine. The same call again renews the lease.

        Args:
            port: port of this machine
            external_port: wanted port of the router
            lease_seconds: wanted length of the lease

        Returns:
            the router's port, and for how many seconds it stays open

        Raises:
            RouterRefuses: it does not, or does not answer
        """

    async def close(self, port: int, external_port: int) -> None:
        """Close a port of the router.

        Raises:
            RouterRefuses: it does not, or does not answer
        """
