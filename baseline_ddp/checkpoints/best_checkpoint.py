"""Copies the best checkpoint to any fsspec address in the background: retried, and never half a file."""

import contextlib
import hashlib
import io
import threading
import time
import uuid
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from recipe.errors import InputError

CHECK_SECONDS = 60.0
"""How long the address may take to accept a first small file."""

ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 1.0
"""Pauses between attempts double: 1, 2, 4, 8 and 16 seconds."""

_CHUNK_BYTES = 8 * 2**20
_S3 = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}}


class RemoteFile:
    """A file at an fsspec address (`file://`, `s3://bucket/key`, `gs://`, ...) that is always whole.

    New content goes to a name of its own and is then moved to its place; `ADDRESS.sha256` follows, in the format of
    `sha256sum`.

    Raises:
        InputError: nothing known can open such an address.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        is_local = "://" not in url or url.startswith(("file://", "local://"))
        options = {"auto_mkdir": True} if is_local else _S3 if url.startswith(("s3://", "s3a://")) else {}
        try:
            self.filesystem, self.path = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
        except (ImportError, ValueError) as error:
            raise InputError(
                f"The address {url} cannot be used ({error}): give --best-checkpoint-url something like "
                "s3://bucket/best.ckpt or file:///folder/best.ckpt, and install what it needs."
            ) from error

    def check(self, seconds: float = CHECK_SECONDS) -> None:
        """Writes a small file beside the address and removes it.

        Raises:
            InputError: that fails, or takes longer than `seconds`.
        """
        problem: list[Any] = [f"no answer within {seconds:g} s"]
        prober = threading.Thread(target=self._probe, args=(problem,), daemon=True)
        prober.start()
        prober.join(seconds)
        if problem:
            raise InputError(
                f"Nothing can be written to {self.url} ({problem[0]}): check the address and your credentials "
                "(for S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), or leave out --best-checkpoint-url."
            )

    def write(self, content: BinaryIO) -> str:
        """Replaces the file; returns the sha256 in hex.

        Raises:
            Exception: whatever the file system raises; the old file is then still there.
        """
        digest, temporary = hashlib.sha256(), self._temporary_name()
        try:
            with self.filesystem.open(temporary, "wb") as remote:
                while chunk := content.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    remote.write(chunk)
            self.filesystem.mv(temporary, self.path)
        except BaseException:
            with contextlib.suppress(Exception):
                self.filesystem.rm_file(temporary)
            raise
        line = f"{digest.hexdigest()}  {Path(self.path).name}\n"
        self.filesystem.pipe_file(f"{self.path}.sha256", line.encode())
        return digest.hexdigest()

    def _temporary_name(self) -> str:
        return f"{self.path}.{uuid.uuid4().hex[:8]}.part"

    def _probe(self, problem: list[Any]) -> None:
        name = self._temporary_name()
        try:
            with self.filesystem.open(name, "wb") as remote:
                remote.write(b"probe")
            self.filesystem.rm_file(name)
            problem.clear()
        except Exception as error:  # every file system has its own
            problem[0] = describe(error)


class BestCheckpointCopy(Checkpoint):
    """Follows Lightning's `ModelCheckpoint`: whenever there is a new best one, a thread copies it.

    Only the newest is copied; one that waits while a better one comes is left out. It has to stand after `best` in the
    trainer's list of callbacks. In other processes than the first it does nothing.

    Args:
        remote: where to.
        best: what writes the best checkpoint.
        attempts: how often to try.
        first_pause_seconds: between the first two attempts; the pauses double.
    """

    def __init__(
        self,
        remote: RemoteFile,
        best: ModelCheckpoint,
        attempts: int = ATTEMPTS,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self.remote, self.best = remote, best
        self.attempts, self.first_pause_seconds = attempts, first_pause_seconds
        self.sha256: str | None = None
        self.problem: str | None = None
        self._score: Any = None
        self._waiting: BinaryIO | None = None
        self._news = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="best-checkpoint", daemon=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hands a new best checkpoint to the thread."""
        score = self.best.best_model_score
        if not trainer.is_global_zero or score is None or score == self._score:
            return
        self._score = score
        self.submit(Path(self.best.best_model_path))

    def submit(self, path: Path) -> None:
        """Opens the file, so that it stays what it is when the next best one takes its place, and returns at once."""
        with self._news:
            if self._waiting is not None:
                self._waiting.close()
            self._waiting = open(path, "rb")  # noqa: SIM115 -- the thread closes it
            self._news.notify()
        if not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Waits until the last checkpoint is there or has failed; `problem` then says why."""
        with self._news:
            self._is_closing = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting is not None or self._is_closing)
                content, self._waiting = self._waiting, None
            if content is None:
                return
            with content:
                self._copy(content)

    def _copy(self, content: BinaryIO) -> None:
        for attempt in range(self.attempts):
            try:
                content.seek(0, io.SEEK_SET)
                self.sha256, self.problem = self.remote.write(content), None
                return
            except Exception as error:  # every file system has its own; the training must not end for it
                self.problem = describe(error)
            if self._waiting is not None:
                return  # a better one is there
            if attempt + 1 < self.attempts:
                time.sleep(self.first_pause_seconds * 2**attempt)


def describe(error: Exception) -> str:
    """An exception of a foreign library in one line."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
