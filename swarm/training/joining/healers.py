"""Who can give this peer better weights than it holds, when these are of no use or others have refuted them."""

from __future__ import annotations

import random

import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from recipe.errors import InputError
from swarm.training.joining.probation import Probation
from swarm.training.own_peer import OwnPeer

logger = get_logger(__name__)

RECORDS_LAG = 2
"""Updates that others may have made since they wrote what they hold, in a fast swarm."""


class Healers:
    """The others who can replace what is wrong with this peer's weights, or say that its model is another one.

    Args:
        own: this peer
        probation: knows whence the weights came, and who has refuted them
    """

    def __init__(self, own: OwnPeer, probation: Probation):
        self._version, self._tracker = own.version, own.tracker
        self._probation, self._gradients = probation, own.gradients

    @property
    def _has_first_weights(self) -> bool:
        """Whether this peer's weights are still those that the recipe gives to all."""
        return self._version.untouched and self._version.step == 0

    def find_healer(self, last_donor: PeerID | None) -> PeerID | None:
        """Find somebody who can replace weights out of which nothing useful comes; None: nobody can.

        Args:
            last_donor: whom these weights came from; somebody else is better

        Raises:
            InputError: they are not finite, and nobody is there
        """
        donors = self._tracker.swarm.donors(min_step=self._version.step - RECORDS_LAG)
        weights = map(self._version.state.read, self._gradients.weights)
        if not self._tracker.others and not all(torch.isfinite(weight).all() for weight in weights):
            raise InputError(
                "The weights are not finite any more, and no other peer can replace them. Start again: training "
                "goes on from the newest checkpoint that is sound. If this happens again, lower --learning-rate."
            )
        if self._has_first_weights:
            return None  # these weights are the recipe's: nobody has better ones
        others = [donor for donor in donors if donor != last_donor] or donors
        return random.choice(others) if others else None  # the first one may be as ill as this peer

    def find_healer_of_refuted(self) -> PeerID | None:
        """Find somebody who can replace weights that others have refuted; None: nobody can.

        That is one of those others if possible, and nobody from whom the weights came.
        """
        donors = self._tracker.swarm.donors(min_step=self._version.step - RECORDS_LAG)
        others = [donor for donor in donors if donor not in self._probation.sources]
        refuters = [donor for donor in others if donor in self._probation.refuters]
        return random.choice(refuters or others) if others else None

    def refused_by(self, leader: PeerID) -> None:
        """Distrust a leader who says that it averages another model: who has trained in the swarm knows better.

        Raises:
            InputError: this peer has not
        """
        name = self._tracker.name_of(leader)
        if self._has_first_weights:
            raise InputError(
                f"{name} averages another model than this peer does: start it with the recipe of the swarm (give "
                "--initial-peers and nothing else)."
            )
        logger.warning(f"Ignoring {name}, which wants to lead and says that it averages another model")
        self._tracker.trust.distrusted.add(leader)
