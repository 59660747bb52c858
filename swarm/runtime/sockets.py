"""The sockets by which p2pd and its callers talk.

Hivemind leaves them in /tmp, where everybody could knock. Here they lie in a folder of their own, which nobody else can
open and which goes with the peer.
"""

import os
import tempfile
from pathlib import Path

TEMPORARY = Path("/tmp")
"""As Hivemind does: a socket's path may have 103 bytes (macOS), and other temporary folders have long ones."""


def make_socket_folder() -> Path:
    """For the sockets of this process's p2pd."""
    return Path(tempfile.mkdtemp(prefix=f"swarm_{os.getpid()}_", dir=TEMPORARY))
