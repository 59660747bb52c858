"""Compares the lab with its settings: ping, TCP goodput, loss, jitter, and the router's own cost."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path as File

from rich.table import Table

from analysis.wan.lab import Backend, Lab
from analysis.wan.probes import READY
from analysis.wan.topology import Topology, uniform
from recipe.errors import InputError
from recipe.run_folder import read_metrics

RTTS_MS = (0, 20, 100, 200, 300)
BANDWIDTHS_MBPS = (10, 100, 1000)
JITTER_MS, LOSS = 5.0, 0.01
RTT_TOLERANCE_MS = 1.0
LEAST_GOODPUT = 0.95
"""Least share of the link's rate that TCP has to reach; TCP and IP headers alone take 3.5 %."""
GOODPUT_RTT_MS = 100
"""Longest round-trip time at which goodput at the highest rate is judged."""
LOSS_TOLERANCE = 0.1
SYMMETRIC, HOME_DOWN, HOME_UP = "equal", "home, from two", "home, up"
HOME_DOWN_MBPS, HOME_UP_MBPS, HOME_RTT_MS = 40, 10, 20
ALTERNATIVES = ("reno", "bbr")
"""TCP's algorithms to try if the machine's own leaves a link idle: the check is of the link, not of TCP."""
_LOSS_PACKETS = 40_000
"""Number of packets. At 1 % loss, one standard deviation of the count is a twentieth of it."""


@dataclass
class Row:
    """Settings and measurements of one link; None for what was not measured."""

    rtt_ms: float
    bandwidth_mbps: float
    jitter_ms: float = 0.0
    loss: float = 0.0
    link: str = SYMMETRIC
    """The kind of link: between equal hosts, or to or from a host at home."""
    ping_median_ms: float | None = None
    ping_max_ms: float | None = None
    measured_jitter_ms: float | None = None
    goodput_mbps: float | None = None
    congestion_control: str | None = None
    """TCP's algorithm that reached the goodput; None for the machine's default."""
    measured_loss: float | None = None
    router_cpu: float | None = None
    """Share of one core that the router used while TCP ran."""
    late_p99_ms: float | None = None
    late_max_ms: float | None = None

    @property
    def problems(self) -> list[str]:
        """Names of the measurements that are out of bounds."""
        found = []
        # three standard errors of the median of 300 times, whose deviation is the square root of 2 times the jitter
        tolerance_ms = RTT_TOLERANCE_MS + 0.3 * self.jitter_ms
        if self.ping_median_ms is not None and abs(self.ping_median_ms - self.rtt_ms) > tolerance_ms:
            found.append("RTT")
        judged = self.bandwidth_mbps < max(BANDWIDTHS_MBPS) or self.rtt_ms <= GOODPUT_RTT_MS
        if self.goodput_mbps is not None and judged and self.goodput_mbps < LEAST_GOODPUT * self.bandwidth_mbps:
            found.append("goodput")
        if self.measured_loss is not None and abs(self.measured_loss - self.loss) > LOSS_TOLERANCE * self.loss:
            found.append("loss")
        return found


def links() -> list[Row]:
    """All links that the check tries."""
    rows = [Row(rtt, bandwidth) for bandwidth in BANDWIDTHS_MBPS for rtt in RTTS_MS]
    rows += [Row(HOME_RTT_MS, HOME_DOWN_MBPS, link=HOME_DOWN), Row(HOME_RTT_MS, HOME_UP_MBPS, link=HOME_UP)]
    return [*rows, Row(100, 100, jitter_ms=JITTER_MS), Row(100, 100, loss=LOSS)]


def measure(
    rows: list[Row], folder: File, backend: Backend, congestion_control: str | None, seconds: float
) -> Iterator[Row]:
    """Measures one link after the other, and yields each.

    Args:
        rows: settings of the links; measurements are filled in.
        folder: folder for the router's reports.
        backend: see `Lab`.
        congestion_control: see `Lab`.
        seconds: length of each TCP measurement, after slow start.
    """
    for number, row in enumerate(rows):
        for control in [congestion_control] if congestion_control else [None, *ALTERNATIVES]:
            try:
                _measure_link(row, folder / f"link-{number}-{control}", backend, control, seconds)
            except InputError:
                if control is None or congestion_control:
                    raise
            if "goodput" not in row.problems:
                break
        yield row


def _measure_link(row: Row, folder: File, backend: Backend, control: str | None, seconds: float) -> None:
    with Lab(_topology(row), folder, backend, control) as lab:
        _measure_ping(lab, row)
        if row.loss:
            _measure_loss(lab, row)
        elif not row.jitter_ms:
            row.congestion_control = control
            _measure_tcp(lab, row, seconds)


def _topology(row: Row) -> Topology:
    """The topology: two equal hosts, or one host at home and two others with unlimited links."""
    if row.link == SYMMETRIC:
        return uniform(2, row.rtt_ms, row.bandwidth_mbps, jitter_ms=row.jitter_ms, loss=row.loss)
    others = uniform(3, row.rtt_ms)
    first, home, last = others.hosts
    home = replace(home, down_mbps=HOME_DOWN_MBPS, up_mbps=HOME_UP_MBPS)
    return replace(others, hosts=(first, home, last))


