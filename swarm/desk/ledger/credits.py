"""What peers have given by the run's ledger, read from a file that `swarm ledger verify FOLDER --json` has written."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

MAX_FILE_BYTES = 2**24

logger = logging.getLogger(__name__)


class Credit(msgspec.Struct):
    """What one peer has given.

    Args:
        peer: its peer id
        name: its name in the ledger
        samples: that it gave to updates which two thirds of their members confirm
    """

    peer: str
    name: str
    samples: int


class _Verified(msgspec.Struct):
    """The part of the file that the desk needs."""

    run: str
    peers: list[Credit]
    findings: list[msgspec.Raw] = []
    more_findings: int = 0


class Credits:
    """What the newest readable file says.

    Args:
        path: of the file, which may not be there yet
        key: prefix of the run's keys; a file of another run is not used
    """

    def __init__(self, path: Path, key: str):
        self._path, self._key = path, key
        self._read_at = 0
        self.time: float | None = None
        """When the file was written, seconds since 1970; None before there is one."""
        self.peers: list[Credit] = []
        """Peers that have given something; the one that has given most comes first."""
        self.num_findings = 0
        """Number of lines that were changed and count for nothing."""
        self.trouble = ""
        """A sentence, if the newest updates are missing; else empty."""

    def look(self) -> None:
        """Read the file again if it has changed. A file that cannot be read is left out, and logged once."""
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
