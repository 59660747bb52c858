"""`python -m swarm.peer`."""

from recipe.interrupts import end_silently

if __name__ == "__main__":
    end_silently()  # the imports below take a while

import os
import sys

from swarm.peer.main import main

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # everything is written and every child has ended; taking torch apart would cost seconds
