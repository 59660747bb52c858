"""`python -m tests.impatient_peer`: a peer that goes on alone after a second, or leaves ten after the last full one."""

import os
import sys

from swarm import comeback
from swarm.lean_imports import lean_imports
from swarm.peer import main

with lean_imports():
    from swarm import company

if __name__ == "__main__":
    comeback.ALONE_SECONDS = 1.0
    company.PATIENCE_SECONDS = 10.0
    status = main()
    sys.stdout.flush()
    os._exit(status)
