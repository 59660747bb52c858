"""Tells the starter of a run if its averages take longer than computing, and what makes them shorter."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import lightning as L

from swarm.averaging.compression.codec import TOO_COARSE_FOR_BUFFERS, Codec
from swarm.training.averaging_mode import Averaging
from swarm.training.gradient_buffer import has_float_buffers

ROUNDS = 5
"""How many rounds are measured. The advice comes right after them, or never."""
SHORT_SECONDS = 2.0
"""Up to this time an average depends on round trips and not on bytes, so there is no advice."""
SMALLEST = "topk"
"""The codec with the fewest bytes."""


class SlowLineAdvice(L.Callback):
    """Compares the two parts of an update, computing and averaging, over the first rounds with others.

    Their ratio is the *granularity* of a run. Below 1, devices wait for lines, or would do so without overlap.

    Args:
        averaging: of the run
        say: prints one line
    """

    def __init__(self, averaging: Averaging, say: Callable[[str], None]):
        self._averaging, self._say = averaging, say
        self._rounds: list[tuple[float, float]] = []
        self._step = -1

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx) -> None:
        report = trainer.strategy.coordinator.last_step
        if report is None or report.step == self._step or len(self._rounds) >= ROUNDS:
            return
        self._step = report.step
        if report.round is None or report.num_peers < 2:
            return
        self._rounds.append((report.compute_seconds, report.round.exchange_seconds))
        if len(self._rounds) == ROUNDS:
            compute, exchange = (median(seconds) for seconds in zip(*self._rounds, strict=True))
            if exchange > max(compute, SHORT_SECONDS):
                self._say(advice(compute, exchange, self._averaging, has_float_buffers(pl_module)))


def advice(compute_seconds: float, exchange_seconds: float, averaging: Averaging, has_statistics: bool) -> str:
    """What to say when an average takes longer than the computing for an update.

    Args:
        averaging: of the run
        has_statistics: whether the model has running statistics, for which small codecs are too coarse
    """
    said = f"An average takes {exchange_seconds:.0f} s and the computing for it {compute_seconds:.0f} s."
    bytes_before, bytes_after = (codec.payload_bytes([(1,)]) for codec in (averaging.codec, Codec(SMALLEST)))
    is_refused = has_statistics and SMALLEST in TOO_COARSE_FOR_BUFFERS
    if is_refused or bytes_before <= bytes_after or averaging.codec.name == "powersgd":
        return f"{said} A run with a larger --target-batch-size needs fewer averages."
    times = bytes_before / bytes_after
    options = f"--averaging local --local-steps 1 --codec {SMALLEST}"
    return f"{said} A run with {options} sends 1/{times:.0f} of the bytes, and may cost some accuracy."
