"""A peer that goes on alone after a second, or leaves ten or twenty seconds after the last server-mode peer."""

import os
import sys

from swarm.peer import rejoin as comeback
from swarm.peer.main import main
from swarm.runtime.imports import quick_imports

with quick_imports():
    from swarm.peer.callbacks import reachable_peer_check as company

if __name__ == "__main__":
    comeback.ALONE_SECONDS = 1.0
    company.PATIENCE_SECONDS, company.RETURN_SECONDS = 10.0, 20.0
    status = main()
    sys.stdout.flush()
    os._exit(status)
