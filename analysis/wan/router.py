"""The user-space router: moves packets from one host's link to another's, with the delays of the topology.

    python -m analysis.wan.router TOPOLOGY.json REPORT.jsonl      # started by the lab, inside its namespaces

A packet waits for its sender's uplink, for the path's own rate, for the path's delay, and for its receiver's downlink.
Each wait for a link is a queue; it drops packets that would have to wait longer than `queue_ms`. Once a second, a line
is added to the report: packets, drops, how late packets left, and the processor time that the router has used so far.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
import json
import math
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path as File

from analysis.wan.segments import IP, VNET, is_large_tcp, part, wire_size
from analysis.wan.topology import Host, Path, Topology

READY = "ready"
"""Word that the router prints when it is ready to see every packet."""
LATE_MS, VERY_LATE_MS = 1.0, 5.0
"""Delays beyond the due time from which packets are counted as `late` and `very_late`."""
_SOL_PACKET, _PACKET_STATISTICS, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 6, 15, 23  # linux/if_packet.h
_ETH_P_ALL, _ETH_P_IP = 3, b"\x08\x00"
_SO_TIMESTAMPNS, _SO_RCVBUFFORCE = 35, 33  # asm-generic/socket.h
_TIME = struct.Struct("@qq")
_LARGEST_FRAME = 70_000
_RECEIVE_BUFFER_BYTES = 64 << 20
_BATCH = 64
_REPORT_SECONDS = 1.0


class Pipe:
    """A link with a rate and a queue, which sends one packet after another.

    Args:
        mbps: rate in Mbit/s, None for unlimited.
        queue_ms: longest wait; packets that would wait longer are dropped.
    """

    def __init__(self, mbps: float | None, queue_ms: float) -> None:
        self.ns_per_byte = 0.0 if mbps is None else 8_000 / mbps
        self.queue_ns = int(queue_ms * 1e6)
        self.free_at = 0

    def send(self, now: int, size: int) -> int | None:
        """The time at which a packet's last byte leaves, or None if the queue is full; times in ns, size in bytes."""
        begin = max(now, self.free_at)
        if begin - now > self.queue_ns:
            return None
        self.free_at = begin + int(size * self.ns_per_byte)
        return self.free_at


class Route:
    """One direction between two hosts: the path's rate, delay, jitter and loss."""

    def __init__(self, path: Path, queue_ms: float, seed: int) -> None:
        self.pipe = Pipe(path.bandwidth_mbps, queue_ms)
        self.delay_ns, self.jitter_ns = int(path.delay_ms * 1e6), path.jitter_ms * 1e6
        self.loss = path.loss
        self._random = random.Random(seed)
        self._last = 0
        self._until_loss = self._draw()

    def arrival(self, departure: int) -> int:
        """The time at which a packet that leaves at `departure` arrives; packets do not overtake each other."""
        delay = self.delay_ns
        if self.jitter_ns:
            delay = max(0, int(self._random.gauss(delay, self.jitter_ns)))
        self._last = max(self._last, departure + delay)
        return self._last

    def lost(self, segments: int) -> list[int]:
        """Indices of the lost ones among the next segments."""
        found = []
        # `_until_loss` counts segments from the first of this packet to the next lost one.
        while self._until_loss < segments:
            found.append(self._until_loss)
            self._until_loss += 1 + self._draw()
        self._until_loss -= segments
        return found

    def _draw(self) -> int | float:
        """Number of segments before the next lost one: geometrically distributed."""
        return int(math.log(1 - self._random.random()) / math.log(1 - self.loss)) if self.loss else math.inf


