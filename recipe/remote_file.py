"""Copies files to any fsspec address in the background: with retries, and each file whole or not at all."""

import contextlib
import hashlib
import io
import os
import re
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from recipe.errors import InputError

CHECK_SECONDS = 60.0
"""Longest time that the address may take to accept a first small file."""

ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 1.0
"""Pauses between attempts double: 1, 2, 4, 8 and 16 seconds."""

LEFT_AFTER = timedelta(days=1)
"""An upload that is older was cut off by the end of its process; what it has left is removed."""

_CHUNK_BYTES = 8 * 2**20
_S3 = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}}
_SECRET = re.compile("SECRET|TOKEN|PASSWORD|PASSPHRASE|KEY|SIGNATURE|CONNECTION_STRING", re.IGNORECASE)
_SHORTEST_SECRET = 8


class RemoteFile:
    """A file at an fsspec address (`file://`, `s3://bucket/key`, `gs://`, ...) that is always whole.

    New content is written under another name and then moved into place. `ADDRESS.sha256` follows, in the format of
    `sha256sum`. It is empty meanwhile, so that it never names the checksum of other content.

    Args:
        url: the address.
        option: the option that gave the address, for messages.

    Raises:
        InputError: no installed package can open such an address, or the address holds a secret.
    """

    def __init__(self, url: str, option: str) -> None:
        check_no_secrets(url, option)
        self.url, self.option = url, option
        is_local = "://" not in url or url.startswith(("file://", "local://"))
        options = {"auto_mkdir": True} if is_local else _S3 if url.startswith(("s3://", "s3a://")) else {}
        try:
            self.filesystem, self.path = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
        except (ImportError, ValueError) as error:
            raise InputError(
                f"The address {url} cannot be used ({error}): give {option} something like s3://bucket/folder or "
                "file:///folder, and install what it needs."
            ) from error
        self._swept_at: datetime | None = None

    def check(self, seconds: float = CHECK_SECONDS) -> None:
        """Writes a small file beside the address and removes it.

        Raises:
            InputError: the write fails, or takes longer than `seconds`.
        """
        problem: list[Any] = [f"no answer within {seconds:g} s"]
        prober = threading.Thread(target=self._probe, args=(problem,), daemon=True)
        prober.start()
        prober.join(seconds)
        if problem:
            raise InputError(
                f"Nothing can be written to {self.url} ({problem[0]}): check the address and your credentials "
                f"(for S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), or leave out {self.option}."
            )

    def write(self, content: BinaryIO) -> str:
        """Replaces the file; returns the SHA-256 of the content in hex.

        Raises:
            Exception: any error of the file system. The old file is still in place then, unless only writing the
                `.sha256` failed at the end. The `.sha256` may be empty then.
        """
        self._sweep()
        digest, temporary, checksum = hashlib.sha256(), self._temporary_name(), f"{self.path}.sha256"
        try:
            with self.filesystem.open(temporary, "wb") as remote:
                while chunk := content.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    remote.write(chunk)
            self.filesystem.pipe_file(checksum, b"")
            self.filesystem.mv(temporary, self.path)
        except BaseException:
            with contextlib.suppress(Exception):
                self.filesystem.rm_file(temporary)
            raise
        line = f"{digest.hexdigest()}  {Path(self.path).name}\n"
        self.filesystem.pipe_file(checksum, line.encode())
        return digest.hexdigest()

    def _sweep(self) -> None:
        """Removes, before the first writing and then once a day, what uploads that were cut off have left."""
        now = datetime.now(UTC)
        if self._swept_at is not None and now - self._swept_at <= LEFT_AFTER:
            return
        self._swept_at = now
        folder, _, name = self.path.rpartition("/")
        with contextlib.suppress(Exception):  # whoever may write there need not be able to list or to remove
            for path in self.filesystem.ls(folder, detail=False):
                is_temporary = re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{8}}\.part", path.rpartition("/")[2])
                if is_temporary and now - self.filesystem.modified(path) > LEFT_AFTER:
                    self.filesystem.rm_file(path)
        self.filesystem.invalidate_cache()  # the list is out of date with what is written next

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


