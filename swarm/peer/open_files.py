"""Says when a process of this peer has nearly as many files open as it may. A stream, or a connection, is a file."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

MOST = 0.8
"""Of the limit. Beyond it a process refuses connections, those of members, too."""


class OpenFiles:
    """Of the processes of one peer."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def look(self, processes: Mapping[str, psutil.Process]) -> list[str]:
        """What to tell the person: a sentence for each process, once.

        Args:
            processes: by name; nothing is said of one that has just ended, nor where the system does not tell
        """
        sentences = []
        for name, process in processes.items():
            try:
                limit, found = process.rlimit(psutil.RLIMIT_NOFILE)[0], process.num_fds()
            except (psutil.Error, AttributeError):
                continue
            if 0 < MOST * limit <= found and process.pid not in self._told:
                self._told.add(process.pid)
                sentences.append(
                    f"{name} has {found:,} of {limit:,} files open: give a higher `ulimit -n` in this shell, and start "
                    "this peer again. Each network stream is an open file; a peer may be opening many."
                )
        return sentences
