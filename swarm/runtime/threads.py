"""Peers that share the cores of one machine do not keep each other from computing."""

import os
from collections.abc import MutableMapping

POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
FEW_SPINS = "2000"
"""Some microseconds."""


def yield_cores(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads of a computation that wait for each other fall asleep soon; call it before torch is imported.

    GNU's OpenMP lets them look again and again for some milliseconds, and takes a core from another process meanwhile.
    Two peers on two cores, with two threads each, were more than four times slower by that. A peer that has its
    machine for itself loses nothing that was seen. What a person has set stays.
    """
    if POLICY not in environment:
        environment.setdefault(SPINS, FEW_SPINS)
