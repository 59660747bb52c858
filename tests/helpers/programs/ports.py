"""TCP ports for programs that begin to listen some time after they are told the port."""

import contextlib
import functools
import itertools
import os
import socket
from collections.abc import Iterator

FIRST, LAST = 20_000, 29_000
"""Systems give none of these to outgoing connections: Linux begins at 32,768."""
SHARE = 100
"""Number of ports of one test process."""


def free_port() -> int:
    """Return a port without a listener, which no other test is given, in this test process or another one."""
    _, ports = _share(os.getpid())
    for port in itertools.islice(ports, SHARE):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("0.0.0.0", port))
            return port
    raise RuntimeError("all ports of this test process are taken")


@functools.cache
def _share(_pid: int) -> tuple[socket.socket, Iterator[int]]:
    """Return this process's ports, which begin anew after the last. Listening on the port before them reserves them."""
    for first in range(FIRST, LAST, SHARE):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", first)), itertools.cycle(range(first + 1, first + SHARE))
    raise RuntimeError(f"other test processes have all ports from {FIRST} to {LAST}")
