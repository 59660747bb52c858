"""What the others have said of the states that they held at their last steps, and which these were."""

from __future__ import annotations

from collections.abc import Mapping

from hivemind.p2p import PeerID

from swarm.membership.progress_record import PeerProgress
from swarm.protocol.attestation import Attestation
from swarm.protocol.messages import MAX_GROUP_SIZE

MAX_KEPT, MAX_HELD = 16, 64
"""Of each peer: what it has said of states, and which it has said to hold."""


class Attestations:
    """Of those who have a record now; written by one thread, and read by others."""

    def __init__(self) -> None:
        self._said: dict[PeerID, dict[tuple[int, bytes], Attestation]] = {}
        self._held: dict[PeerID, dict[tuple[int, bytes], None]] = {}

    def note(self, records: Mapping[PeerID, PeerProgress]) -> None:
        """These are the records now. What a peer says of a step is what it has said of it first."""
        said, all_held = {}, {}
        for peer, record in [*records.items()][:MAX_GROUP_SIZE]:
            before, told = self._said.get(peer, {}), record.attested
            if told is not None and (told.step, told.lineage) not in before:
                before = dict([*before.items(), ((told.step, told.lineage), told)][-MAX_KEPT:])
            said[peer] = before
            held = self._held.get(peer, {})
            if (record.step, record.lineage) not in held:
                held = dict([*held.items(), ((record.step, record.lineage), None)][-MAX_HELD:])
            all_held[peer] = held
        self._said, self._held = said, all_held

    def holders(self, step: int, lineage: bytes) -> set[PeerID]:
        """Who has said lately that it holds these weights."""
        return {peer for peer, held in self._held.items() if (step, lineage) in held}

    def of(self, step: int, lineage: bytes) -> dict[PeerID, Attestation]:
        """Of these weights, by who says it."""
        found = {peer: told.get((step, lineage)) for peer, told in self._said.items()}
        return {peer: attestation for peer, attestation in found.items() if attestation is not None}
