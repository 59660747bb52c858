"""A home behind a router, in network namespaces of this machine: real interfaces, real address translation.

    home 10.77.0.2 ── 10.77.0.1 router 11.77.0.2 ── 11.77.0.1 internet

Needs root, iproute2 and nftables. Nothing outside the namespaces is touched, and they vanish with the context.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000  # linux/sched.h

# libp2p does not route addresses of documentation or benchmark ranges, so these look public; they end at the router.
INTERNET_IP, ROUTER_IP, HOME_IP = "11.77.0.1", "11.77.0.2", "10.77.0.2"


def why_not() -> str | None:
    """The reason why no namespace can be made here, or None."""
    missing = [program for program in ("ip", "nft") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} missing: install iproute2 and nftables"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"probe-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    ruled = subprocess.run(
        ["ip", "netns", "exec", probe, "nft", "add", "table", "ip", "nat"], capture_output=True, text=True
    )
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return f"nftables does not work: {ruled.stderr.strip()}" if ruled.returncode else None


@dataclass(frozen=True)
class Home:
    """Prefixes of commands that run there.

    Args:
        internet: where everybody can be called
        home: behind the router
    """

    internet: tuple[str, ...]
    home: tuple[str, ...]
    router: tuple[str, ...]

    def forward(self, port: int) -> None:
        """Map a TCP port of the router to the machine at home."""
        rule = f"add rule ip nat prerouting tcp dport {port} dnat to {HOME_IP}:{port}"
        subprocess.run([*self.router, "nft", *rule.split()], check=True)


def enter(prefix: tuple[str, ...]) -> None:
    """Move this process, which has one thread yet, to where commands with this prefix run."""
    namespace = os.open(f"/run/netns/{prefix[-1]}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns to {prefix[-1]} failed")
    os.close(namespace)


@contextlib.contextmanager
def home_behind_router() -> Iterator[Home]:
    """Two networks and a router that translates addresses between them."""
    mark = uuid.uuid4().hex[:6]
    names = [f"{part}-{mark}" for part in ("internet", "router", "home")]
    internet, router, home = (("ip", "netns", "exec", name) for name in names)
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _connect(names[0], f"{INTERNET_IP}/24", names[1], f"{ROUTER_IP}/24")
        _connect(names[1], "10.77.0.1/24", names[2], f"{HOME_IP}/24")
        _run("ip", "-n", names[2], "route", "add", "default", "via", "10.77.0.1")
        _run(*router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for rule in (
            "add table ip nat",
            "add chain ip nat postrouting { type nat hook postrouting priority 100 ; }",
            "add chain ip nat prerouting { type nat hook prerouting priority -100 ; }",
            f"add rule ip nat postrouting ip saddr 10.77.0.0/24 ip daddr {INTERNET_IP}/24 masquerade",
        ):
            _run(*router, "nft", rule)
        yield Home(internet, home, router)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _connect(one: str, one_address: str, other: str, other_address: str) -> None:
    """A cable between two namespaces."""
    ends = [f"v{uuid.uuid4().hex[:8]}" for _ in range(2)]
    _run("ip", "link", "add", ends[0], "netns", one, "type", "veth", "peer", "name", ends[1], "netns", other)
    for end, name, address in zip(ends, (one, other), (one_address, other_address), strict=True):
        _run("ip", "-n", name, "address", "add", address, "dev", end)
        _run("ip", "-n", name, "link", "set", end, "up")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
