"""What becomes of the averages that this peer has made as a reducer in a round that failed for itself."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.averaging.allreduce import AllReduce


class Unsettled:
    """The last round that failed here. Others may have all they need, and make its update with this peer's averages.

    What had waited to be sent has reached them then, and what these averages left out takes its place. Whether they
    have made it is known when this peer holds the weights that came out of that round, and not where it has made an
    update alone or tries the round again.
    """

    def __init__(self) -> None:
        self._group_id, self._runners = b"", list[AllReduce]()

    def failed(self, group_id: bytes, runners: Sequence[AllReduce]) -> None:
        """The round of this group has, in these stripes."""
        self._group_id, self._runners = group_id, [runner for runner in runners if runner.has_served]

    def holds(self, lineage: bytes | None) -> None:
        """This peer has weights of this lineage: the name of the group whose round they came out of."""
        if self._runners and lineage == self._group_id:
            for runner in self._runners:
                runner.keep_left_out()
            self.forget()

    def forget(self) -> None:
        """The round is tried again, or this peer has gone another way."""
        self._runners = []