class Port:
    """The router's end of a host's link."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.up, self.down = Pipe(host.up_mbps, host.queue_ms), Pipe(host.down_mbps, host.queue_ms)
        self.routes: list[Route] = []
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.socket.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        self.socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        for option in (socket.SO_RCVBUF, _SO_RCVBUFFORCE):  # the second needs root and has no limit
            with contextlib.suppress(PermissionError):
                self.socket.setsockopt(socket.SOL_SOCKET, option, _RECEIVE_BUFFER_BYTES)
        self.socket.setblocking(False)
        self.socket.bind((host.name, 0))

    def overflows(self) -> int:
        """Number of frames that the kernel dropped since the last call, because this program did not take them in
        time."""
        return struct.unpack("II", self.socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))[1]


class Router:
    """Moves packets until it is asked to stop.

    Args:
        topology: hosts and paths.
        report: file to which a line is added every second.
    """

    def __init__(self, topology: Topology, report: File) -> None:
        self.ports = [Port(host) for host in topology.hosts]
        for source in self.ports:
            for target in self.ports:
                path = topology.path(source.host, target.host)
                seed = source.host.number << 16 | target.host.number
                source.routes.append(Route(path, source.host.queue_ms, seed))
        self.by_socket = {port.socket.fileno(): port for port in self.ports}
        self.events: list[tuple[int, int, Port, bytes, int]] = []  # time, order, target, frame, size (0: leaves now)
        self.order = itertools.count()
        self.stopped = False
        self.counts = {"packets": 0, "lost": 0, "queue_drops": 0, "send_drops": 0}
        self.lateness: list[int] = []
        self.report = report.open("a", buffering=1)
        self.report_at = 0.0

    def run(self) -> None:
        """Route until `stop` is called."""
        while not self.stopped:
            timeout = self.report_at - time.monotonic()
            if self.events:
                timeout = min(timeout, (self.events[0][0] - time.time_ns()) / 1e9)
            readable, _, _ = select.select(self.by_socket, (), (), max(0.0, timeout))
            for number in readable:
                self._receive(self.by_socket[number])
            self._move()
            if time.monotonic() >= self.report_at:
                self._write_report()

    def stop(self, *_: object) -> None:
        """End `run` after the next packet or second; a signal handler."""
        self.stopped = True

    def _receive(self, source: Port) -> None:
        for _ in range(_BATCH):
            try:
                frame, extra, _, _ = source.socket.recvmsg(_LARGEST_FRAME, 64)
            except BlockingIOError:
                return
            except OSError:  # the host's link was removed: the lab is closing
                return
            number = frame[VNET.size + 5] - 1
            if frame[IP - 2 : IP] != _ETH_P_IP or number >= len(self.ports) or frame[VNET.size] != 2:
                continue  # not for a host of the lab
            seconds, nanoseconds = _TIME.unpack(extra[0][2]) if extra else divmod(time.time_ns(), 10**9)
            self._take(source, source.routes[number], self.ports[number], frame, seconds * 10**9 + nanoseconds)

    def _take(self, source: Port, route: Route, target: Port, frame: bytes, now: int) -> None:
        """Take a packet from the sender, and schedule its arrival at the far end of the path."""
        segments, size = wire_size(frame)
        departure = source.up.send(now, size)
        if departure is not None:
            departure = route.pipe.send(departure, size)
        if departure is None:
            self.counts["queue_drops"] += segments
            return
        arrival = route.arrival(departure)
        frames = [(frame, size)]
        if route.loss and (lost := route.lost(segments)):
            self.counts["lost"] += len(lost)
            frames = [(piece, wire_size(piece)[1]) for piece in _survivors(frame, segments, lost)]
        for piece, length in frames:
            heapq.heappush(self.events, (arrival, next(self.order), target, piece, length))

    def _move(self) -> None:
        """Move all due packets: from the path into the downlink, or out of it."""
        events = self.events
        now = time.time_ns()
        while events and events[0][0] <= now:
            due, order, target, frame, size = heapq.heappop(events)
            if size:
                leaves = target.down.send(due, size)
                if leaves is None:
                    self.counts["queue_drops"] += wire_size(frame)[0]
                    continue
                if leaves > now:
                    heapq.heappush(events, (leaves, order, target, frame, 0))
                    continue
                due = leaves
            try:
                target.socket.send(frame)
            except OSError:
                self.counts["send_drops"] += 1
            now = time.time_ns()
            self.counts["packets"] += 1
            self.lateness.append(now - due)

    def _write_report(self) -> None:
        self.report_at = time.monotonic() + _REPORT_SECONDS
        late = sorted(self.lateness)
        self.lateness = []
        late_ms = {f"late_p{p}_ms": round(late[len(late) * p // 100] / 1e6, 3) if late else 0.0 for p in (50, 99)}
        self.counts["overflows"] = self.counts.get("overflows", 0) + sum(port.overflows() for port in self.ports)
        line = {"time": time.time(), "cpu_seconds": round(time.process_time(), 4), "sent": len(late), **late_ms}
        line["late_max_ms"] = round(late[-1] / 1e6, 3) if late else 0.0
        for name, limit_ms in (("late", LATE_MS), ("very_late", VERY_LATE_MS)):
            line[name] = sum(value > limit_ms * 1e6 for value in late)
        self.report.write(json.dumps(line | self.counts) + "\n")


def _survivors(frame: bytes, segments: int, lost: list[int]) -> list[bytes]:
    """The parts of a packet that remain without the lost segments."""
    if segments == 1 or not is_large_tcp(frame):
        return []
    edges = [-1, *lost, segments]
    return [part(frame, a + 1, b) for a, b in itertools.pairwise(edges) if b > a + 1]


def _hurry() -> str:
    """Raises this process's priority over programs that compute, as far as allowed; returns the kind of priority."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
        return "real-time"
    with contextlib.suppress(OSError):
        os.nice(-20)
        return "nice -20"
    return "normal"


def main() -> None:
    """Routes until SIGTERM."""
    topology, report = Topology.from_json(File(sys.argv[1]).read_text()), File(sys.argv[2])
    router = Router(topology, report)
    signal.signal(signal.SIGTERM, router.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the lab, which ends the router last
    gc.disable()  # there are no reference cycles, and a collection would make packets late
    print(READY, _hurry(), flush=True)
    router.run()


if __name__ == "__main__":
    main()
