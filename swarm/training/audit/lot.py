"""How often a peer computes again what another member says that it has computed.

With m micro-batches an update, a chance of m / 100 costs a hundredth of all computing. N equal members draw one of the
N - 1 others each, so each one's work is looked at with that chance, too. Who computes a share q of what it claims
passes with a chance of q. So a first difference is found within u updates with a chance of 1 - (1 - chance (1 - q))^u.
"""

from __future__ import annotations

WORK_SHARE = 0.01
"""Share of all computing that goes into computing again what others have computed."""
LEAST_CHANCE = 0.07
"""Least chance of an audit in an update. With it, who computes half of what it claims is found within 100 updates, with
a chance of 0.95."""
MOST_SHARE = 0.02
"""Largest share of all computing that audits take, where updates have so few micro-batches that the least chance would
cost more."""


def chance_of_an_audit(num_micro_batches: int) -> float:
    """The chance that a peer that has computed so many for an update computes one of another member again."""
    return min(1.0, max(WORK_SHARE * num_micro_batches, min(LEAST_CHANCE, MOST_SHARE * num_micro_batches)))
