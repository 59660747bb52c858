"""What peers have given by the run's ledger, as `swarm ledger verify FOLDER --json` has written it into a file."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

MAX_FILE_BYTES = 2**24

logger = logging.getLogger(__name__)


class Credit(msgspec.Struct):
    """Of one peer.

    Args:
        peer: its id
        name: under which the ledger has it
        samples: in updates that two thirds of their members confirm
    """

    peer: str
    name: str
    samples: int


class _Verified(msgspec.Struct):
    """The part of that file which the desk needs."""

    run: str
    peers: list[Credit]
    findings: list[msgspec.Raw] = []
    more_findings: int = 0


class Credits:
    """The newest file that can be read.

    Args:
        path: of the file, which may come later
        key: of the run: another's ledger counts for nothing
    """

    def __init__(self, path: Path, key: str):
        self._path, self._key = path, key
        self._read_at = 0
        self.time: float | None = None
        """Of the file, seconds since 1970; None as long as there is none."""
        self.peers: list[Credit] = []
        """Who has given most comes first."""
        self.num_findings = 0
        """Lines that were changed."""
        self.trouble = ""
        """A sentence, where the newest updates are missing."""

    def look(self) -> None:
        """Read the file again if it is another one by now; one that cannot be read changes nothing."""
        try:
            self._read()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is left out (%s)", self._path, error)

    def _read(self) -> None:
        stat = self._path.stat()
        if stat.st_mtime_ns == self._read_at:
            return
        self._read_at = stat.st_mtime_ns
        if stat.st_size > MAX_FILE_BYTES:
            raise ValueError("it is too long")
        found = msgspec.json.decode(self._path.read_bytes(), type=_Verified)
        if found.run != self._key:
            raise ValueError("it is of another run")
        self.time, self.num_findings = stat.st_mtime, len(found.findings) + found.more_findings
        self.peers = sorted((peer for peer in found.peers if peer.samples > 0), key=lambda peer: -peer.samples)
