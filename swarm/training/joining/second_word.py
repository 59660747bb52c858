"""Whether the swarm has gone on without this peer, by the word of more than one.

Who leads says so to everybody that comes to a round too late. It could say it to all, go on by itself, and have a
history and averages of its own to show: all would hold its weights. So a peer that holds the same weights as another
member, with which it has trained, waits until a second one is further, or in a round that it has missed itself. If all
have spoken since and nobody is, it has been told what is not so.
"""

from __future__ import annotations

from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from swarm.membership.progress_tracker import ProgressTracker

MARGIN_SECONDS = 0.5
"""That a record has to be younger than what was said: clocks differ a little."""


class SecondWord:
    """Of one attempt to catch up.

    Args:
        tracker: knows what the others say
        leader: who has said that the swarm has gone on; None: this peer has found it out itself
    """

    def __init__(self, tracker: ProgressTracker, leader: PeerID | None = None):
        self._tracker, self.leader, self._since = tracker, leader, get_dht_time()

    def is_there(self, donor: PeerID, lineage: bytes) -> bool:
        """Whether another one than the donor has made the update that this peer would make with its average, or nobody
        has to.

        Args:
            lineage: that the update leads to, as the donor says
        """
        swarm = self._tracker.swarm
        if not swarm.shares_weights({donor, self.leader}):
            return True
        next_step = swarm.own.step + 1
        others = [record for peer, record in swarm.known.items() if peer not in (donor, self.leader)]
        return any(
            record.step > next_step or (record.step == next_step and record.lineage == lineage) for record in others
        )

    @property
    def is_denied(self) -> bool:
        """Whether all others with which this peer has trained have spoken since it was told, and none has gone on."""
        swarm, own = self._tracker.swarm, self._tracker.own
        if not swarm.shares_weights({self.leader}):
            return False
        others = [record for peer, record in swarm.known.items() if peer != self.leader]
        have_spoken = all(record.time > self._since + MARGIN_SECONDS for record in others)
        return have_spoken and not any(record.step > own.step or record.is_in_round for record in others)
