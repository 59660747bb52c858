"""Pipes to the DHT process and to the averaging process that take messages of any size.

Hivemind's processes watch their end of the pipe with uvloop, which makes it non-blocking. A message that is larger than
the buffer of the pipe (208 kB) then arrives in pieces. Reading it fails after the first piece, and the process dies.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection
from typing import Any


class WholePipe:
    """One end of a pipe that reads messages whole, and lets threads write them one after the other.

    Args:
        connection: the end, as `multiprocessing.Pipe` made it
    """

    def __init__(self, connection: Connection):
        self._connection, self._writing, self._pid = connection, threading.Lock(), os.getpid()

    def recv(self) -> Any:
        """Read the next message. Waits for the rest of a message that its sender is writing at this moment."""
        os.set_blocking(self._connection.fileno(), True)  # uvloop has changed it after the pipe was made
        return self._connection.recv()

    def recv_bytes(self) -> bytes:
        """Read the next message as pickled bytes: an error then comes from the pipe, never from unpickling."""
        os.set_blocking(self._connection.fileno(), True)
        return self._connection.recv_bytes()

    def send(self, message: Any) -> None:
        """Write a message. Waits until there is room for it."""
        # Perhaps another thread held the lock at the fork. That thread is not in this process to release it.
        if self._pid != os.getpid():
            self._writing, self._pid = threading.Lock(), os.getpid()
        with self._writing:
            self._connection.send(message)

    def poll(self, timeout_seconds: float | None = 0.0) -> bool:
        """Whether there is something to read."""
        return self._connection.poll(timeout_seconds)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()
