"""How large a share of the vector each member reduces: by the lines that members have measured.

Of N members, one that reduces a share x of the vector V sends (1 - x) V to the other reducers, and x V to each of the
others: V (1 + x (N - 2)). One without samples sends x V (N - 1). So in T seconds a line that carries L bytes a second
leaves room for x = (T L / V - 1) / (N - 2), and shares are found by the smallest T in which all of V is reduced.

Nobody decides, and nobody has to be trusted: shares are a function of the group's tickets, which are the same on all
members. It calculates in whole numbers only, so that all machines find the same shares, bit by bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from hivemind.p2p import PeerID

from swarm.protocol.messages import Group

WHOLE = 2**16
"""Shares add up to it, unless all are equal."""
LEAST_SAVED = 6
"""Shares stay equal, unless others save one part in so many of the time. Lines are not known better than that, and
where all are alike, shares that followed every change would cost more than they save."""
_UNIT = 2**50
"""Resolution of T: sending V over a line of speed 1 takes `_UNIT` steps."""


def shares_of(group: Group) -> dict[PeerID, int]:
    """The share of each member that can be called, in the group's order; against the sum of all. Some may have none."""
    full = {peer: ticket for peer, ticket in group.members if not ticket.client_mode}
    lines = tuple(ticket.line_kbps for ticket in full.values())
    gives = tuple(ticket.samples > 0 for ticket in full.values())
    return dict(zip(full, divide(lines, gives, len(group.peer_ids)), strict=True))


def fractions_of(group: Group) -> dict[PeerID, float]:
    """The fraction of the vector that each member reduces."""
    shares = shares_of(group)
    return {peer: shares.get(peer, 0) / max(1, sum(shares.values())) for peer in group.peer_ids}


@lru_cache(maxsize=64)
def divide(lines: tuple[int, ...], gives: tuple[bool, ...], num_members: int) -> tuple[int, ...]:
    """Shares of members that can be called.

    None of k gets more than 2 / (k + 1) of the vector, whatever it says of its line: half of three, and less than twice
    an equal share. A line that is not known counts as the middle one of those that are.

    Args:
        lines: what each can send, in any unit; 0: not known
        gives: whether it has samples, and so sends parts as well
        num_members: of the group, with those that cannot be called
    """
    equal = (1,) * len(lines)
    known = sorted(line for line in lines if line)
    if not known or num_members <= 2:  # of two, each sends one vector, whatever the shares are
        return equal
    speeds = [line or known[(len(known) - 1) // 2] for line in lines]
    if len({*zip(speeds, gives, strict=True)}) == 1:
        return equal
    most = 2 * WHOLE // (len(lines) + 1)

    def room(time: int) -> list[int]:
        """What each can reduce until then."""
        found = []
        for speed, has_parts in zip(speeds, gives, strict=True):
            left = (time * speed - has_parts * _UNIT) * WHOLE // ((num_members - 1 - has_parts) * _UNIT)
            found.append(min(most, max(0, left)))
        return found

    shares = room(bisect_left(range(num_members * _UNIT), WHOLE, key=lambda time: sum(room(time))))
    # A step earlier it was too little, and in a step each gains one at most: so there are enough to give one back.
    slowest_first = sorted((index for index in range(len(shares)) if shares[index]), key=lambda index: speeds[index])
    for index in slowest_first[: sum(shares) - WHOLE]:
        shares[index] -= 1

    def time_of(shares: Sequence[int]) -> int:
        """Until all have sent what they have to."""
        whole, found = sum(shares), []
        for share, speed, has_parts in zip(shares, speeds, gives, strict=True):
            sent = share * (num_members - 1) + (whole - share) * has_parts
            found.append(sent * _UNIT // (whole * speed))
        return max(found)

    saves_enough = LEAST_SAVED * time_of(shares) <= (LEAST_SAVED - 1) * time_of(equal)
    return tuple(shares) if saves_enough else equal
