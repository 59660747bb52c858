"""A home behind a router, in network namespaces of this machine: real interfaces, real address translation.

    home 10.77.0.2 ── 10.77.0.1 router 11.77.0.2 ── 11.77.0.1 internet

Needs root, iproute2 and nftables. Nothing outside the namespaces is touched, and they vanish with the context.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CLONE_NEWNET = 0x40000000  # linux/sched.h

# libp2p does not route addresses of documentation or benchmark ranges, so these look public; they end at the router.
INTERNET_IP, ROUTER_IP, HOME_IP = "11.77.0.1", "11.77.0.2", "10.77.0.2"
INTERNET_IPV6, HOME_IPV6 = "2a00:77::1", "2a00:77::2"
_UPNP_TABLE = """
add table inet upnp
add chain inet upnp forward { type filter hook forward priority 0; }
add chain inet upnp prerouting { type nat hook prerouting priority -100; }
add chain inet upnp postrouting { type nat hook postrouting priority 100; }
"""
_UPNP_SETTINGS = f"""
listening_ip=10.77.0.1
ext_ip={ROUTER_IP}
port=0
secure_mode=yes
uuid=00000000-0000-0000-0000-000000000001
upnp_table_name=upnp
upnp_nat_table_name=upnp
upnp_forward_chain=forward
upnp_nat_chain=prerouting
upnp_nat_postrouting_chain=postrouting
"""


def why_not() -> str | None:
    """Return the reason why no namespace can be made here, or None."""
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
    """Prefixes of commands that run in each part of the network.

    Args:
        internet: a host that every other host can call
        home: behind the router
    """

    internet: tuple[str, ...]
    home: tuple[str, ...]
    router: tuple[str, ...]

    def forward(self, port: int) -> None:
        """Map a TCP port of the router to the machine at home."""
        rule = f"add rule ip nat prerouting tcp dport {port} dnat to {HOME_IP}:{port}"
        subprocess.run([*self.router, "nft", *rule.split()], check=True)

    @contextlib.contextmanager
    def opens_ports(self, folder: Path, protocol: str, ports: str = "1024-65535") -> Iterator[None]:
        """Run a router that opens ports on request, as long as the `with` block lasts.

        Args:
            folder: for its files
            protocol: "upnp" or "natpmp"
            ports: the router's ports that it opens
        """
        _run(*self.router, "nft", "-f", "-", input=_UPNP_TABLE)
        settings = folder / "miniupnpd.conf"
        settings.write_text(
            f"ext_ifname={_interface(self.router, ROUTER_IP)}\n"
            f"enable_upnp={_yes(protocol == 'upnp')}\nenable_natpmp={_yes(protocol == 'natpmp')}\n{_UPNP_SETTINGS}"
            f"allow {ports} 10.77.0.0/24 1024-65535\ndeny 0-65535 0.0.0.0/0 0-65535\n"
        )
        command = [*self.router, "miniupnpd", "-d", "-f", str(settings), "-P", str(folder / "miniupnpd.pid")]
        with (folder / "miniupnpd.log").open("w+b") as log, subprocess.Popen(command, stderr=log, stdout=log) as daemon:
            try:
                _wait_for(folder / "miniupnpd.log", b"istening", daemon)
                yield
            finally:
                daemon.terminate()

    def opened(self) -> list[str]:
        """The targets of the ports that the router has opened by itself."""
        command = [*self.router, "nft", "list", "chain", "inet", "upnp", "prerouting"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return re.findall(r"th dport (\d+) .*dnat ip to ([\d.]+:\d+)", listed)


def enter(prefix: tuple[str, ...]) -> None:
    """Move this process, which has only one thread yet, to the namespace where commands with this prefix run."""
    namespace = os.open(f"/run/netns/{prefix[-1]}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns to {prefix[-1]} failed")
    os.close(namespace)


@contextlib.contextmanager
def home_behind_router(masquerade: str = "masquerade") -> Iterator[Home]:
    """Make two networks and a router that translates addresses between them.

    Args:
        masquerade: how it translates; "masquerade fully-random" takes another port for each connection
    """
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
            f"add rule ip nat postrouting ip saddr 10.77.0.0/24 ip daddr {INTERNET_IP}/24 {masquerade}",
        ):
            _run(*router, "nft", rule)
        yield Home(internet, home, router)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextlib.contextmanager
def two_by_ipv6() -> Iterator[Home]:
    """Make an internet and a home that have IPv6 addresses only, without address translation."""
    mark = uuid.uuid4().hex[:6]
    names = [f"{part}-{mark}" for part in ("internet", "home")]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _connect(names[0], f"{INTERNET_IPV6}/64", names[1], f"{HOME_IPV6}/64", "nodad")
        internet, home = (("ip", "netns", "exec", name) for name in names)
        yield Home(internet, home, home)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _interface(prefix: tuple[str, ...], address: str) -> str:
    """Return the network interface that has an address."""
    found = subprocess.run([*prefix, "ip", "-json", "address"], check=True, capture_output=True, text=True).stdout
    return next(
        card["ifname"] for card in json.loads(found) for own in card["addr_info"] if own.get("local") == address
    )


def _yes(wanted: bool) -> str:
    return "yes" if wanted else "no"


def _wait_for(log: Path, words: bytes, program: subprocess.Popen, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while words not in log.read_bytes():
        assert program.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def _connect(one: str, one_address: str, other: str, other_address: str, *flags: str) -> None:
    """Connect two namespaces by a cable."""
    ends = [f"v{uuid.uuid4().hex[:8]}" for _ in range(2)]
    _run("ip", "link", "add", ends[0], "netns", one, "type", "veth", "peer", "name", ends[1], "netns", other)
    for end, name, address in zip(ends, (one, other), (one_address, other_address), strict=True):
        _run("ip", "-n", name, "address", "add", address, "dev", end, *flags)
        _run("ip", "-n", name, "link", "set", end, "up")


def _run(*command: str, **options: Any) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, **options)
