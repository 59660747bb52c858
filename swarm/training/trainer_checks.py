"""Checks whether a Trainer and its module can work in a swarm. Each error names a way out."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from recipe.errors import InputError
from swarm.averaging.compression.codec import TOO_COARSE_FOR_BUFFERS
from swarm.training.averaging_mode import Averaging
from swarm.training.gradient_buffer import has_float_buffers


def check_trainer(trainer: Trainer, averaging: Averaging, is_open: bool) -> None:
    """Check a Trainer that already has its module, its optimizers and its schedulers.

    Args:
        is_open: no organiser gives orders

    Raises:
        InputError: a part of it cannot work in a swarm
    """
    module = trainer.lightning_module
    if len(trainer.strategy.optimizers) != 1 or not module.automatic_optimization:
        raise InputError("SwarmStrategy needs one optimizer and automatic optimization: change the LightningModule.")
    if trainer.precision == "16-mixed":
        raise InputError("SwarmStrategy cannot share loss scales between peers: use precision 'bf16-mixed' or '32'.")
    _check_buffers(module, averaging, is_new=trainer.ckpt_path is None)
    if trainer.accumulate_grad_batches != 1:
        raise InputError("A swarm accumulates to the target batch size itself: leave accumulate_grad_batches at 1.")
    if any(config.reduce_on_plateau for config in trainer.strategy.lr_scheduler_configs):
        raise InputError("A swarm steps schedulers by global update: ReduceLROnPlateau cannot be used.")
    _check_steerable([config.scheduler for config in trainer.strategy.lr_scheduler_configs], averaging, is_open)


def _check_buffers(module: LightningModule, averaging: Averaging, is_new: bool) -> None:
    """Check the float buffers: all of them are averaged, whatever they are for.

    Args:
        is_new: the training does not go on from a checkpoint; if it does, large numbers are no error here, and
            `Contribution` warns of them
    """
    codec = averaging.codec
    if codec.name in TOO_COARSE_FOR_BUFFERS and has_float_buffers(module):
        raise InputError(
            f"The codec {codec.name} is too coarse for this model's running statistics (float buffers): use 'fp16'."
        )
    exact = "'none' with another averaging than auto" if averaging.auto else "'none'"
    for name, buffer in module.named_buffers():
        if not buffer.is_floating_point():
            continue
        if not torch.isfinite(buffer).all():
            raise InputError(
                f"The buffer {name} holds numbers that are not finite, and a swarm averages float buffers: "
                "register it as bool, as masks can be, or make it where it is used."
            )
        if is_new and (buffer.abs() > codec.largest_number).any():
            raise InputError(
                f"The buffer {name} holds numbers beyond ±{codec.largest_number:,.0f}, where the codec {codec.name} "
                f"cuts them off, and a swarm averages float buffers: use {exact}, or register a mask as bool."
            )


def _check_steerable(schedulers: Sequence[object], averaging: Averaging, is_open: bool) -> None:
    """Check that the learning rate is a function of the step, where the swarm or an organiser may move its schedule."""
    have_functions = all(isinstance(scheduler, LambdaLR) for scheduler in schedulers)
    if averaging.auto and not have_functions:
        raise InputError(
            "With the averaging auto an update may count for several: give the LightningModule a LambdaLR as "
            "scheduler, or another averaging."
        )
    if not is_open and not (schedulers and have_functions):
        raise InputError(
            "The organiser of a run may change its learning rate: give the LightningModule a LambdaLR as scheduler."
        )


def check_dealt_out(dataloader: object) -> None:
    """Check that each process of an island gets samples of its own.

    Raises:
        InputError: all processes would compute the same samples
    """
    if not isinstance(dataloader, DataLoader) or type(dataloader.batch_sampler) is not BatchSampler:
        return
    if isinstance(dataloader.dataset, IterableDataset) or isinstance(dataloader.sampler, DistributedSampler):
        return
    raise InputError(
        "Each process of an island needs samples of its own: give the DataLoader "
        "sampler=DistributedSampler(dataset, WORLD_SIZE, RANK)."
    )


def check_trained(now: Sequence[torch.nn.Parameter], before: Sequence[torch.nn.Parameter]) -> None:
    """Check that the trained parameters stay the same: no other peer or joiner would know of a change.

    Args:
        now: the parameters that are trained now
        before: the parameters that were trained when this peer joined

    Raises:
        InputError: they are not the same
    """
    if len(now) != len(before) or any(map(operator.is_not, now, before)):
        raise InputError(
            "The parameters that are trained have changed, and a swarm trains the same ones to its end: leave out "
            "what freezes or unfreezes them on the way, such as BackboneFinetuning, or begin another run for it."
        )
