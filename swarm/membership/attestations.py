"""What other peers have said about the states that they held at their last steps, and which states these were."""

from __future__ import annotations

from collections.abc import Mapping

from hivemind.p2p import PeerID

from swarm.membership.progress_record import PeerProgress
from swarm.protocol.attestation import Attestation
from swarm.protocol.messages import MAX_GROUP_SIZE

MAX_KEPT, MAX_HELD = 16, 64
"""Attestations, and held states (step and lineage), that are remembered of each peer."""


class Attestations:
    """Attestations and held states of the peers that have a record now.

    One thread writes, others read: both mappings are replaced as a whole.
    """

    def __init__(self) -> None:
        self._said: dict[PeerID, dict[tuple[int, bytes], Attestation]] = {}
        self._held: dict[PeerID, dict[tuple[int, bytes], None]] = {}

    def note(self, records: Mapping[PeerID, PeerProgress]) -> None:
        """Take in the present records. The first attestation of a peer for a step and lineage counts, no later one."""
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
        """Peers that have said lately that they hold these weights."""
        return {peer for peer, held in self._held.items() if (step, lineage) in held}

    def of(self, step: int, lineage: bytes) -> dict[PeerID, Attestation]:
        """Attestations of these weights, by peer."""
        found = {peer: told.get((step, lineage)) for peer, told in self._said.items()}
        return {peer: attestation for peer, attestation in found.items() if attestation is not None}
