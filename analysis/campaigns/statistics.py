"""Means of repetitions, and how sure they are."""

from __future__ import annotations

import math
from typing import Any

from scipy import stats


def interval(values: Any) -> tuple[float, float, int]:
    """Mean, half width of the 95 % interval of the mean, and number of values.

    The half width is Student's; NaN for fewer than three values, of which it would say next to nothing.
    """
    values = [value for value in values if value is not None and not math.isnan(value)]
    if not values:
        return math.nan, math.nan, 0
    mean, n = sum(values) / len(values), len(values)
    if n < 3:
        return mean, math.nan, n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n), n
