"""Simulates a swarm of any size on one core, with lying members: each peer is only a row of a tensor.

The peers train a small network on the digits, with the optimizer of the recipe. An attacker knows what all honest peers
send, and all attackers act together. Real ones can do less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.nn import functional as F

from recipe.data.datasets import open_splits
from recipe.presets import preset
from swarm.averaging.robust_mean import REACH, Combination, capped, weighted_mean

HIDDEN = 32
"""Width of the hidden layer between 64 pixels and 10 classes."""
PARTS = 4
"""Number of parts in which the gradient travels: the swarm's rule sees one part at a time."""
RECIPE = preset("digits")
LEARNING_RATE = 0.01
"""Highest learning rate. It is higher than the recipe's, because this network is smaller."""
LITTLE = 1.5
"""Standard deviations by which the attack "a little is enough" is off the mean. Its own formula gives less for so few
attackers."""
DELAY = 20
"""Age of delayed gradients, in updates."""


@dataclass(frozen=True)
class Swarm:
    """Size of the swarm, and length of its training.

    Args:
        peers: number of all peers
        attackers: number of attackers among them
        rounds: number of updates
        batch: samples of all peers together, for an update
    """

    peers: int
    attackers: int
    rounds: int
    batch: int = RECIPE.target_batch_size

    @property
    def samples(self) -> int:
        """Samples of each peer for an update."""
        return max(1, self.batch // self.peers)


@dataclass
class Sent:
    """What all peers send for an update, the attackers first.

    Args:
        parts: gradients, shape [peers, d]
        samples: samples that each peer claims
        attackers: number of attackers
        honest: gradients that each peer would send if it were honest, shape [peers, d]
        earlier: honest gradients of former updates, the newest last
        reach: reach of the rule, if it has one
    """

    parts: torch.Tensor
    samples: list[int]
    attackers: int
    honest: torch.Tensor
    earlier: list[torch.Tensor] = field(default_factory=list)
    reach: float = REACH

    def lying(self, parts: torch.Tensor) -> Sent:
        """The same, with these gradients of the attackers, shape [attackers, d] or [d]."""
        sent = self.parts.clone()
        sent[: self.attackers] = parts
        return replace(self, parts=sent)

    @property
    def own(self) -> torch.Tensor:
        """Honest gradients of the attackers, shape [attackers, d]."""
        return self.honest[: self.attackers]

    @property
    def others(self) -> torch.Tensor:
        """Gradients of the honest peers, shape [honest peers, d]."""
        return self.honest[self.attackers :]


# ---- attacks ---------------------------------------------------------------------------------------------------------


def _scaled(factor: float) -> Callable[[Sent], Sent]:
    return lambda sent: sent.lying(factor * sent.own)


def _noise(sent: Sent) -> Sent:
    noise = torch.randn_like(sent.own)
    return sent.lying(noise * (1000 * sent.own.norm(dim=1) / noise.norm(dim=1))[:, None])


def _claims(sent: Sent) -> Sent:
    """Zeros with a claim of two whole batches, the most that a ticket can claim."""
    claimed = 2 * sum(sent.samples)
    return replace(
        sent.lying(torch.zeros_like(sent.own)), samples=[claimed] * sent.attackers + sent.samples[sent.attackers :]
    )


def _a_little_is_enough(sent: Sent) -> Sent:
    """Baruch, Baruch, Goldberg: A Little Is Enough (NeurIPS 2019)."""
    return sent.lying(sent.others.mean(0) - LITTLE * sent.others.std(0))


def _inner_product(epsilon: float) -> Callable[[Sent], Sent]:
    """Xie, Koyejo, Gupta: Fall of Empires (UAI 2019)."""
    return lambda sent: sent.lying(-epsilon * sent.others.mean(0))


def _within_reach(sent: Sent) -> Sent:
    """An attack on the swarm's rule: as far against the gradient as a member may be and still counts in full."""
    mean = sent.others.mean(0)
    usual = (sent.others - mean).norm(dim=1).median()
    return sent.lying(mean - 0.9 * sent.reach * usual * mean / mean.norm())


def _delayed(sent: Sent) -> Sent:
    return sent.lying(sent.earlier[-DELAY][: sent.attackers] if len(sent.earlier) >= DELAY else sent.own)


def _honest(sent: Sent) -> Sent:
    return sent


FLIPS_LABELS = "label flip"
ATTACKS: dict[str, Callable[[Sent], Sent]] = {
    "none": _honest,
    "sign flip x 1": _scaled(-1.0),
    "sign flip x 10": _scaled(-10.0),
    "sign flip x 100": _scaled(-100.0),
    "noise x 1000": _noise,
    "claimed weight": _claims,
    "ALIE": _a_little_is_enough,
    "IPM 0.1": _inner_product(0.1),
    "IPM 0.6": _inner_product(0.6),
    "IPM 1": _inner_product(1.0),
    FLIPS_LABELS: _honest,  # its labels are false, its gradients honest
    "delayed": _delayed,
    "zeros": _scaled(0.0),
    "within reach": _within_reach,
}


# ---- rules -----------------------------------------------------------------------------------------------------------


def _mean(sent: Sent) -> torch.Tensor:
    return weighted_mean([*sent.parts], sent.samples)


def _median(sent: Sent) -> torch.Tensor:
    return sent.parts.median(0).values


def _trimmed_mean(sent: Sent) -> torch.Tensor:
    """The trimmed mean. It is told the number of attackers, and leaves out as many numbers at either end."""
    ordered = sent.parts.sort(0).values
    return ordered[sent.attackers : len(ordered) - sent.attackers].mean(0)


def _norm_clip(sent: Sent) -> torch.Tensor:
    """The mean of gradients; those longer than the median length are shortened to it."""
    norms = sent.parts.norm(dim=1)
    factors = (norms.median() / norms.clamp_min(1e-30)).clamp_max(1.0)
    return weighted_mean([*(sent.parts * factors[:, None])], capped(sent.samples))


def _clip(sent: Sent) -> torch.Tensor:
    """The swarm's own rule, applied part by part."""
    rule = Combination(clips=True, reach=sent.reach)
    weights = rule.weights(sent.samples)
    return torch.cat(
        [rule.combine(parts, weights).mean for parts in zip(*(row.chunk(PARTS) for row in sent.parts), strict=True)]
    )


RULES: dict[str, Callable[[Sent], torch.Tensor]] = {
    "mean": _mean,
    "median": _median,
    "trimmed mean": _trimmed_mean,
    "norm clip": _norm_clip,
    "clip": _clip,
    "clip 1.25": _clip,
    "clip 1.5": _clip,
    "clip 3": _clip,
}
REACHES = {"clip 1.25": 1.25, "clip 1.5": 1.5, "clip 3": 3.0}
"""Reach of the rules that differ from the swarm's in nothing else."""


# ---- training --------------------------------------------------------------------------------------------------------


class Network:
    """A network of two layers with one vector of parameters; the gradients of all peers are computed at once.

    Args:
        generator: generator that draws the initial weights
    """

    def __init__(self, generator: torch.Generator):
        self._shapes = [(64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]
        bounds = [1 / 8, 1 / 8, 1 / math.sqrt(HIDDEN), 1 / math.sqrt(HIDDEN)]
        first = [
            bound * (2 * torch.rand(math.prod(shape), generator=generator) - 1)
            for shape, bound in zip(self._shapes, bounds, strict=True)
        ]
        self.vector = torch.nn.Parameter(torch.cat(first))
        """All parameters, shape [d]."""

    def _layers(self) -> list[torch.Tensor]:
        flat = self.vector.detach().split([math.prod(shape) for shape in self._shapes])
        return [layer.view(shape) for layer, shape in zip(flat, self._shapes, strict=True)]

    def gradients(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The gradients of each peer, shape [peers, d].

        Args:
            images: shape [peers, samples, 64]
            labels: shape [peers, samples]
        """
        weights, bias, out_weights, out_bias = self._layers()
        hidden = F.relu(images @ weights + bias)
        errors = (hidden @ out_weights + out_bias).softmax(-1) - F.one_hot(labels, 10)
        errors /= labels.shape[1]
        backward = (errors @ out_weights.T) * (hidden > 0)
        layers = (images.mT @ backward, backward.sum(1), hidden.mT @ errors, errors.sum(1))
        return torch.cat([layer.flatten(1) for layer in layers], dim=1)

    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Share of the images that are classified correctly; shapes [n, 64] and [n]."""
        weights, bias, out_weights, out_bias = self._layers()
        found = (F.relu(images @ weights + bias) @ out_weights + out_bias).argmax(-1)
        return float((found == labels).float().mean())


@dataclass(frozen=True)
class Digits:
    """Images, shape [n, 64], and labels, shape [n]: some to train on, and all others to test with."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    @classmethod
    def load(cls) -> Digits:
        splits = open_splits(RECIPE, Path())
        rest = (splits.val, splits.test)
        flat = [part.images[:, 0].flatten(1) for part in (splits.train, *rest)]
        return cls(flat[0], splits.train.labels, torch.cat(flat[1:]), torch.cat([part.labels for part in rest]))


def train(swarm: Swarm, attack: str, rule: str, seed: int, data: Digits) -> float:
    """Train a swarm; returns the final accuracy, from 0 to 1.

    Args:
        attack: one of `ATTACKS`
        rule: one of `RULES`
        seed: seed of weights and batches
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # for noise
    network = Network(generator)
    optimizer = torch.optim.AdamW(
        [network.vector], LEARNING_RATE, (RECIPE.beta1, RECIPE.beta2), weight_decay=RECIPE.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, swarm.rounds))
    earlier: list[torch.Tensor] = []
    for _ in range(swarm.rounds):
        drawn = torch.randint(len(data.labels), (swarm.peers, swarm.samples), generator=generator)
        labels = data.labels[drawn]
        if attack == FLIPS_LABELS:
            labels[: swarm.attackers] = 9 - labels[: swarm.attackers]
        honest = network.gradients(data.images[drawn], labels)
        sent = Sent(honest, [swarm.samples] * swarm.peers, swarm.attackers, honest, earlier, REACHES.get(rule, REACH))
        if swarm.attackers:
            sent = ATTACKS[attack](sent)
        earlier = [*earlier[-DELAY:], honest]
        network.vector.grad = RULES[rule](sent)
        torch.nn.utils.clip_grad_norm_([network.vector], RECIPE.clip_norm)
        optimizer.step()
        schedule.step()
    return network.accuracy(data.test_images, data.test_labels)


def _rate(step: int, rounds: int) -> float:
    """Factor of the learning rate, as the recipe has it: a warm-up, then a cosine."""
    warmup = RECIPE.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, rounds - warmup)))
