"""Looks for the home router, by UPnP and NAT-PMP at the same time."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from pathlib import Path

from swarm.network.home.interfaces import own_host_towards
from swarm.network.home.nat_pmp import NatPmpRouter
from swarm.network.home.router import Router

FIND_SECONDS = 2.5
"""Time limit of the whole search, which takes 1.2 s where no router answers. p2pd starts meanwhile."""
_ROUTES = Path("/proc/net/route")
_HAS_GATEWAY = 0x2  # linux/route.h, RTF_GATEWAY


async def find_router() -> Router | None:
    """The default gateway of this machine, if it opens ports; None if not, or if this machine is not behind one."""
    from swarm.network.home.upnp import UpnpRouter  # takes 0.3 s

    gateway = default_gateway()
    own_host = None if gateway is None else own_host_towards(gateway)
    if own_host is None or ipaddress.ip_address(own_host).is_global:
        return None
    searches = [asyncio.create_task(kind.find(gateway, own_host)) for kind in (NatPmpRouter, UpnpRouter)]
    try:
        async with asyncio.timeout(FIND_SECONDS):
            for search in asyncio.as_completed(searches):
                if (router := await search) is not None:
                    return router
    except TimeoutError:
        pass
    finally:
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
    return None


def default_gateway(routes: Path = _ROUTES) -> str | None:
    """IPv4 address of the router that leads to the internet; None if there is none, or the system is not Linux."""
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return None
    leading_out = [row for row in rows if row[1] == row[7] == "00000000" and int(row[3], 16) & _HAS_GATEWAY]
    if not leading_out:
        return None
    best = min(leading_out, key=lambda row: int(row[6]))  # metric
    return socket.inet_ntoa(struct.pack("=L", int(best[2], 16)))
