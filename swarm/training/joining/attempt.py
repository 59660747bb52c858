"""The description of one attempt to catch up, which is passed to everything that takes part in it."""

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
"""The steps of an attempt, as a generator: the next step can be taken when the yielded future is done, or, for None,
after a while."""


class Progress(Enum):
    """What has come of an attempt to catch up so far."""

    NOTHING = "it goes on, or there is none"
    IN_VAIN = "it has ended, and nothing has changed"
    OTHER_WEIGHTS = "this peer holds other weights than before"


@dataclass(frozen=True)
class Attempt:
    """An attempt to catch up: which state this peer wants, for how long it tries, and which confirmation it needs.

    Args:
        donor: the donor whose state this peer takes over; None for any whose state counts more than this peer's
        timeout_seconds: seconds for which this peer looks for a donor that hands over a state
        joins: this peer has not trained since it started, so a long wait is worth while, and a failure is an error
        is_told: the swarm has gone on, as a leader, the records or this peer's group say
        corroboration: which witnesses must confirm the leader's claim that the swarm has gone on
    """

    donor: PeerID | None
    timeout_seconds: float
    joins: bool
    is_told: bool
    corroboration: Corroboration

    @property
    def may_listen(self) -> bool:
        """Whether this peer may listen to the next round before it has the weights; otherwise it has own rounds."""
        return self.donor is None and (self.joins or self.is_told)
