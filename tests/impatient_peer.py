"""`python -m tests.impatient_peer`: a peer that waits a second, not half a minute, until it goes on alone."""

import os
import sys

from swarm import comeback
from swarm.peer import main

if __name__ == "__main__":
    comeback.ALONE_SECONDS = 1.0
    status = main()
    sys.stdout.flush()
    os._exit(status)
