"""What a peer says of the state that it holds: enough for others to tell whether they hold the same, and no more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from swarm.protocol.wire import Lineage, Sketch, Step

DIGEST_BYTES = 16

Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
Attested = tuple[Step, Lineage, Digest, Sketch] | None
"""As it travels; None as long as a peer has nothing to say."""


@dataclass(frozen=True)
class Attestation:
    """Of one peer, for its state at one step.

    Args:
        step: global updates that the state has seen
        lineage: of its weights
        digest: of all that peers have in common at this step; equal only where every bit is. Empty if it was not taken,
            since it costs a look at the whole state
        sketch: of its weights (`swarm.state_sync.weight_sketch`): tells how far they are from others, also where other
            hardware rounds otherwise; empty if they are not finite
    """

    step: int
    lineage: bytes
    digest: bytes
    sketch: tuple[float, ...] = ()

    def to_wire(self) -> Attested:
        """As a field of a message."""
        return self.step, self.lineage, self.digest, self.sketch

    @classmethod
    def from_wire(cls, attested: Attested) -> Attestation | None:
        """Of a field that was read with the bounds of `Attested`.

        Raises:
            ValueError: it has half a digest
        """
        if attested is None:
            return None
        step, lineage, digest, sketch = attested
        if len(digest) not in (0, DIGEST_BYTES):
            raise ValueError("a digest of another length")
        return cls(step, lineage, digest, tuple(sketch) if all(map(math.isfinite, sketch)) else ())
