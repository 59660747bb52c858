"""Copies a peer's checkpoints and its summary to a remote place while the peer trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from recipe.remote_file import RemoteCopy, RemoteFile
from recipe.training.checkpoint_io import BEST
from swarm.peer.callbacks.status_reporter import PatientConsole
from swarm.peer.checkpoints import OWN_PREFIX
from swarm.peer.options import UPLOAD_SECONDS
from swarm.runtime.once import Once

LATEST, SUMMARY = "last.ckpt", "summary.json"
OPTION = "--upload-to"
_LOOK_SECONDS = 0.2

logger = logging.getLogger(__name__)


class CheckpointUpload:
    """Keeps three files at `URL/RUN_ID/NAME`: the best checkpoint, the newest one, and, at the end, the summary.

    Each file is replaced by a newer one. If the line is slow, checkpoints in between are left out: the newest wins.

    Args:
        url: a place that fsspec can open
        run_id, name: folders below it
        attempts, first_pause_seconds: as of `RemoteCopy`

    Raises:
        InputError: nothing that is installed can open such an address, or there are secrets in it
    """

    def __init__(self, url: str, run_id: str, name: str, **patience: float):
        self.url = f"{url.rstrip('/')}/{run_id}/{name}"
        self._complaints = Once()
        self._unread: set[str] = set()
        self._files = {file: RemoteFile(f"{self.url}/{file}", OPTION) for file in (BEST, LATEST, SUMMARY)}
        self._copies = {
            file: RemoteCopy(remote, **patience, on_problem=self._complain) for file, remote in self._files.items()
        }

    def check(self) -> None:
        """Raises InputError: nothing can be written there"""
        self._files[LATEST].check()

    def saved(self, path: Path) -> None:
        """Send a checkpoint that was written; returns at once."""
        if not path.name.startswith(OWN_PREFIX):
            self._submit(BEST if path.name == BEST else LATEST, path)

    def _submit(self, file: str, path: Path) -> None:
        try:
            self._copies[file].submit(path)
            self._unread.discard(file)
        except OSError as error:  # too many open files, for instance
            self._unread.add(file)  # what was copied before is older
            self._complain(str(error.strerror))

    def finish(self, summary: Path, say: Callable[[str], None], seconds: float = UPLOAD_SECONDS) -> None:
        """Send the summary, and wait for all uploads that are under way.

        Args:
            summary: its file
            say: prints a line
            seconds: how long to wait at most
        """
        self._submit(SUMMARY, summary)
        if self._bytes_left:
            say(f"Uploading what is left to {self.url}, for {seconds:.0f} s at most (Ctrl-C twice leaves at once) …")
        self._wait(seconds)
        missing = [
            file for file, copy in self._copies.items() if not copy.close(0) or copy.problem or file in self._unread
        ]
        if missing:
            say(f"Not uploaded to {self.url}: {', '.join(missing)}. Copy them from {summary.parent} by hand.")

    @property
    def _bytes_left(self) -> int:
        return sum(copy.bytes_left for copy in self._copies.values())

    def _wait(self, seconds: float) -> None:
        deadline, total = time.monotonic() + seconds, self._bytes_left
        columns = (TextColumn("Uploading"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=PatientConsole(), transient=True, disable=not total) as progress:
            task = progress.add_task("", total=total)
            while (unfinished := [copy for copy in self._copies.values() if not copy.close(0)]) and (
                time.monotonic() < deadline
            ):
                unfinished[0].close(_LOOK_SECONDS)
                progress.update(task, completed=max(total - self._bytes_left, 0))

    def _complain(self, problem: str) -> None:
        """Warn, once only: the next checkpoint is tried again, and a peer without a network has other problems."""
        if self._complaints.first():
            logger.warning(f"Nothing could be uploaded to {self.url} ({problem}): training goes on, the next is tried.")
