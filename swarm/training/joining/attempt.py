"""What one attempt to catch up is for: it is handed to everything that takes part in it."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from hivemind.p2p import PeerID

from swarm.training.joining.corroboration import Corroboration

Result = TypeVar("Result")
Steps = Generator[Future | None, None, Result]
"""Steps of an attempt: the next one can be taken when the future that was yielded is done, or after a while."""


class Progress(Enum):
    """What has come of an attempt to catch up so far."""

    NOTHING = "it goes on, or there is none"
    IN_VAIN = "it has ended, and nothing has changed"
    OTHER_WEIGHTS = "this peer holds other weights than before"


@dataclass(frozen=True)
class Attempt:
    """An attempt to catch up: whose state this peer wants, for how long it tries, and whom it believes.

    Args:
        donor: whose state this peer takes over; None: that of whose counts more
        timeout_seconds: seconds for which this peer looks for somebody who hands over a state
        joins: this peer has never trained: it is worth a long wait, and an error if nothing comes of it
        is_told: the swarm has gone on, said who leads it
        corroboration: which witnesses must confirm the leader's claim that the swarm has gone on
    """

    donor: PeerID | None
    timeout_seconds: float
    joins: bool
    is_told: bool
    corroboration: Corroboration

    @property
    def may_listen(self) -> bool:
        """Whether this peer may go to the next round before it has its weights: else it is in rounds of its own."""
        return self.donor is None and (self.joins or self.is_told)
