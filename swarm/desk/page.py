"""The page and the badge, made from reports by templates that escape all text that strangers have written."""

from __future__ import annotations

import io
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

import segno
from jinja2 import Environment, PackageLoader, StrictUndefined

from swarm.desk.chart import HEIGHT, WIDTH, Chart, chart
from swarm.desk.health import Kind, Level
from swarm.desk.peer_table import COLUMNS, TEXTS
from swarm.desk.report import HistoryReport, Leaders, PeersReport, RunCard, SwarmReport, TimelineReport
from swarm.desk.timeline import CELLS, runs_of, said_of, share
from swarm.protocol.orders import Orders

MAX_ROWS = 50
"""Peers on the first page; the page of all peers is one link away."""
MAX_LEADERS, MAX_EVENTS, MAX_ROUNDS = 10, 12, 8
SIGNS = {"good": "✓", "warning": "!", "bad": "✕", "paused": "Ⅱ"}
"""A sign for each level, for people that cannot see its colour."""

SAID: dict[Level, str] = {
    "good": "The run is well.",
    "warning": "Look at the run.",
    "bad": "The run is not well.",
    "paused": "The run is paused.",
}
SAID_OF: dict[Kind, str] = {
    "deaf": "the swarm does not answer",
    "nobody": "no peer trains",
    "still": "no update is made",
    "loss": "the loss has risen or is not finite",
    "reachable": "too few peers can be called",
    "certificate": "a certificate ends soon",
    "disk": "the desk's disk is nearly full or fails",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """The run at one moment. Each answer that is made from it is made once, when a visitor asks for it first.

    Args:
        made: these answers, by name
    """

    card: RunCard
    swarm: SwarmReport
    peers: PeersReport
    leaders: Leaders
    history: HistoryReport
    timeline: TimelineReport
    orders: Orders
    made: dict[str, object] = field(default_factory=dict, repr=False)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` has returned for this name; it is called the first time only.

        Args:
            name: of the answer
        """
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]


def render(template: str, snapshot: Snapshot, **more: object) -> str:
    """The text of a page.

    Args:
        template: name of a file in `pages/`
        more: values that this template needs beside those that all templates have
    """
    swarm = snapshot.swarm
    return _TEMPLATES.get_template(template).render(
        card=snapshot.card,
        swarm=swarm,
        peers=snapshot.peers.peers,
        leaders=snapshot.leaders,
        events=snapshot.history.events[: -MAX_EVENTS - 1 : -1],
        tests=snapshot.history.tests,
        timeline=snapshot.timeline,
        rounds=snapshot.timeline.rounds[: -MAX_ROUNDS - 1 : -1],
        cells=CELLS,
        runs_of=runs_of,
        said_of=said_of,
        share=share,
        charts=snapshot.once("charts", lambda: _charts(snapshot.history)),
        sign=SIGNS[swarm.level],
        status=_status(swarm),
        max_rows=MAX_ROWS,
        columns={column: heading for column, (heading, _) in COLUMNS.items()},
        texts=TEXTS,
        width=WIDTH,
        height=HEIGHT,
        **more,
    )


def _status(swarm: SwarmReport) -> str:
    """The text that a screen reader reads out when it changes. Without numbers it changes only with the findings."""
    if swarm.is_over and not swarm.findings:
        return "The run has ended."
    about = ", ".join(SAID_OF[finding.kind] for finding in swarm.findings)
    return f"{SAID[swarm.level]} Reason: {about}." if about else SAID[swarm.level]


def qr_code(text: str) -> bytes:
    """A QR code as an SVG picture. It is dark on light on a dark page, too, as cameras expect."""
    picture = io.BytesIO()
    segno.make(text, error="l").save(picture, kind="svg", scale=4, dark="#000", light="#fff")
    return picture.getvalue()


def _charts(history: HistoryReport) -> list[Chart]:
    points = history.points

    def update(step: float) -> str:
        return f"update {step:,.0f}"

    by_step = sorted({point.step: point for point in points}.items())  # the last point of each update
    traffic = [(point.time, _mbps(point.bytes_per_second)) for point in points]
    is_told = any(mbps is not None for _, mbps in traffic)
    sent = [chart("Traffic, Mbit/s", traffic, _rate, _clock, True)] if is_told else []
    tested = [chart("Test accuracy", _tested(history), _short_percent, update)] if history.tests else []
    return [
        chart("Training loss", [(step, point.loss) for step, point in by_step], "{:.4g}".format, update),
        chart("Accuracy", [(step, point.accuracy) for step, point in by_step], _short_percent, update),
        chart("Samples per second", [(point.time, point.samples_per_second) for point in points], _rate, _clock, True),
        chart("Updates per minute", [(point.time, point.updates_per_minute) for point in points], _rate, _clock, True),
        *sent,
        *tested,
    ]


def _mbps(bytes_per_second: float | None) -> float | None:
    return None if bytes_per_second is None else 8e-6 * bytes_per_second


def _tested(history: HistoryReport) -> list[tuple[int, float]]:
    """Test accuracy by update: the median of the peers that have tested the same weights."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for test in history.tests:
        found[test.step].append(test.accuracy)
    return sorted((step, statistics.median(accuracies)) for step, accuracies in found.items())


def _known(shown: Callable[[float], str]) -> Callable[[float | None], str]:
    return lambda value: "–" if value is None or not math.isfinite(value) else shown(value)


def _loss(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _short_percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _bits(bytes_per_second: float) -> str:
    """A speed in bits per second, the unit in which lines are sold."""
    return f"{_in_units(8 * bytes_per_second)}bit/s"


def _bytes(num_bytes: float) -> str:
    return f"{_in_units(num_bytes)}B"


def _in_units(value: float) -> str:
    """A number with three digits and a prefix, the largest with which it is 1 or more; the smallest prefix is k."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1000:.3g} k"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%d %b, %H:%M UTC")


def _second(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S UTC")


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _duration(seconds: float) -> str:
    """A time span in the largest unit that is not too coarse."""
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    return f"{seconds / 86400:.0f} days"


def _sentence(words: object) -> str:
    """Words with a capital letter at the beginning, and all other letters as they are."""
    text = str(words)
    return text[:1].upper() + text[1:]


_TEMPLATES = Environment(
    loader=PackageLoader("swarm.desk", "pages"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "loss": _known(_loss),
    "percent": _known(_percent),
    "rate": _known(_rate),
    "count": _known(_count),
    "duration": _known(_duration),
    "bits": _known(_bits),
    "bytes": _known(_bytes),
    "iso": _iso,
    "clock": _clock,
    "second": _second,
    "sentence": _sentence,
}
