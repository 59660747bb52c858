"""False gradients of a liar: the same lies for a member of a swarm, and for a process of other systems.

    torchrun ... tests/helpers/attacks/false_gradients.py LIE LIARS baseline_ddp/train.py OPTIONS
    python tests/helpers/attacks/false_gradients.py LIE LIARS analysis/opponents/hivemind_optimizer.py OPTIONS

The program runs unchanged, and the last of its processes lie: the highest ranks of torchrun, or the peers with the
highest numbers in their names (`h7` and `h8` of eight).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

Change = Callable[[torch.Tensor], object]
"""Changes a gradient in place."""
LITTLE = 1.5
"""Standard deviations by which the attack "a little is enough" moves the gradient."""
MEMORY = 0.9
"""Weight of the past in a liar's estimate of the spread of honest gradients, for which it has only its own."""
DELAY = 20
"""Age of a delayed gradient, in gradients."""
NOISE = 1000.0
LABELS = "labels"


def scaled(factor: float) -> Callable[[], Change]:
    """The gradient, times a factor; a small negative one is an inner-product manipulation (Xie et al., UAI 2019)."""
    return lambda: lambda gradient: gradient.mul_(factor)


def noise() -> Change:
    """Replace the gradient by noise of 1,000 times its norm."""
    return lambda gradient: gradient.copy_(
        NOISE * gradient.norm() / gradient.numel() ** 0.5 * torch.randn_like(gradient)
    )


class Little:
    """A little is enough (Baruch et al., NeurIPS 2019): mean less 1.5 standard deviations, both of its own."""

    def __init__(self) -> None:
        self._mean: torch.Tensor | None = None
        self._square: torch.Tensor | None = None

    def __call__(self, gradient: torch.Tensor) -> None:
        if self._mean is None or self._square is None:
            self._mean, self._square = gradient.clone(), gradient.square()
        self._mean.lerp_(gradient, 1 - MEMORY)
        self._square.lerp_(gradient.square(), 1 - MEMORY)
        spread = (self._square - self._mean.square()).clamp_min_(0).sqrt_()
        gradient.copy_(self._mean - LITTLE * spread)


class Delayed:
    """Sends the gradient of twenty calls ago."""

    def __init__(self) -> None:
        self._kept: deque[torch.Tensor] = deque(maxlen=DELAY + 1)

    def __call__(self, gradient: torch.Tensor) -> None:
        self._kept.append(gradient.clone())
        gradient.copy_(self._kept[0])


FALSE_GRADIENTS: dict[str, Callable[[], Change]] = {
    "reverse-1": scaled(-1.0),
    "reverse-10": scaled(-10.0),
    "reverse": scaled(-100.0),
    "noise": noise,
    "zeros": scaled(0.0),
    "against-0.1": scaled(-0.1),
    "against-0.6": scaled(-0.6),
    "little": Little,
    "delayed": Delayed,
}
"""By name: makes the change of one vector, or of one parameter. "reverse-1" is also IPM with an epsilon of 1."""


def flip_labels() -> None:
    """Make this process learn from now on that 0 is 9, 1 is 8, and so on."""
    honest = F.cross_entropy

    def false(logits: torch.Tensor, labels: torch.Tensor, **options: object) -> torch.Tensor:
        if torch.is_grad_enabled():
            labels = logits.shape[-1] - 1 - labels
        return honest(logits, labels, **options)

    F.cross_entropy = false


def lie_in_this_process(lie: str) -> None:
    """Falsify every gradient that this process computes from now on, each by itself, before any averaging."""
    if lie == LABELS:
        return flip_labels()
    honest = torch.nn.Module.train
    has_hooks: set[int] = set()

    def with_hooks(self: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
        for parameter in self.parameters():
            if parameter.requires_grad and id(parameter) not in has_hooks:
                has_hooks.add(id(parameter))
                parameter.register_hook(_changed(FALSE_GRADIENTS[lie]()))
        return honest(self, mode)

    torch.nn.Module.train = with_hooks  # every trainer calls it before it begins


def _changed(change: Change) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        false = gradient.detach().clone()
        change(false)
        return false

    return hook


def _is_liar(liars: int, arguments: list[str]) -> bool:
    if "RANK" in os.environ:
        return int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]) - liars
    number, peers = (int(arguments[arguments.index(option) + 1].lstrip("h")) for option in ("--name", "--peers"))
    return number > peers - liars


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[3])
    lie, liars, program, *rest = sys.argv[1:]
    if _is_liar(int(liars), rest):
        lie_in_this_process(lie)
    sys.argv = [program, *rest]
    runpy.run_path(program, run_name="__main__")
