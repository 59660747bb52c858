"""Who was expected to end a step and did not come: it is not waited for again before something has changed."""

from __future__ import annotations

import math

from hivemind.p2p import PeerID

from swarm.distrust import Distrust

_NEVER = -1, math.nan


class Absences:
    """Of the other peers.

    Who was missed is expected again when it says that it came back, which is when its ``joined`` changes. Who was never
    in a group could say that all the time, and keep everybody waiting: after the second absence nobody waits for it for
    a while, each time longer, though it can come.
    """

    def __init__(self) -> None:
        self._missed: dict[PeerID, tuple[int, float]] = {}
        """Step at which it was missed, and when it had joined then."""
        self._strangers = Distrust()

    def note(self, peer: PeerID, step: int, joined: float, is_proven: bool) -> None:
        """It has not come to end this step.

        :param joined: as its record says; nan if there is none
        :param is_proven: it has been in a group since then
        """
        if not is_proven and -1 < self.missed_at(peer) < step:
            self._strangers.add(peer)
        self._missed[peer] = step, joined

    def came(self, peer: PeerID) -> None:
        """It is there."""
        self._missed.pop(peer, None)
        self._strangers.end(peer)

    def forget(self) -> None:
        """This peer itself has been away."""
        self._missed.clear()

    def missed_at(self, peer: PeerID) -> int:
        """The last step at which it was missed; -1 for none."""
        return self._missed.get(peer, _NEVER)[0]

    def is_over(self, peer: PeerID, joined: float) -> bool:
        """Whether it is waited for again, having joined then."""
        return self._missed.get(peer, _NEVER)[1] != joined and peer not in self._strangers
