"""What a peer says of the state that it holds: enough for others to tell whether they hold the same, and no more."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from swarm.protocol.wire import Lineage, Sketch, Step

DIGEST_BYTES = 16

Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]


class Attestation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of one peer, for its state at one step; a field of its progress record.

    Args:
        step: global updates that the state has seen
        lineage: of its weights
        digest: of all that peers have in common at this step; equal only where every bit is. Empty if it was not taken,
            since it costs a look at the whole state
        sketch: of its weights (`swarm.state_sync.weight_sketch`): tells how far they are from others, also where other
            hardware rounds otherwise; empty if they are not finite
    """

    # No field has a default: else an array that ends too early would be one.
    step: Step
    lineage: Lineage
    digest: Digest
    sketch: Sketch

    def __post_init__(self) -> None:
        if len(self.digest) not in (0, DIGEST_BYTES):
            raise ValueError("a digest of another length")
        if not all(map(math.isfinite, self.sketch)):
            force_setattr(self, "sketch", ())