class RemoteCopy:
    """Copies the newest of the local files that it is given to a remote file, in a thread.

    If a newer file comes while one waits, the one that waits is not copied.

    Args:
        remote: the target.
        attempts: how often a copy is tried.
        first_pause_seconds: pause between the first two attempts; the pauses double.
        on_problem: called from the thread with the reason when all attempts have failed.
    """

    def __init__(
        self,
        remote: RemoteFile,
        attempts: int = ATTEMPTS,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self.remote, self.attempts, self.first_pause_seconds = remote, attempts, first_pause_seconds
        self.sha256: str | None = None
        """SHA-256 of the file that was copied last, in hex; None before the first."""
        self.problem: str | None = None
        """Why the newest file has not been copied; None if it has been, or is on its way."""
        self._on_problem = on_problem
        self._waiting: BinaryIO | None = None
        self._sending: BinaryIO | None = None
        self._news = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="remote copy", daemon=True)

    def submit(self, path: Path) -> None:
        """Hands a file over and returns at once. The file is opened here, so a later replacement of it does not
        matter.

        Raises:
            OSError: the file cannot be opened. One that waits is still copied.
        """
        newest = open(path, "rb")  # noqa: SIM115 -- the thread closes it
        with self._news:
            if self._waiting is not None:
                self._waiting.close()
            self._waiting = newest
            self._news.notify()
        if not self._thread.is_alive():
            self._thread.start()

    @property
    def bytes_left(self) -> int:
        """Estimate of the bytes that are still to be copied, of the current file and the one that waits."""
        left = 0
        for file in (self._sending, self._waiting):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # the thread has closed it
                left += os.fstat(file.fileno()).st_size - file.tell()
        return left

    def close(self, seconds: float | None = None) -> bool:
        """Waits until the last file has been copied or has failed; `problem` says why it failed.

        Args:
            seconds: longest wait; None waits as long as it takes.

        Returns:
            whether the thread has ended.
        """
        with self._news:
            self._is_closing = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting is not None or self._is_closing)
                self._sending, self._waiting = self._waiting, None
            if self._sending is None:
                return
            with self._sending:
                self._copy(self._sending)
            self._sending = None

    def _copy(self, content: BinaryIO) -> None:
        for attempt in range(self.attempts):
            try:
                content.seek(0, io.SEEK_SET)
                self.sha256, self.problem = self.remote.write(content), None
                return
            except Exception as error:  # every file system has its own errors; none may end the training
                self.problem = describe(error)
            if attempt + 1 < self.attempts and self._a_newer_one_comes(self.first_pause_seconds * 2**attempt):
                return
        self._on_problem(self.problem)

    def _a_newer_one_comes(self, seconds: float) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._waiting is not None, seconds)


def check_no_secrets(url: str, option: str) -> None:
    """Raises InputError if the URL seems to hold a password or a signature, which the list of processes would show."""
    host = url.partition("://")[2].partition("/")[0]
    if ":" in host.rpartition("@")[0] or "?" in url:
        raise InputError(
            f"{option} must not hold a password or a signature, which other users of this machine could see: give it "
            "in an environment variable or a file, as the storage's own programs read it."
        )


def describe(error: Exception) -> str:
    """An exception of a foreign library in one line, without passwords and signatures."""
    text = without_secrets((str(error).strip().splitlines() or [""])[0])
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def without_secrets(text: str) -> str:
    """The text without passwords in addresses, signatures after them, and the values of secret environment
    variables."""
    text = re.sub(r"://[^/@\s]*:[^/@\s]*@", "://…@", text)
    text = re.sub(r"(://[^\s?]*)\?\S+", r"\1?…", text)
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "…")
    return text
