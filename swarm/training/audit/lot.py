"""How often a peer recomputes a micro-batch that another member claims to have computed.

With m micro-batches per update, a chance of m / 100 costs a hundredth of all computing. Each of N equal members draws
one of the N - 1 others, so the work of each is checked with that chance, too. A member that computes a share q of what
it claims passes a check with a chance of q. So a first difference is found within u updates with a chance of
1 - (1 - chance (1 - q))^u.
"""

from __future__ import annotations

WORK_SHARE = 0.01
"""Share of all computing that goes into recomputing other members' work."""
LEAST_CHANCE = 0.07
"""Least chance of a check in an update. It finds a member that computes half of what it claims within 100 updates, with
a chance of 0.97."""
MOST_SHARE = 0.02
"""Largest share of all computing that checks take. It limits `LEAST_CHANCE` where updates have few micro-batches."""


def chance_of_an_audit(num_micro_batches: int) -> float:
    """The chance that a peer recomputes a micro-batch of another member in an update for which it computed so many."""
    return min(1.0, max(WORK_SHARE * num_micro_batches, min(LEAST_CHANCE, MOST_SHARE * num_micro_batches)))
