"""What becomes of the averages that this peer has made as a reducer in a round that failed for itself."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.averaging.allreduce import AllReduce


class Unsettled:
    """The last round that failed here. Others may have all they need, and make its update with this peer's averages.

    What had waited to be sent has reached them then, and what these averages left out takes its place. Whether they
    have made it is known when this peer comes to its next round.
    """

    def __init__(self) -> None:
        self._step, self._runners = 0, list[AllReduce]()

    def failed(self, step: int, runners: Sequence[AllReduce]) -> None:
        """The round that was to end this step has, in these stripes."""
        self._step, self._runners = step, [runner for runner in runners if runner.has_served]

    def come_to(self, step: int) -> None:
        """The round of this step begins; that of the same step is the one that failed, tried again."""
        if step > self._step:
            for runner in self._runners:
                runner.keep_left_out()
        self.forget()

    def forget(self) -> None:
        """This peer has taken over other weights, or it is settled."""
        self._runners = []
