"""A lab: hosts connected by an emulated internet, for the length of a `with` block.

with Lab(uniform(3, rtt_ms=100, bandwidth_mbps=100), folder) as lab:
    lab.start(lab.hosts[0], ["ping", lab.hosts[1].address])
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path as File
from typing import Any, Literal

from analysis.wan import netem, router, sandbox
from analysis.wan.topology import Host, Topology
from recipe.errors import InputError

Backend = Literal["router", "netem"]
TOPOLOGY = "topology.json"
"""Name of the topology's file in the folder of a lab."""
TCP_BUFFER_BYTES = 64 << 20
"""Largest TCP window of a host. The link has to be the limit, as on a machine that was tuned for long distances."""
_PACKET_MS = 2.0
"""Longest time, in ms, that a packet which the kernel has not yet segmented may occupy an uplink."""
_SMALLEST_LARGE_PACKET, _LARGEST_PACKET = 3_000, 65_536


class Lab:
    """Network namespaces h1, h2, …, each with one link, and a router or netem that delays packets between them.

    Args:
        topology: hosts and paths.
        folder: folder for `router.jsonl` and `topology.json`.
        backend: router (ours, with which all of the report was measured), or netem (the kernel's).
        congestion_control: TCP's algorithm on all hosts; None for the machine's default.

    Raises:
        InputError: the kernel lacks netem for that backend, or the congestion control.
    """

    def __init__(
        self, topology: Topology, folder: File, backend: Backend = "router", congestion_control: str | None = None
    ) -> None:
        assert sandbox.is_inside(), "sandbox.enter() comes first"
        self.topology, self.folder, self.hosts = topology, folder, topology.hosts
        self.backend = backend
        if backend == "netem" and not netem.is_available():
            raise InputError("This kernel has no netem (sch_netem): leave out --backend, or give --backend router.")
        self.congestion_control = congestion_control
        self.report = folder / "router.jsonl"
        self._router: subprocess.Popen | None = None
        self._commands: list[subprocess.Popen] = []

    def __enter__(self) -> Lab:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / TOPOLOGY).write_text(self.topology.to_json())
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def _build(self) -> None:
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")  # `ip netns` keeps its names there; visible in this lab only
        File("/run/netns").mkdir()
        _run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")  # shared memory of killed processes ends with the lab
        _ip(["link set lo up"])
        for host in self.hosts:
            self._add_host(host)
        if self.backend == "netem":
            netem.connect(self.topology)
        else:
            self._start_router()

    def _add_host(self, host: Host) -> None:
        _run("ip", "netns", "add", host.name)
        _ip([f"link add {host.name} type veth peer name eth0 netns {host.name}", f"link set {host.name} up"])
        others = [other for other in self.hosts if other != host]
        _ip(
            [
                "link set lo up",
                f"link set eth0 address {host.mac} gso_max_size {_largest_packet(host.up_mbps)}",
                f"address add {host.address}/24 dev eth0",
                "link set eth0 up",
                *(f"neighbor add {other.address} lladdr {other.mac} dev eth0" for other in others),
            ],
            host,
        )
        settings = {
            "ipv6/conf/all/disable_ipv6": "1",
            "ipv4/tcp_rmem": f"4096 131072 {TCP_BUFFER_BYTES}",
            "ipv4/tcp_wmem": f"4096 131072 {TCP_BUFFER_BYTES}",
            "ipv4/tcp_no_metrics_save": "1",  # a connection must not use what an earlier one learned
        }
        lines = [f"test ! -e {_SYSCTL / name} || echo {value} > {_SYSCTL / name}" for name, value in settings.items()]
        _run(*inside(host, ["sh", "-e", "-c", "\n".join(lines)]))
        if self.congestion_control:
            self._set_congestion_control(host)
        if (own := _SYSCTL / f"ipv6/conf/{host.name}/disable_ipv6").exists():
            own.write_text("1")

    def _set_congestion_control(self, host: Host) -> None:
        setting = _SYSCTL / "ipv4/tcp_congestion_control"
        command = inside(host, ["sh", "-c", f"echo {shlex.quote(self.congestion_control)} > {setting}"])
        if subprocess.run(command, capture_output=True).returncode:
            known = set((_SYSCTL / "ipv4/tcp_available_congestion_control").read_text().split())
            raise InputError(
                f"This kernel does not give {self.congestion_control} to a namespace: leave out --congestion-control, "
                f"or give {' or '.join(sorted(known - {self.congestion_control}))}."
            )

    def congestion_control_in_use(self) -> str:
        """TCP's algorithm on the first host, as its kernel reports it; all hosts have the same."""
        command = inside(self.hosts[0], ["cat", str(_SYSCTL / "ipv4/tcp_congestion_control")])
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def _start_router(self) -> None:
        command = [sys.executable, "-m", "analysis.wan.router", str(self.folder / TOPOLOGY), str(self.report)]
        self._router = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
        if not self._router.stdout.readline().startswith(router.READY):
            raise RuntimeError(f"the router ended with status {self._router.wait()}")

    def start(self, host: Host, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Starts a command on a host; `options` are those of `subprocess.Popen`. It is killed when the lab ends."""
        process = subprocess.Popen(inside(host, command), start_new_session=True, **options)
        self._commands.append(process)
        return process

    def unplug(self, host: Host) -> None:
        """Simulates a power cut: no packet reaches the host or leaves it, and no connection is closed."""
        _run("ip", "link", "set", host.name, "down")

    def divide(self, one: Sequence[Host], other: Sequence[Host]) -> None:
        """Divides the network: no packet gets from one side to the other, and no connection is closed."""
        self._set_neighbours(one, other, lambda _: _NOBODY)

    def reunite(self, one: Sequence[Host], other: Sequence[Host]) -> None:
        """Undoes `divide` for these two sides."""
        self._set_neighbours(one, other, lambda host: host.mac)

    def _set_neighbours(self, one: Sequence[Host], other: Sequence[Host], mac: Callable[[Host], str]) -> None:
        for near, far in ((one, other), (other, one)):
            for host in near:
                _ip([f"neighbor replace {to.address} lladdr {mac(to)} dev eth0" for to in far if to != host], host)

    def slow_down(self, host: Host, mbps: float) -> None:
        """Limits both directions of the host's link to a rate below that of the topology."""
        shape = ["root", "tbf", "rate", f"{mbps}mbit", "burst", "4kb", "latency", "200ms"]
        _run("tc", "qdisc", "replace", "dev", host.name, *shape)
        _run(*inside(host, ["tc", "qdisc", "replace", "dev", "eth0", *shape]))

    def speed_up(self, host: Host) -> None:
        """Undoes `slow_down` for the host."""
        _run("tc", "qdisc", "delete", "dev", host.name, "root")
        _run(*inside(host, ["tc", "qdisc", "delete", "dev", "eth0", "root"]))

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes that each host has sent and received so far, by name. Headers of an unsegmented packet count once."""
        found = subprocess.run(["ip", "-json", "-stats", "link"], capture_output=True, text=True, check=True)
        links = {link["ifname"]: link["stats64"] for link in json.loads(found.stdout)}
        return {host.name: (links[host.name]["rx"]["bytes"], links[host.name]["tx"]["bytes"]) for host in self.hosts}

    def __exit__(self, *_: object) -> None:
        for process in self._commands:
            if process.poll() is None:
                process.kill()
        for process in self._commands:
            process.wait()
        if self._router is not None:
            self._router.terminate()
            self._router.wait()
        self._remove()

    def _remove(self) -> None:
        """Removes links, namespaces and mounts, which the next lab in this process would find; missing ones are
        ignored."""
        for name in (*(host.name for host in self.hosts), netem.BRIDGE):
            subprocess.run(["ip", "link", "delete", name], capture_output=True)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        subprocess.run(["umount", "--lazy", "/run", "/dev/shm"], capture_output=True)


_NOBODY = "02:ff:ff:ff:ff:ff"
_ROOT = File(__file__).parents[2]
_SYSCTL = File("/proc/sys/net")


def inside(host: Host, command: Sequence[str]) -> list[str]:
    """The command that runs this one on a host."""
    return ["nsenter", f"--net=/run/netns/{host.name}", *command]


def _largest_packet(up_mbps: float | None) -> int:
    """Largest packet in bytes that a host sends unsegmented: small on slow uplinks, so that they do not send in
    bursts."""
    if up_mbps is None:
        return _LARGEST_PACKET
    return int(min(max(up_mbps * 1e3 / 8 * _PACKET_MS, _SMALLEST_LARGE_PACKET), _LARGEST_PACKET))


def _ip(lines: list[str], host: Host | None = None) -> None:
    namespace = ["-netns", host.name] if host else []
    _run("ip", *namespace, "-batch", "-", input="\n".join(lines))


def _run(*command: str, **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
