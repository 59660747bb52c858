"""Fetches the run's ledgers now and then and adds them up beside the page, so that looks at the swarm stay short.

What comes over the network goes through the DHT process. A process of its own with the lowest priority adds up.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from recipe.errors import InputError
from recipe.run_folder import whole_file
from swarm.desk.ledger.credits import MAX_FILE_BYTES, Credits
from swarm.ledger.collector import Collected, collect
from swarm.membership.progress_store import progress_records
from swarm.protocol.admission import Admission

if TYPE_CHECKING:
    from swarm.membership.run_manifest import RunManifest
    from swarm.network.dht_process import SwarmDHT

FIRST_SECONDS, EVERY_SECONDS = 30.0, 600.0
"""Time from the start to the first fetch, and between two fetches."""
REST = 20.0
"""The next fetch waits so many times as long as the last took: so the cost stays at a twentieth of a core."""
REST_WHILE_EMPTY = 5.0
"""The same as long as the ledgers confirm nothing yet."""
ASK_SECONDS = 240.0
"""Time after which no other peer is asked for its ledger. Which peers are asked first is drawn each time."""
PEER_SHARE = 4
"""The ledgers of one peer get one in so many parts of the folder's room."""
VERIFY_SECONDS = 300.0
ANSWER_SECONDS = 15.0
END_SECONDS = 2.0
HALF_SECONDS = 600.0
"""Age from which a half-written file is of a desk that was killed. Another desk may be writing a younger one now."""
NICE = 19
FOLDER, FILE = "ledger", "credits.json"
VERIFIED, TAMPERED = 0, 1
"""Exit status of `swarm ledger verify`. Lines that were changed count for nothing, and all others count."""


class Bookkeeper(threading.Thread):
    """A thread that keeps the run's ledgers, and the file of what they add up to.

    Args:
        fetch: fetches what is new into the folder
        folder: of the ledgers
        credits: read the file that this thread writes beside the folder
    """

    def __init__(self, fetch: Callable[[], Collected], folder: Path, credits: Credits):
        super().__init__(name="ledger", daemon=True)
        self._fetch, self._folder = fetch, folder
        self._over = threading.Event()
        self._adding: subprocess.Popen | None = None
        self.credits = credits

    @classmethod
    def of_run(cls, dht: SwarmDHT, manifest: RunManifest, folder: Path, most_bytes: int) -> Bookkeeper:
        """The bookkeeper of a run.

        Args:
            dht: a running DHT, from `start_dht`
            folder: of the desk for runs of this name; runs with other recipes have ledgers of their own there
            most_bytes: that all ledgers may take together
        """
        ledgers = folder / FOLDER / manifest.key_prefix

        def fetch() -> Collected:
            records = progress_records(dht, manifest, Admission(manifest.authority), ANSWER_SECONDS)
            is_client = {peer: record.client_mode for peer, record in records.items()}
            bounds = most_bytes // PEER_SHARE, most_bytes, ASK_SECONDS
            return collect(dht, manifest.key_prefix, is_client, ledgers, *bounds)

        return cls(fetch, ledgers, Credits(_result_of(ledgers), manifest.key_prefix))

    def run(self) -> None:
        wait = FIRST_SECONDS
        while not self._over.wait(wait):
            began = time.monotonic()
            self.turn()
            took = time.monotonic() - began
            if self.credits.peers:
                wait = max(EVERY_SECONDS, REST * took)
            else:  # a run that has just begun has nothing to confirm yet
                wait = max(FIRST_SECONDS, REST_WHILE_EMPTY * took)

    def turn(self) -> None:
        """Fetch and add up once."""
        try:
            trouble = _trouble_of(self._fetch())
        except (TimeoutError, CancelledError, OSError, RuntimeError):  # the next time tries again
            trouble = "No peer handed it over the last time."
        except InputError as error:
            trouble = str(error)
        if not self._over.is_set() and any(self._folder.glob("*.jsonl")):
            trouble = self._add_up() or trouble
        self.credits.trouble = trouble

    def stop(self) -> None:
        """Fetch and add up no more. Waits two seconds at most for the thread to end."""
        self._over.set()
        if (adding := self._adding) is not None:
            adding.kill()
        if self.is_alive():
            self.join(END_SECONDS)

    def _add_up(self) -> str:
        """Write the file with what the ledgers add up to.

        Returns:
            what went wrong, as a sentence, while the old file stays; empty if all went well
        """
        command = [sys.executable, "-m", "swarm", "ledger", "verify", str(self._folder), "--json"]
        try:
            with tempfile.TemporaryFile(dir=self._folder) as said:
                status = self._run(command, said)
                said.seek(0)
                content = said.read()
            if status not in (VERIFIED, TAMPERED) or not content:
                return f"The desk could not add it up: see why with swarm ledger verify {self._folder}"
            if len(content) > MAX_FILE_BYTES:
                return f"It names more peers than this page can show: see swarm ledger verify {self._folder}"
            result = _result_of(self._folder)
            for half in result.parent.glob(f".{result.name}.*.tmp"):
                with contextlib.suppress(FileNotFoundError):
                    if half.stat().st_mtime < time.time() - HALF_SECONDS:
                        half.unlink()
            with whole_file(result, durable=False) as file:  # not durable: it can be added up again
                file.write(content)
        except OSError as error:
            return f"The desk could not add it up ({error.strerror or error})."
        return ""

    def _run(self, command: list[str], output: object) -> int | None:
        """Run the command that adds up. Returns its exit status; None if it took too long."""
        with subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as adding:
            self._adding = adding
            with contextlib.suppress(psutil.Error):  # it may be over already
                psutil.Process(adding.pid).nice(NICE)
            if self._over.is_set():
                adding.kill()
            try:
                return adding.wait(VERIFY_SECONDS)
            except subprocess.TimeoutExpired:
                adding.kill()
                return None
            finally:
                self._adding = None


def _trouble_of(collected: Collected) -> str:
    """A sentence that says why updates are missing for lack of room; empty if there was enough."""
    if collected.is_full:
        return "Its folder is full: start swarm desk with a larger --ledger-mib."
    if collected.is_peer_full:
        return "A peer has more lines than its part of the folder: start swarm desk with a larger --ledger-mib."
    return ""


def _result_of(ledgers: Path) -> Path:
    """Path of the file with what a folder of ledgers adds up to."""
    return ledgers.with_name(f"{ledgers.name}.{FILE}")