def _measure_ping(lab: Lab, row: Row) -> None:
    count, interval_ms = (300, 25) if row.jitter_ms else (100, 10)
    found = probe(lab, 0, "ping", lab.hosts[1].address, "--count", str(count), "--interval-ms", str(interval_ms))
    if "median_ms" not in found:
        raise InputError(
            f"No ping came back over {row.rtt_ms:g} ms and {row.bandwidth_mbps:g} Mbit/s: is ICMP allowed?"
        )
    if row.loss:
        return  # 100 packets say nothing about 1 %
    row.ping_median_ms, row.ping_max_ms = found["median_ms"], found["max_ms"]
    if row.jitter_ms:
        row.measured_jitter_ms = found["stdev_ms"] / math.sqrt(2)  # the packet is delayed twice, there and back


def _measure_tcp(lab: Lab, row: Row, seconds: float) -> None:
    warm_up = 1.0 + 15 * row.rtt_ms / 1e3
    lines_before = len(read_metrics(lab.report))  # there are none with netem
    receiver, senders = (0, [1]) if row.link == HOME_UP else (1, [0, 2] if row.link == HOME_DOWN else [0])
    times = ["--skip-seconds", str(warm_up), "--seconds", str(seconds), "--connections", str(len(senders))]
    found = both(lab, ["tcp-receive", *times], ["tcp-send"], receiver, senders)
    row.goodput_mbps = found["goodput_mbps"]
    lines = read_metrics(lab.report)[lines_before:]
    if len(lines) >= 3:
        busy = lines[-1]["cpu_seconds"] - lines[0]["cpu_seconds"]
        row.router_cpu = busy / (lines[-1]["time"] - lines[0]["time"])
        row.late_p99_ms = max(line["late_p99_ms"] for line in lines)
        row.late_max_ms = max(line["late_max_ms"] for line in lines)


def _measure_loss(lab: Lab, row: Row) -> None:
    found = both(lab, ["udp-receive"], ["udp-send", "--count", str(_LOSS_PACKETS)])
    row.measured_loss = 1 - found["received"] / _LOSS_PACKETS


def probe(lab: Lab, host: int, *arguments: str) -> dict[str, float]:
    """Runs a probe on a host to its end."""
    process = lab.start(lab.hosts[host], _command(*arguments), stdout=subprocess.PIPE, text=True)
    return json.loads(process.communicate()[0])


def both(lab: Lab, receive: list[str], send: list[str], to: int = 1, senders: Sequence[int] = (0,)) -> dict[str, float]:
    """Runs a receiving probe on one host and sending probes on others; returns the receiver's result."""
    receiving = lab.start(lab.hosts[to], _command(*receive), stdout=subprocess.PIPE, text=True)
    assert receiving.stdout.readline().strip() == READY
    command = _command(send[0], lab.hosts[to].address, *send[1:])
    sending = [lab.start(lab.hosts[number], command, stdout=subprocess.DEVNULL) for number in senders]
    found = json.loads(receiving.communicate()[0])
    for process in sending:
        process.wait()
    return found


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "analysis.wan.probes", *arguments]


def table(rows: list[Row], title: str) -> Table:
    """A table of settings and measurements."""
    result = Table(title=title, title_justify="left")
    result.add_column("link")
    for name in (
        "RTT ms",
        "ping median",
        "max",
        "Mbit/s",
        "TCP goodput",
        "%",
        "TCP",
        "jitter ms",
        "measured",
        "loss %",
    ):
        result.add_column(name, justify="right")
    for name in ("measured", "router CPU", "late p99 ms", "max", "verdict"):
        result.add_column(name, justify="right")
    for row in rows:
        share = row.goodput_mbps and f"{row.goodput_mbps / row.bandwidth_mbps:.1%}"
        result.add_row(
            row.link,
            f"{row.rtt_ms:g}",
            _number(row.ping_median_ms, 2),
            _number(row.ping_max_ms, 1),
            f"{row.bandwidth_mbps:g}",
            _number(row.goodput_mbps, 1),
            share or "",
            "" if row.goodput_mbps is None else row.congestion_control or "default",
            f"{row.jitter_ms:g}",
            _number(row.measured_jitter_ms, 2),
            f"{row.loss:.1%}",
            "" if row.measured_loss is None else f"{row.measured_loss:.2%}",
            "" if row.router_cpu is None else f"{row.router_cpu:.0%}",
            _number(row.late_p99_ms, 2),
            _number(row.late_max_ms, 1),
            ", ".join(row.problems) or "ok",
            style="red" if row.problems else None,
        )
    return result


def to_json(rows: list[Row], backend: str) -> str:
    """The rows as JSON, for the report."""
    found = {"backend": backend, "kernel": platform.release().split("-")[0], "rows": [asdict(row) for row in rows]}
    return json.dumps(found, indent=2) + "\n"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
