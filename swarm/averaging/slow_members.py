"""Finds members that hold all others up for far too long, round after round.

Lines at home differ, and a slow one is welcome: averaging can run beside computing, and takes as long as the slowest
line needs. But all may wait for one member far longer than for all other members, and than computing takes. Such a
member costs the swarm more than it gives, whether its line is bad or it sends so little on purpose.

How long the others need is no measure by itself. The more peers there are, the less each of them computes for an
update, and compared with fast lines every line at home is slow. So a member that sends as fast as a usual line at home
is never too slow, unless the organiser asks for faster lines (`--slowest-line-mbps`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hivemind.p2p import PeerID

SLOW_SECONDS = 3.0
"""A member that is waited for less than this is never too slow."""
TIMES_SLOWER = 2.0
"""How much longer than everything else in an update the wait for one member may be: the update takes three times as
long then."""
USUAL_MBPS = 4.0
"""Megabits per second of a usual line, on the average over an exchange. A member that sends as fast is not left out,
however fast the others are."""
MAX_SLOW_ROUNDS = 3
"""Slow rounds in a row after which a member is left out, and again after each further one until it was in time."""
MAX_REMEMBERED = 4096
"""Most members of which slow rounds are remembered: identities cost a stranger nothing."""


class SlowMembers:
    """Counts the rounds in a row in which a member was too slow, also from its first round on.

    Args:
        slowest_line_mbps: a member that sends as fast as this is never too slow
    """

    def __init__(self, slowest_line_mbps: float = USUAL_MBPS) -> None:
        self._slowest_bytes_per_second = slowest_line_mbps * 1e6 / 8
        self._slow_rounds: dict[PeerID, int] = {}

    def note(
        self,
        members: Collection[PeerID],
        waited_seconds: Mapping[PeerID, float],
        exchange_seconds: float,
        compute_seconds: float,
        num_bytes: Mapping[PeerID, float],
    ) -> set[PeerID]:
        """Take in a round that has ended; returns the members that are too slow.

        Args:
            members: the other members that took part
            waited_seconds: how long this peer has waited for each, as of `StripedAllReduce.waited_seconds`
            exchange_seconds: how long the whole exchange took
            compute_seconds: how long this peer has computed for the update
            num_bytes: bytes that each member sends in such an exchange

        Returns:
            members that are left out from now on
        """
        too_slow = set()
        for peer in members:
            waited = waited_seconds.get(peer, 0.0)
            otherwise = max(exchange_seconds - waited, compute_seconds)
            is_usual = num_bytes[peer] >= self._slowest_bytes_per_second * exchange_seconds
            if is_usual or waited < max(SLOW_SECONDS, TIMES_SLOWER * otherwise):
                self._slow_rounds.pop(peer, None)
                continue
            self._slow_rounds[peer] = self._slow_rounds.get(peer, 0) + 1
            if self._slow_rounds[peer] >= MAX_SLOW_ROUNDS:
                too_slow.add(peer)
        self._forget_some()
        return too_slow

    def _forget_some(self) -> None:
        while len(self._slow_rounds) > MAX_REMEMBERED:
            self._slow_rounds.pop(next(iter(self._slow_rounds)))
