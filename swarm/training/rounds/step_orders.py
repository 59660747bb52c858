"""The organiser's orders for the step for which this peer computes."""

from __future__ import annotations

import math

from hivemind.p2p import PeerID

from swarm.training.own_peer import OwnPeer


class StepOrders:
    """The organiser's orders for the step for which this peer computes.

    Args:
        own: this peer
    """

    def __init__(self, own: OwnPeer):
        self._control, self._version, self._tracker = own.control, own.version, own.tracker
        self.target = own.control.target(own.version.step)
        """Samples over all peers for the update that ends this step."""

    def follow(self) -> None:
        """Look at the newest orders, and follow them from now on, also in what this peer reports."""
        self._control.look(self._version.step)
        self.target = self._control.target(self._tracker.own.round)
        self._tracker.aim(self.target, self._control.total_steps(math.inf))

    @property
    def is_paused(self) -> bool:
        """Whether the run is paused at this step, and has not been ended meanwhile."""
        return self._control.orders.is_paused(self._tracker.own.round) and not self.is_over

    @property
    def has_nothing_to_compute(self) -> bool:
        """Whether the run is paused, or over."""
        return self.is_paused or self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the run ends at this step."""
        return self._control.is_over(self._tracker.own.round)

    def donor_of_missed(self) -> PeerID | None:
        """A donor whose updates followed orders that this peer learned of too late; None if there is none.

        Its lineage is another one than this peer's. Only the first call after such orders returns a donor.
        """
        if not self._control.take_missed():
            return None
        swarm, own = self._tracker.swarm, self._tracker.own
        donors = swarm.donors(min_step=self._version.step)
        return next((donor for donor in donors if swarm.records[donor].lineage != own.lineage), None)
