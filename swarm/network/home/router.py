"""What is asked of the router of a home, whatever protocol it speaks.

What it answers is read with bounds and never believed: whether others can call this machine is measured.
"""

from __future__ import annotations

from typing import Protocol


class RouterRefuses(Exception):  # noqa: N818
    """The end of a sentence: why a router does not open a port."""


class PortTaken(RouterRefuses):
    """Another port might be free."""


class Router(Protocol):
    """One that can open TCP ports."""

    external_host: str
    """IPv4 address that it says it has on the internet."""

    async def open(self, port: int, external_port: int, lease_seconds: int) -> tuple[int, int]:
        """Let others call a port of this machine; the same again renews the lease.

        Args:
            port: of this machine
            external_port: of the router, as wanted

        Returns:
            the router's port, and for how many seconds it stays open

        Raises:
            RouterRefuses: it does not, or does not answer
        """

    async def close(self, port: int, external_port: int) -> None:
        """Raises RouterRefuses: it does not, or does not answer"""
