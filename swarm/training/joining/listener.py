"""How a joiner that is nearly done listens to the next round: it gives nothing, and gets the average as members do.

A joiner downloads a state, and then the averages of the updates that were made meanwhile. Over a line at home, averages
of a large model take longer than a swarm waits for any peer. The next group would close without the joiner, and so
would the one after that. So it comes to the round before it has the weights, and downloads what it lacks while the
round runs. From then on it is a member like all others, and no member has waited for it.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import CancelledError
from dataclasses import replace

from hivemind.utils import get_logger

from swarm.averaging.commands import RunRound
from swarm.protocol.messages import Behind, Blame, OtherOrders, RoundEnded, Ticket
from swarm.runtime.async_utils import wait_a_little
from swarm.training.own_peer import OwnPeer
from swarm.training.rounds.inflight_round import InflightRound
from swarm.training.throughput import Work

logger = get_logger(__name__)

LISTEN_BYTES = 32 * 2**20
"""Smallest vector, in bytes of fp32, for which a peer listens. A smaller one arrives while a group is held open."""
NEAR_SECONDS = 30.0
"""Expected seconds until a download is done at which a peer begins to listen."""


class Listener:
    """Takes part in a round before this peer has the weights of that round; one round at a time.

    Args:
        own: this peer; it can listen only if its rounds run beside the training
    """

    def __init__(self, own: OwnPeer):
        self._control, self._version = own.control, own.version
        self._averager, self._tracker, self._options = own.averager, own.tracker, own.options
        is_large = own.averager.vector.nbytes >= LISTEN_BYTES
        self._is_able = own.averaging.overlaps and own.averager.can_listen and is_large
        self._round: InflightRound | None = None
        self._least_step = 0

    def begin(self) -> None:
        """Go to the round that comes next, unless this peer is in one already."""
        if not self._is_able or self._is_under_way:
            return
        others = [member for member in self._tracker.swarm.members if member.peer_id != self._tracker.peer_id]
        step = max(self._least_step, self._tracker.swarm.next_round)
        if others:
            self._averager.vector.zero_()
            self._control.look(self._version.step)
            client_mode, digest = self._tracker.own.client_mode, self._control.orders.digest(step)
            ticket = Ticket.of_listener(step, client_mode, digest, self._control.pace(step))
            order = RunRound(ticket, others, self._control.target(step))
            self._round = InflightRound(self._averager, order, self._options, Work())

    @property
    def _is_under_way(self) -> bool:
        """Whether there is a round to listen to; one that has failed is forgotten."""
        if self._round is None:
            return False
        if self._round.future.done() and (error := self._round.future.exception()) is not None:
            logger.debug(f"listened to the round of step {self._round.ticket.step} in vain: {error!r}")
            self._least_step = error.step if isinstance(error, Behind) else 0
            if isinstance(error, RoundEnded):  # to a peer that computes nothing, all members look slow
                spoilt = {peer: what for peer, what in error.blamed.items() if what is not Blame.TOO_SLOW}
                self._tracker.blame(spoilt)
            if isinstance(error, OtherOrders):
                self._control.take(error.signed)
            self._round = None
        return self._round is not None

    def is_at(self, step: int) -> bool:
        """Whether the peer listens to the round that ends this step, or has its average."""
        return self._is_under_way and self._round.ticket.step == step

    def take(self, step: int, lineage: bytes) -> InflightRound | None:
        """Stop listening: return the round if this peer has the weights of its step by now, else cancel it.

        Args:
            step: the step of this peer's weights
            lineage: their lineage, which the round's result is checked against later
        """
        listened, is_at = self._round, self.is_at(step)
        self._round, self._least_step = None, 0
        if listened is None:
            return None
        if not is_at:
            self._averager.cancel_round()
            self._wait_until_over(listened)
            return None
        listened.ticket = replace(listened.ticket, lineage=lineage)
        return listened

    def _wait_until_over(self, listened: InflightRound) -> None:
        """Wait until the averaging process no longer writes the vector, nor copies it for other peers.

        The trainer writes its own gradients there next.
        """
        until = time.monotonic() + self._averager.timeouts.hangs_seconds
        while not listened.future.done() and self._averager.is_alive() and time.monotonic() < until:
            with contextlib.suppress(CancelledError):
                wait_a_little(listened.future)

    def leave(self) -> None:
        """Listen no longer."""
        if self._round is not None:
            self._averager.cancel_round()
            self._round = None
