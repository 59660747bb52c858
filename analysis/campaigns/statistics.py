"""Means of repetitions, their intervals, and tests of equivalence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from scipy import stats


def interval(values: Any) -> tuple[float, float, int]:
    """The mean, the half width of its 95 % interval, and the number of values.

    The interval is Student's. The half width is NaN for fewer than three values, which would say next to nothing.
    """
    values = [value for value in values if value is not None and not math.isnan(value)]
    if not values:
        return math.nan, math.nan, 0
    mean, n = sum(values) / len(values), len(values)
    if n < 3:
        return mean, math.nan, n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n), n


MIN_PAIRS = 5
"""Fewest pairs for which equivalence can be shown: fewer may agree by chance."""


class Equivalence(NamedTuple):
    """The result of a test whether paired differences are negligible."""

    mean: float
    half_width: float
    """Half width of the 90 % interval of the mean; NaN for fewer than three differences."""
    n: int
    is_shown: bool
    """Whether equivalence is shown. The interval lies within the margin, so that each of two one-sided tests rejects at
    5 %, and there are enough pairs."""


def equivalence(differences: Sequence[float], margin: float, validated_over_trained: float = 0.0) -> Equivalence:
    """Two one-sided t-tests (Schuirmann 1987, "A comparison of the two one-sided tests procedure ...").

    With few values, finding no difference says nothing. This test shows that a difference is negligible.

    Args:
        differences: differences of pairs, such as two systems with the same seed.
        margin: mean differences below this do not matter.
        validated_over_trained: for folds, samples that a fold validates over those that it trains on. Folds share most
            of their training samples, so their differences are not independent. The variance of the mean is then 1 / n
            + this ratio, times that of one difference (Nadeau and Bengio 2003, "Inference for the generalization
            error"; for folds with several seeds each: Bouckaert and Frank 2004, "Evaluating the replicability of
            significance tests for comparing learning algorithms").
    """
    mean, half_width, n = interval(differences)
    if n >= 3:
        half_width *= float(stats.t.ppf(0.95, n - 1) / stats.t.ppf(0.975, n - 1))
        half_width *= math.sqrt(1 + n * validated_over_trained)
    return Equivalence(mean, half_width, n, n >= MIN_PAIRS and abs(mean) + half_width < margin)
