"""Pipes to the DHT process and to the averager process that take messages of any size.

Hivemind's processes watch their end of the pipe with uvloop, which makes it non-blocking. A message that is larger than
the buffer of the pipe (208 kB) then arrives in pieces, and to read it fails after the first one; the process dies.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection
from typing import Any


class WholePipe:
    """One end of a pipe: it reads messages whole, and its threads write them one after the other.

    Args:
        connection: the end as it was made
    """

    def __init__(self, connection: Connection):
        self._connection, self._writing, self._pid = connection, threading.Lock(), os.getpid()

    def recv(self) -> Any:
        """The next message; waits for the rest of one that has begun, which its sender is writing at this moment."""
        os.set_blocking(self._connection.fileno(), True)  # uvloop has changed it after the pipe was made
        return self._connection.recv()

    def recv_bytes(self) -> bytes:
        """The same, as it was pickled: what fails is the pipe then, and not the message."""
        os.set_blocking(self._connection.fileno(), True)
        return self._connection.recv_bytes()

    def send(self, message: Any) -> None:
        """Write a message; waits until there is room for it."""
        if self._pid != os.getpid():  # forked while another thread was writing, perhaps, which is not here to end that
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
