"""Requests to stop before the last step; `recipe.training.callbacks.StepMetrics` stops all processes together."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import lightning as L
from lightning.pytorch.callbacks import Timer

from recipe.durations import parse_duration


class StopRequest(Timer):
    """Asks to stop when the time is up, with a last validation, or after Ctrl-C or SIGTERM, without one.

    It is Lightning's Timer, whose time is part of checkpoints, without the Timer's broadcast after every micro-batch.
    Before every micro-batch, Lightning 2.6 makes another broadcast of whether the first process has received SIGTERM.
    This class handles SIGTERM instead. At a round-trip time of 100 ms, that broadcast cost about a quarter of DDP's
    time.

    Args:
        max_time: longest training time as HH:MM:SS; None for no limit.
    """

    def __init__(self, max_time: str | None) -> None:
        super().__init__(None if max_time is None else parse_duration(max_time), interval="epoch", verbose=False)
        self.interrupted = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Removes Lightning's own broadcast about SIGTERM from the loop."""
        super().on_fit_start(trainer, pl_module)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing

    @property
    def time_is_up(self) -> bool:
        """Whether `max_time` has been reached."""
        left = self.time_remaining()
        return left is not None and left <= 0

    @contextmanager
    def listening(self, speaks: bool) -> Iterator[None]:
        """Treats SIGINT and SIGTERM as requests to stop. torchrun kills processes that still run 30 s later, so there
        is no validation before the last snapshot.

        Args:
            speaks: whether to print what happens next.
        """

        def interrupt(number: int, frame: FrameType | None) -> None:
            if speaks and not self.interrupted:
                print("\nStopping after the next update, with a snapshot …", flush=True)
            self.interrupted = True

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _nothing() -> None:
    """Does nothing; it replaces Lightning's broadcast."""
