"""A folder for the sockets by which p2pd and its callers talk.

Hivemind puts them directly into /tmp, where every user of the machine could connect to them. Here they are in a folder
of their own. No other user can open it, and it is removed with the peer.
"""

import os
import tempfile
from pathlib import Path

TEMPORARY = Path("/tmp")
"""The folder that Hivemind uses. A socket's path may have 103 bytes (macOS), and other temporary paths are long."""


def make_socket_folder() -> Path:
    """Make a folder for the sockets of this process's p2pd."""
    return Path(tempfile.mkdtemp(prefix=f"swarm_{os.getpid()}_", dir=TEMPORARY))
