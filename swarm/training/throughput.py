"""What a peer has computed for the present step, and how fast: pauses do not count."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

SMOOTHING = 0.3
MAX_DROPPED = 3
"""Steps in a row without a finite gradient, before this peer takes over the state again."""


@dataclass(frozen=True)
class Noted:
    """What a peer notes of a micro-batch that others may compute again.

    Args:
        first_position: of its samples, in this peer's order
        samples: how many they are
        numbers: the sum of their gradients at a few places, fp32, where the model is
        lineage: of the weights
    """

    first_position: int
    samples: int
    numbers: torch.Tensor
    lineage: bytes


@dataclass
class Work:
    """What one peer has computed for one global update.

    Args:
        samples: whose gradients it has added up
        loss_sum: of these samples; a tensor without dimensions where the model is, as long as nobody asks for its value
        seconds: of computing
        noted: of its micro-batches, where members check each other's
    """

    samples: int = 0
    loss_sum: torch.Tensor | float = 0.0
    seconds: float = 0.0
    noted: list[Noted] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean over its samples. A GPU computes all of them before it can answer."""
        return float(self.loss_sum) / max(1, self.samples)


def finite_or_zero(loss: torch.Tensor | float) -> torch.Tensor:
    """This loss as fp64, without dimensions; 0 if it is not finite: it would spoil the mean over all samples."""
    loss = torch.as_tensor(loss).detach().double()
    return torch.where(torch.isfinite(loss), loss, 0.0)


def is_power_of_two(number: int) -> bool:
    """Whether this is 1, 2, 4, 8, …"""
    return number.bit_count() == 1


class OneAhead:
    """Lets the processor prepare a micro-batch while a GPU computes the one before, and no further one.

    A peer that waited for each loss would leave its GPU idle meanwhile. One that never waited would count samples long
    before they are computed.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def launched(self, device: torch.device) -> None:
        """The GPU has been told to compute a micro-batch; wait until it has done the one before."""
        if device.type != "cuda":
            return
        before, self._last = self._last, torch.cuda.Event()
        self._last.record(torch.cuda.current_stream(device))
        if before is not None:
            before.synchronize()

    def wait(self) -> None:
        """Until all that was launched is computed."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None


class Throughput:
    """Counts micro-batches; the speed is smoothed over them."""

    def __init__(self):
        self._ahead = OneAhead()
        self.samples_per_second = 0.0
        self._dropped_in_a_row, self._kept_loss_sum = 0, 0.0
        self.work = Work()
        """What this peer has computed for the present step."""
        self._since = time.perf_counter()

    def resume(self) -> None:
        """Computing begins now, or begins again."""
        self._since = time.perf_counter()

    def note(self, samples: int, loss: torch.Tensor | float) -> None:
        """So many have been computed since the last call or `resume`; a GPU may still compute the last of them.

        Args:
            loss: mean over these samples, without dimensions
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
        """Wait until a GPU has computed all that was noted, which counts as computing."""
        self._ahead.wait()
        self._count_seconds()

    def take(self) -> Work:
        """The work of the present step, which ends; there is none for the next one yet."""
        if self.work.samples:
            self._dropped_in_a_row = 0
        taken, self.work, self._kept_loss_sum = self.work, Work(), 0.0
        return taken

    def withhold(self) -> None:
        """These samples are not for the swarm."""
        self.work, self._kept_loss_sum = Work(seconds=self.work.seconds), 0.0

    def give_back(self, work: Work) -> None:
        """It counts for the present step after all."""
        self.work.samples += work.samples
        self.work.loss_sum = self.work.loss_sum + work.loss_sum  # not in place: `keep` remembers the same tensor
        self.work.seconds += work.seconds
        self.work.noted[:0] = work.noted
        self._kept_loss_sum = self._kept_loss_sum + work.loss_sum

    def keep(self) -> None:
        """All that has been computed so far was of use, in a local step."""
        self._dropped_in_a_row, self._kept_loss_sum = 0, self.work.loss_sum

    def drop_all(self) -> bool:
        """No sample of the present step is of use; true if that happens so often that the weights may be why."""
        self.work = Work(seconds=self.work.seconds)
        return self._note_drop()

    def discount(self, samples: int) -> bool:
        """So many samples since `keep` are of no use; true if that happens so often that the weights may be why."""
        left = max(0, self.work.samples - samples)
        self.work = Work(left, self._kept_loss_sum, self.work.seconds)
        return self._note_drop()

    def _note_drop(self) -> bool:
        self._dropped_in_a_row += 1
        times, rest = divmod(self._dropped_in_a_row, MAX_DROPPED)
        return rest == 0 and is_power_of_two(times)  # 3, 6, 12, 24, …: if it did not help, it is not the weights
