"""`python -m swarm.peer`."""

from recipe.interrupts import end_silently, run_to_end

if __name__ == "__main__":
    end_silently()  # the imports below take a while

from swarm.peer.main import main

if __name__ == "__main__":
    run_to_end(main)
