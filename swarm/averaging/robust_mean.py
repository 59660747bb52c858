"""Combines the parts of all members into one: their mean, or a mean that no single member can move far.

It imports nothing of the swarm: the simulator of attacks (`python -m analysis robust`) runs the same lines.

The rule `clip` is centred clipping (Karimireddy, He, Jaggi: Learning from History for Byzantine Robust Optimization,
ICML 2021), on each part by its reducer as in ButterflyClip (Gorbunov et al.: Secure Distributed Training at Scale, ICML
2022). It begins at the median of each number over the members, which fewer than half of them cannot move far. The
median of the members' distances to it is the *usual distance*. A member within `REACH` times that counts as it is. If
no member is farther, the result is the weighted mean, bit by bit. A member that is farther counts only with a
difference of the usual length, and with a shorter one the farther away it is. So large lies, which push the same way in
each update, count for next to nothing (statistics calls such a rule *redescending*).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

REACH = 2.0
"""Usual distances within which a member counts as it is. Honest members are about one away, and seldom two if they have
computed fifty samples. A lie within reach counts in full, so more would be dangerous (`docs/benchmarks.md`)."""
ITERATIONS = 3
"""How often the centre moves to the clipped mean around it."""
MAX_SHARE = 2
"""One of N members that give samples weighs at most `MAX_SHARE` / N of the total."""
MAX_LENGTH = 2.0
"""Limit for a member with local steps that claims more than so many times the median number of samples. It counts as if
it had come `MAX_LENGTH` times as far as usual, and no farther."""
MAX_SORTED = 4096
"""Numbers of each member that are sorted at a time, which bounds the memory."""
MAX_EXCHANGED = 16
"""Members that are sorted by exchanging neighbours: of N members N²/2 exchanges, each of all numbers at once."""


@dataclass(frozen=True)
class Combined:
    """The result of combining one part of all members.

    Args:
        mean: shape [n], fp32
        outside: positions of the members that were farther away than the rule's reach
    """

    mean: torch.Tensor
    outside: tuple[int, ...] = ()


@dataclass(frozen=True)
class Combination:
    """A rule that combines parts; all members of a group have the same.

    Args:
        clips: whether the rule is `clip`; else it is the weighted mean
        local_steps: parts are what so many optimizer steps of equal members have added up to; 0: they are gradients
        reach: usual distances within which a member counts as it is
    """

    clips: bool = False
    local_steps: int = 0
    reach: float = REACH

    def weights(self, samples: Sequence[int]) -> list[float]:
        """The weights of members, by the samples that they say they have computed."""
        return capped(samples) if self.clips else [float(number) for number in samples]

    @property
    def for_buffers(self) -> Combination:
        """The rule for a model's buffers: they do not move farther if a member makes more local steps."""
        return replace(self, local_steps=0)

    @torch.no_grad()
    def combine(
        self, parts: Sequence[torch.Tensor], weights: Sequence[float], samples: Sequence[float] = ()
    ) -> Combined:
        """Combine one part of all members. Their order decides about the last bits of the result, and nothing else.

        Args:
            parts: one of each member, shape [n], fp32, finite
            weights: one of each member, more than 0
            samples: samples that each has computed, which may be more than its weight; by default the weights
        """
        if not self.clips or len(parts) < 3:  # of two, it cannot be said which one is far away
            return Combined(weighted_mean(parts, weights))
        lengths = self._lengths(samples or weights)
        even = [part if length == 1 else part / length for part, length in zip(parts, lengths, strict=True)]
        center = median(even)
        distances = [norm(part - center) for part in even]
        scales = _scales(weights)
        usual = statistics.median(distance / scale for distance, scale in zip(distances, scales, strict=True))
        radii = [usual * scale for scale in scales]
        outside = tuple(
            index
            for index, (distance, radius) in enumerate(zip(distances, radii, strict=True))
            if distance > self.reach * radius
        )
        counted = [min(length, MAX_LENGTH) for length in lengths]  # samples are only claimed, and so are lengths
        if not outside:
            shown = [
                part if length <= MAX_LENGTH else one * MAX_LENGTH
                for part, one, length in zip(parts, even, lengths, strict=True)
            ]
            return Combined(weighted_mean(shown, weights))
        pulls = [weight * length for weight, length in zip(weights, counted, strict=True)]
        for _ in range(ITERATIONS):
            clipped = [self._clip(part - center, radius) for part, radius in zip(even, radii, strict=True)]
            center = center + weighted_mean(clipped, pulls)
        # Parts were divided by their lengths, so the centre is of usual length; the mean has the mean of their lengths.
        return Combined(center * (sum(pulls) / sum(weights)), outside)

    def _lengths(self, samples: Sequence[float]) -> list[float]:
        """How many times as far as usual each member has come by its local steps, if all go the same way."""
        if not self.local_steps:
            return [1.0 for _ in samples]
        usual = statistics.median(samples)
        return [max(1.0 / self.local_steps, number / usual) for number in samples]

    def _clip(self, difference: torch.Tensor, radius: float) -> torch.Tensor:
        """The same difference within reach; else one of at most the usual length, and the shorter the longer it was."""
        distance = norm(difference)
        farther = distance / self.reach
        return difference * (radius / distance) * (radius / farther) if farther > radius else difference


def _scales(weights: Sequence[float]) -> list[float]:
    """How far each member may be, in usual distances: gradients of fewer samples are noisier."""
    usual = statistics.median(weights)
    return [max(1.0, math.sqrt(usual / weight)) for weight in weights]


def capped(samples: Sequence[int]) -> list[float]:
    """The weights of members: of N that have samples, none weighs more than 2/N of all together. Claims are cheap.

    Two or fewer weigh as much as they say.
    """
    counted = sorted((number for number in samples if number), reverse=True)
    # If the `num_over` largest weigh `most` each, that is 2/N of the total: most = 2 (num_over most + rest) / N.
    for num_over in range(len(counted)):
        most = MAX_SHARE * sum(counted[num_over:]) / (len(counted) - MAX_SHARE * num_over)
        if counted[num_over] <= most:
            return [min(float(number), most) for number in samples]
    return [0.0 for _ in samples]


def weighted_mean(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted mean of the parts, shape [n], added up in their order."""
    total = parts[0] * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total.add_(part, alpha=weight)
    return total.div_(sum(weights))


def median(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The median of each number over the members, shape [n]; of an even number of them the mean of the middle two."""
    low, high = (len(parts) - 1) // 2, len(parts) // 2
    if len(parts) > MAX_EXCHANGED:
        medians = []
        for pieces in zip(*(part.split(MAX_SORTED) for part in parts), strict=True):
            ordered = torch.stack(pieces).sort(dim=0).values
            medians.append((ordered[low] + ordered[high]) / 2)
        return torch.cat(medians)
    ordered = list(parts)
    for turn in range(len(parts)):  # odd-even transposition sort, of all numbers at once
        for first in range(turn % 2, len(parts) - 1, 2):
            one, other = ordered[first : first + 2]
            ordered[first : first + 2] = torch.minimum(one, other), torch.maximum(one, other)
    return (ordered[low] + ordered[high]) / 2


def norm(difference: torch.Tensor) -> float:
    """The length, in float64: the square of a large number does not fit into fp32."""
    return float(torch.linalg.vector_norm(difference, dtype=torch.float64))
