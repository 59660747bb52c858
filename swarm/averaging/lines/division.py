"""Divides the vector into shares of the reducers, by what members have measured of their lines.

One of N members that reduces a share x of the vector V sends (1 - x) V to the other reducers, and x V to each of the
others. Together that is V (1 + x (N - 2)). A member without samples sends x V (N - 1). So in T seconds a line that
carries L bytes a second leaves room for x = (T L / V - 1) / (N - 2). The shares are those of the smallest T in which
all of V is reduced.

No member decides, and none has to be trusted: shares are a function of the group's tickets, which are the same on all
members. The calculation uses whole numbers only, so that all machines find the same shares, bit by bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from hivemind.p2p import PeerID

from swarm.protocol.messages import Group

WHOLE = 2**16
"""The sum of all shares, unless all are equal: then each share is 1."""
LEAST_SAVED = 6
"""Shares stay equal, unless unequal ones save at least one part in so many of the time. Lines are not known better than
that. Where all lines are alike, shares that followed every change would cost more than they save."""
_UNIT = 2**50
"""Resolution of T: to send V over a line of speed 1 takes `_UNIT` units of time."""


def shares_of(group: Group) -> dict[PeerID, int]:
    """The share of each server-mode member, relative to the sum of all shares, in the group's order; some may be 0."""
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
    """The shares of a group's server-mode members, relative to the sum of all shares.

    None of k such members gets more than 2 / (k + 1) of the vector, whatever it says of its line. For three members
    that is half; it is always less than twice an equal share. A line that is not known counts as the middle one of
    those that are known.

    Args:
        lines: what each of them can send, in any unit; 0: not known
        gives: whether each has samples, and so sends parts as well
        num_members: members of the group, client-mode members included
    """
    equal = (1,) * len(lines)
    known = sorted(line for line in lines if line)
    if not known or num_members <= 2:  # each of two sends one vector, whatever the shares are
        return equal
    speeds = [line or known[(len(known) - 1) // 2] for line in lines]
    if len({*zip(speeds, gives, strict=True)}) == 1:
        return equal
    most = 2 * WHOLE // (len(lines) + 1)

    def room(time: int) -> list[int]:
        """What each can reduce in so many units of time, in parts of `WHOLE`."""
        found = []
        for speed, has_parts in zip(speeds, gives, strict=True):
            left = (time * speed - has_parts * _UNIT) * WHOLE // ((num_members - 1 - has_parts) * _UNIT)
            found.append(min(most, max(0, left)))
        return found

    shares = room(bisect_left(range(num_members * _UNIT), WHOLE, key=lambda time: sum(room(time))))
    # One unit of time earlier the sum was too small, and in one unit each share grows by at most one. So the surplus is
    # at most the number of shares above 0: the slowest of these members give one back each.
    slowest_first = sorted((index for index in range(len(shares)) if shares[index]), key=lambda index: speeds[index])
    for index in slowest_first[: sum(shares) - WHOLE]:
        shares[index] -= 1

    def time_of(shares: Sequence[int]) -> int:
        """Units of time until all members have sent what they have to."""
        whole, found = sum(shares), []
        for share, speed, has_parts in zip(shares, speeds, gives, strict=True):
            sent = share * (num_members - 1) + (whole - share) * has_parts
            found.append(sent * _UNIT // (whole * speed))
        return max(found)

    saves_enough = LEAST_SAVED * time_of(shares) <= (LEAST_SAVED - 1) * time_of(equal)
    return tuple(shares) if saves_enough else equal
