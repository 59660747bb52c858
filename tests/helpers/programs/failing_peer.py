"""A peer whose third update fails for a reason that no code foresees."""

import os
import sys

from recipe.errors import InputError
from swarm.peer.main import main


def break_later() -> None:
    """Make the third update fail."""
    from swarm.training.coordinator import Coordinator

    honest = Coordinator.go_on

    def go_on_or_fail(self) -> None:
        honest(self)
        if self.step == 3:
            raise InputError("The third update cannot work: leave it out.")

    Coordinator.go_on = go_on_or_fail


if __name__ == "__main__":
    break_later()
    status = main()
    sys.stdout.flush()
    os._exit(status)
