"""The addresses and ports of this machine."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def own_addresses() -> list[str]:
    """IP addresses of this machine: loopback first, IPv4 before IPv6, without link-local addresses of IPv6."""
    names = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    found = [ip for ip in map(_address, names) if ip is not None and not (ip.version == 6 and ip.is_link_local)]
    return [str(ip) for ip in sorted(found, key=lambda ip: (not ip.is_loopback, ip.version))]


def own_host_towards(host: str) -> str | None:
    """This machine's own IPv4 address, as a host of its network sees it; None if there is no route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # for UDP this only chooses a route; the port does not matter
        except OSError:
            return None
        return probe.getsockname()[0]


def has_ipv6() -> bool:
    """Whether another machine could call this one by IPv6, as far as this one knows."""
    return any(":" in address and address != "::1" for address in own_addresses())


def every_host() -> list[str]:
    """The addresses to listen on so that peers can call any address of this machine."""
    return ["0.0.0.0", "::"] if has_ipv6() else ["0.0.0.0"]


def free_port() -> int:
    """A TCP port on which no program listens."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return probe.getsockname()[1]


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address in a name that psutil gives, without a zone; None if the name is a network card's MAC address."""
    try:
        return ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
