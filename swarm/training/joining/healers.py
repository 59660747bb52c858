"""The search for a donor of better weights, when this peer's are useless or other peers have refuted them."""

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
"""Updates that other peers may have made since they wrote their records, in a fast swarm."""


class Healers:
    """The peers that can replace this peer's weights, and its reaction to a leader that says its model is another one.

    Args:
        own: this peer
        probation: knows from which peers the weights came, and which have refuted them
    """

    def __init__(self, own: OwnPeer, probation: Probation):
        self._version, self._tracker = own.version, own.tracker
        self._probation, self._gradients = probation, own.gradients
        self._refusers: set[PeerID] = set()
        """Leaders that said they average another model."""

    @property
    def _has_first_weights(self) -> bool:
        """Whether this peer's weights are still those that the recipe gives to all peers."""
        return self._version.untouched and self._version.step == 0

    def find_healer(self, last_donor: PeerID | None) -> PeerID | None:
        """Find a donor that can replace weights from which only useless gradients come; None if there is none.

        Args:
            last_donor: the donor of the present weights, which is taken only if there is no other one

        Raises:
            InputError: the weights are not finite, and no other peer is there
        """
        donors = self._tracker.swarm.donors(min_step=self._version.step - RECORDS_LAG)
        weights = map(self._version.state.read, self._gradients.weights)
        if not self._tracker.others and not all(torch.isfinite(weight).all() for weight in weights):
            raise InputError(
                "The weights are not finite any more, and no other peer can replace them. Start again: training "
                "goes on from the newest checkpoint that is sound. If this happens again, lower --learning-rate."
            )
        if self._has_first_weights:
            return None  # these weights are the recipe's: no peer has better ones
        others = [donor for donor in donors if donor != last_donor] or donors
        return random.choice(others) if others else None  # by chance: the first one's weights may be bad, too

    def find_healer_of_refuted(self) -> PeerID | None:
        """Find a donor that can replace weights that other peers have refuted; None if there is none.

        It is one of the peers that refuted them, if possible, and never one from which the weights came.
        """
        donors = self._tracker.swarm.donors(min_step=self._version.step - RECORDS_LAG)
        others = [donor for donor in donors if donor not in self._probation.sources]
        refuters = [donor for donor in others if donor in self._probation.refuters]
        return random.choice(refuters or others) if others else None

    def refused_by(self, leader: PeerID) -> None:
        """Distrust a leader that says it averages another model: this peer has trained in the swarm and knows better.

        Raises:
            InputError: this peer still has its first weights, and all peers that can lead say so: they may be right
        """
        name = self._tracker.name_of(leader)
        self._refusers.add(leader)
        able = {peer for peer, record in self._tracker.others.items() if not record.client_mode}
        if self._has_first_weights and able <= self._refusers:  # a single one may be a stranger that lies
            raise InputError(
                f"{name} averages another model than this peer: start this peer again with --initial-peers alone, so "
                "that it takes the swarm's recipe."
            )
        logger.warning(f"Ignoring {name}, which wants to lead and says that it averages another model")
        self._tracker.trust.distrusted.add(leader)
