"""Builds the recipe's optimizer and its learning-rate schedule over global steps."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from recipe.config import Recipe


def build_optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW or SGD over two groups of parameters: without and with weight decay.

    Without weight decay are biases, norms and everything else with one dimension, and the parameters that timm's model
    names in `no_weight_decay()` (class token, position embedding). Each update is one global update over
    `recipe.target_batch_size` samples.
    """
    spared = module.no_weight_decay() if hasattr(module, "no_weight_decay") else ()
    groups = _weight_decay_groups(module, recipe.weight_decay, frozenset(spared))
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum, nesterov=recipe.momentum > 0)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2))


def _weight_decay_groups(module: nn.Module, weight_decay: float, spared: frozenset[str]) -> list[dict]:
    """The groups that timm.optim.param_groups_weight_decay returns.

    Importing timm.optim takes seconds, because its Muon imports sympy.
    """
    without, decayed = [], []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_spared = parameter.ndim <= 1 or name.endswith(".bias") or name in spared
            (without if is_spared else decayed).append(parameter)
    return [{"params": without, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]


def build_scheduler(optimizer: torch.optim.Optimizer, recipe: Recipe) -> LambdaLR:
    """A learning-rate scheduler, to be stepped once per global update."""
    return LambdaLR(optimizer, lambda step: lr_factor(recipe, step))


def lr_factor(recipe: Recipe, step: float) -> float:
    """Learning rate of the update that follows `step` finished ones, as a fraction of `recipe.learning_rate`.

    It rises linearly over the warm-up. The first update already has 1/warmup_steps. Then it falls to
    `final_lr_fraction` at `total_steps`, along the schedule's shape, and stays there. `step` may be fractional: after a
    run was extended, its steps are mapped onto the recipe's.
    """
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    progress = min(1.0, (step - recipe.warmup_steps) / (recipe.total_steps - recipe.warmup_steps))
    falls_to = recipe.final_lr_fraction
    if recipe.schedule == "constant":
        return 1.0
    if recipe.schedule == "linear":
        return 1.0 - (1.0 - falls_to) * progress
    return falls_to + (1.0 - falls_to) * 0.5 * (1.0 + math.cos(math.pi * progress))
