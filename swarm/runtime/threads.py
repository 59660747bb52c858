"""Keeps peers that share the cores of one machine from slowing each other down."""

import os
from collections.abc import MutableMapping

POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
FEW_SPINS = "2000"
"""Looks of a waiting thread before it sleeps: some microseconds."""


def yield_cores(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads that wait for each other in a computation sleep soon. Call it before torch is imported.

    GNU's OpenMP lets them look again and again for some milliseconds, and takes a core from another process meanwhile.
    Two peers on two cores, with two threads each, were more than four times slower by that. A peer alone on its machine
    showed no loss. If the user has set the wait policy or the number of spins, that stays.
    """
    if POLICY not in environment:
        environment.setdefault(SPINS, FEW_SPINS)
