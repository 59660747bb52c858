"""What a peer says of the state that it holds: just enough for other peers to tell whether they hold the same state."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from swarm.protocol.wire import Lineage, Sketch, Step

DIGEST_BYTES = 16

Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]


class Attestation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one peer says of its state at one step. It is a field of the peer's progress record.

    Args:
        step: global updates that the state has seen
        lineage: lineage of its weights
        digest: digest of everything that peers have in common at this step; equal only if every bit is. Empty if it was
            not computed, since that reads the whole state
        sketch: sketch of its weights (`swarm.state_sync.weight_sketch`). It tells how far they are from other peers'
            weights, even if other hardware rounds differently. Empty if they are not finite
    """

    # No field has a default: else msgspec would accept an array that ends too early.
    step: Step
    lineage: Lineage
    digest: Digest
    sketch: Sketch

    def __post_init__(self) -> None:
        if len(self.digest) not in (0, DIGEST_BYTES):
            raise ValueError("a digest of another length")
        if not all(map(math.isfinite, self.sketch)):
            force_setattr(self, "sketch", ())
