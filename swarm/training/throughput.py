"""What a peer has computed for the present step, and how fast. Pauses do not count."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

SMOOTHING = 0.3
"""Weight of the newest micro-batch in the mean speed."""
MAX_DROPPED = 3
"""Steps in a row without a finite gradient, after which this peer takes over a state again."""


@dataclass(frozen=True)
class Noted:
    """A peer's notes on a micro-batch that other members may recompute.

    Args:
        first_position: position of its first sample, in this peer's order of samples
        samples: number of its samples
        numbers: sum over its samples of their gradients at a few places, fp32, on the model's device
        lineage: lineage of the weights
    """

    first_position: int
    samples: int
    numbers: torch.Tensor
    lineage: bytes


@dataclass
class Work:
    """What one peer has computed for one global update.

    Args:
        samples: number of samples whose gradients it has added up
        loss_sum: sum of their losses; a tensor without dimensions on the model's device, which is read only when its
            value is needed
        seconds: seconds of computing
        noted: notes on its micro-batches, where members check each other's work
    """

    samples: int = 0
    loss_sum: torch.Tensor | float = 0.0
    seconds: float = 0.0
    noted: list[Noted] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean loss over the samples. Reading it waits until a GPU has computed all of them."""
        return float(self.loss_sum) / max(1, self.samples)


def finite_or_zero(loss: torch.Tensor | float) -> torch.Tensor:
    """The loss as fp64, without dimensions; 0 if it is not finite, since it would spoil the mean over all samples."""
    loss = torch.as_tensor(loss).detach().double()
    return torch.where(torch.isfinite(loss), loss, 0.0)


def is_power_of_two(number: int) -> bool:
    """Whether the number is 1, 2, 4, 8, …"""
    return number.bit_count() == 1


class OneAhead:
    """Lets the CPU prepare one micro-batch, and no more, while a GPU computes the one before.

    If the peer waited for each loss, its GPU would be idle between micro-batches. If it never waited, it would count
    samples long before they are computed.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def launched(self, device: torch.device) -> None:
        """Note that a micro-batch was queued on the GPU, and wait until the one before is computed."""
        if device.type != "cuda":
            return
        before, self._last = self._last, torch.cuda.Event()
        self._last.record(torch.cuda.current_stream(device))
        if before is not None:
            before.synchronize()

    def wait(self) -> None:
        """Wait until everything that was queued is computed."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None


class Throughput:
    """Counts the samples of micro-batches, and smooths the speed over them."""

    def __init__(self):
        self._ahead = OneAhead()
        self.samples_per_second = 0.0
        self._dropped_in_a_row, self._kept_loss_sum = 0, 0.0
        self.work = Work()
        """What this peer has computed for the present step."""
        self._since = time.perf_counter()

    def resume(self) -> None:
        """Start the clock: computing begins now, or goes on after a pause."""
        self._since = time.perf_counter()

    def note(self, samples: int, loss: torch.Tensor | float) -> None:
        """Count samples that were computed since the last call or `resume`. A GPU may still be computing them.

        Args:
            loss: mean loss over these samples, without dimensions
        """
        loss = finite_or_zero(loss)
        self._ahead.launched(loss.device)
        seconds = self._count_seconds()
        self.work.samples += samples
        self.work.loss_sum = self.work.loss_sum + samples * loss
        rate, before = samples / seconds, self.samples_per_second
        self.samples_per_second = (1 - SMOOTHING) * before + SMOOTHING * rate if before else rate

    def _count_seconds(self) -> float:
        now = time.perf_counter()
        seconds, self._since = max(now - self._since, 1e-9), now
        self.work.seconds += seconds
        return seconds

    def finish(self) -> None:
        """Wait until a GPU has computed everything that was noted; this wait counts as computing."""
        self._ahead.wait()
        self._count_seconds()

    def take(self) -> Work:
        """Return the work of the present step, which ends, and begin with none."""
        if self.work.samples:
            self._dropped_in_a_row = 0
        taken, self.work, self._kept_loss_sum = self.work, Work(), 0.0
        return taken

    def withhold(self) -> None:
        """Drop the samples, which are not given to the swarm; keep the seconds."""
        self.work, self._kept_loss_sum = Work(seconds=self.work.seconds), 0.0

    def give_back(self, work: Work) -> None:
        """Add work that was taken to that of the present step again."""
        self.work.samples += work.samples
        self.work.loss_sum = self.work.loss_sum + work.loss_sum  # not in place: `keep` remembers the same tensor
        self.work.seconds += work.seconds
        self.work.noted[:0] = work.noted
        self._kept_loss_sum = self._kept_loss_sum + work.loss_sum

    def keep(self) -> None:
        """Note that a local step has used everything that was computed so far."""
        self._dropped_in_a_row, self._kept_loss_sum = 0, self.work.loss_sum

    def drop_all(self) -> bool:
        """Drop all samples of the step as useless; return whether that is so frequent that the weights may be why."""
        self.work = Work(seconds=self.work.seconds)
        return self._note_drop()

    def discount(self, samples: int) -> bool:
        """Drop this many useless samples since `keep`; return whether that is so frequent that weights may be why."""
        left = max(0, self.work.samples - samples)
        self.work = Work(left, self._kept_loss_sum, self.work.seconds)
        return self._note_drop()

    def _note_drop(self) -> bool:
        self._dropped_in_a_row += 1
        times, rest = divmod(self._dropped_in_a_row, MAX_DROPPED)
        # True after 3, 6, 12, 24, … drops: if other weights did not help, the weights are not why, so ask less often.
        return rest == 0 and is_power_of_two(times)
