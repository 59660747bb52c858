"""Means of repetitions, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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


MIN_PAIRS = 5
"""Fewer may agree by chance."""


class Equivalence(NamedTuple):
    """Whether paired differences are shown to be next to nothing."""

    mean: float
    half_width: float
    """Of the 90 % interval of the mean; NaN for fewer than three differences."""
    n: int
    is_shown: bool
    """The whole interval lies within the margin: each of two one-sided tests rejects at 5 %; there are enough pairs."""


def equivalence(differences: Sequence[float], margin: float, validated_over_trained: float = 0.0) -> Equivalence:
    """Two one-sided t-tests (Schuirmann 1987, "A comparison of the two one-sided tests procedure ...").

    That no difference was found says nothing where there are few values; this shows that there is none to speak of.

    Args:
        differences: of pairs, such as the same seed with two systems.
        margin: a mean difference that is smaller than this does not matter.
        validated_over_trained: of folds, whose training samples are mostly the same, so that their differences are not
            independent: samples that a fold validates over those that it trains on. The variance of the mean is then
            1 / n + this ratio of that of one difference (Nadeau and Bengio 2003, "Inference for the generalization
            error"; for folds with several seeds each: Bouckaert and Frank 2004, "Evaluating the replicability of
            significance tests for comparing learning algorithms").
    """
    mean, half_width, n = interval(differences)
    if n >= 3:
        half_width *= float(stats.t.ppf(0.95, n - 1) / stats.t.ppf(0.975, n - 1))
        half_width *= math.sqrt(1 + n * validated_over_trained)
    return Equivalence(mean, half_width, n, n >= MIN_PAIRS and abs(mean) + half_width < margin)
