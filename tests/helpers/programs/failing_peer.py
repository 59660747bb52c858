"""A peer whose third update goes wrong in a way that nobody could foresee."""

import os
import sys

from recipe.errors import InputError
from swarm.peer.main import main


def break_later() -> None:
    """The third update fails."""
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
