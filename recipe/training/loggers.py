"""Files of JSON lines, and Lightning loggers that go on when the disk is full."""

import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from recipe.run_folder import finite_or_null


class JsonlFile:
    """Appends lines of JSON; each one is handed to the operating system before the call returns.

    When the disk is full, it warns once and drops the line: the training matters more than its log.

    Args:
        path: the file; it is created with the first line.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._has_warned = False

    def append(self, values: dict[str, Any]) -> None:
        """Adds a line {"time": Unix seconds, ...}; NaN and infinities become null."""
        line = json.dumps(finite_or_null({"time": time.time(), **values}), allow_nan=False)
        try:
            append_line(self.path, line)
        except OSError as error:
            if not self._has_warned:
                warnings.warn(
                    f"{self.path} cannot be written any more ({error.strerror}): training goes on without it.",
                    stacklevel=2,
                )
            self._has_warned = True


class JsonlLogger(Logger):
    """Lightning logger that writes lines {"time": Unix seconds, "step": global step, tag: value, ...}.

    Args:
        path: as for `JsonlFile`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._file = JsonlFile(path)
        self.path = self._file.path

    @property
    def name(self) -> str:
        """Lightning's name for the logger."""
        return "jsonl"

    @property
    def version(self) -> str:
        """Empty: a run has one log."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the recipe has its own file."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Appends one line."""
        self._file.append({"step": step, **{tag: float(value) for tag, value in metrics.items()}})


class PatientTensorBoardLogger(TensorBoardLogger):
    """Lightning's TensorBoard logger, except that a full disk ends the logging and not the training."""

    _is_broken = False

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Logs as Lightning does, until the disk is full."""
        self._attempt(super().log_metrics, metrics, step)

    @rank_zero_only
    def save(self) -> None:
        """Saves as Lightning does, until the disk is full."""
        self._attempt(super().save)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Ends the log as Lightning does, unless the disk is full."""
        self._attempt(super().finalize, status)

    def _attempt(self, write: Callable[..., None], *arguments: Any) -> None:
        if self._is_broken:
            return
        try:
            write(*arguments)
        except (OSError, ValueError) as error:  # Lightning makes a ValueError of everything
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            self._is_broken = True  # TensorBoard's writer does not recover from it
            warnings.warn(
                f"TensorBoard files cannot be written any more ({cause.strerror}): training goes on without them.",
                stacklevel=2,
            )


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, on a line of its own."""
    with open(path, "a+b") as file:
        # A process that was killed may have left half a line. It must not merge with this one.
        is_torn = file.tell() > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
        file.write((b"\n" if is_torn else b"") + line.encode() + b"\n")
