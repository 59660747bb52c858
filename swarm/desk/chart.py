"""Lays out a curve for a template to draw: the path of a small SVG picture, and the numbers beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000, 300
"""Size of the drawing in its own units. The page stretches it."""
NICE = (1, 2, 2.5, 5, 10)
"""Steps of an axis, times a power of ten."""
LEAST_SPAN = 1e-9
"""Smallest span of an axis, since strangers may say any number."""


@dataclass(frozen=True)
class Chart:
    """A curve that is ready to be drawn.

    Args:
        title: what the curve shows
        said: the curve in one sentence, for visitors that cannot see it
        path: of the SVG picture, in `WIDTH` x `HEIGHT`; empty as long as there are not two points
        levels: numbers beside the grid lines, from the top down
        begin, end: texts below the first and the last point
    """

    title: str
    said: str
    path: str
    levels: tuple[str, ...]
    begin: str
    end: str


def chart(
    title: str,
    curve: Sequence[tuple[float, float | None]],
    shown: Callable[[float], str],
    place: Callable[[float], str],
    from_zero: bool = False,
) -> Chart:
    """A chart of a curve.

    Args:
        title: what the curve shows
        curve: pairs of x and y, by rising x; where y is not known (None), the curve has a gap
        shown: makes a text of a y
        place: makes a text of an x
        from_zero: the lowest level is zero, or less
    """
    known = [(x, y) for x, y in curve if y is not None and math.isfinite(y)]
    if len(known) < 2 or known[0][0] == known[-1][0]:
        return Chart(title, f"{title}: not enough is known yet.", "", (), "", "")
    lowest, highest = min(y for _, y in known), max(y for _, y in known)
    low, high, steps = levels(lowest, highest, from_zero)
    first, last = known[0], known[-1]
    (begin, end), scale = (first[0], last[0]), HEIGHT / (high - low)
    commands, pen_is_down = [], False
    for x, y in curve:
        if y is None or not math.isfinite(y):
            pen_is_down = False
            continue
        along = WIDTH * (x - begin) / (end - begin)
        commands.append(f"{'L' if pen_is_down else 'M'}{along:.0f} {(high - y) * scale:.0f}")
        pen_is_down = True
    said = (
        f"{title}: {shown(first[1])} at {place(begin)}, {shown(last[1])} at {place(end)}; "
        f"between {shown(lowest)} and {shown(highest)}."
    )
    numbers = tuple(shown(low + (high - low) * step / steps) for step in range(steps, -1, -1))
    return Chart(title, said, "".join(commands), numbers, place(begin), place(end))


def levels(lowest: float, highest: float, from_zero: bool) -> tuple[float, float, int]:
    """Beginning and end of the axis, and its number of equal steps: two to five, each of a round size.

    Args:
        lowest, highest: of the curve
        from_zero: the axis begins at zero, or less
    """
    low = min(0.0, lowest) if from_zero else lowest
    span = max(highest - low if highest > low else abs(highest), LEAST_SPAN) if highest or low else 1.0
    magnitude = 10 ** math.floor(math.log10(span / 4))
    # the smallest round size of which four steps cover the span
    size = next(nice * magnitude for nice in NICE if nice * magnitude * 4 >= span * (1 - 1e-9))
    begin = math.floor(low / size + 1e-9) * size
    steps = max(2, math.ceil((highest - begin) / size - 1e-9))
    return begin, begin + steps * size, steps
