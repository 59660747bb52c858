"""The addresses and ports of this machine."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def own_addresses() -> list[str]:
    """IP addresses of this machine, loopback first, IPv4 before IPv6; without those that end at its own cable."""
    names = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    found = [ip for ip in map(_address, names) if ip is not None and not (ip.version == 6 and ip.is_link_local)]
    return [str(ip) for ip in sorted(found, key=lambda ip: (not ip.is_loopback, ip.version))]


def own_host_towards(host: str) -> str | None:
    """This machine's own IPv4 address, as a host of its network sees it; nothing is sent. None: it has no way there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def has_ipv6() -> bool:
    """Whether another machine could call this one by IPv6, as far as this one knows."""
    return any(":" in address and address != "::1" for address in own_addresses())


def every_host() -> list[str]:
    """What to listen on to be called at any address."""
    return ["0.0.0.0", "::"] if has_ipv6() else ["0.0.0.0"]


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return probe.getsockname()[1]


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for that of a network card."""
    try:
        return ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
