"""Seals: the last message of each share, a sender's commitment to the reducer or the reducer's receipt back.

To the all-reduce a seal is one more part, of no numbers. So it is waited for, given up and counted as any other part,
and takes no round trip of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils.crypto import RSAPrivateKey

from swarm.averaging.audit.statements import (
    MAX_COMMITMENT_BYTES,
    Counted,
    Receipt,
    check_commitment,
    commit,
    hash_of,
    root_of,
)
from swarm.protocol.messages import Group
from swarm.protocol.wire import to_wire

RAW = NoCompression()
"""The codec in which a reducer keeps its own contribution, which it never encodes for the network."""
_NOTHING = runtime_pb2.Tensor()


@dataclass(frozen=True)
class SignedPart:
    """A part that a member has given to a reducer, with its commitment to all its parts.

    Args:
        sender: the member that has given it
        hashes: of all parts that it gave to this reducer in this stripe
        commitment: its signature of them
        tensor: the part, encoded
    """

    sender: PeerID
    hashes: Sequence[bytes]
    commitment: bytes
    tensor: runtime_pb2.Tensor


def seal_with(statement: bytes) -> runtime_pb2.Tensor:
    """A part of no numbers that carries a statement."""
    return runtime_pb2.Tensor(buffer=statement, size=[0], dtype="float32")


class Seals:
    """What one peer signs, checks and keeps in one stripe of a round.

    Args:
        me: this peer
        group: the stripe
        key: this peer's private key
        keeps: whether to keep what averages are made of, for members that check it
    """

    def __init__(self, me: PeerID, group: Group, key: RSAPrivateKey, keeps: bool = True):
        self._me, self._group, self._key, self._keeps = me, group, key, keeps
        self._sent: dict[PeerID, dict[int, bytes]] = defaultdict(dict)
        """Hashes of the parts for each reducer, by their offsets."""
        self._received: dict[PeerID, list[bytes]] = defaultdict(list)
        """Hashes of the averages of each other reducer."""
        self._given: dict[PeerID, list[tuple[bytes, runtime_pb2.Tensor]]] = defaultdict(list)
        """The parts that each sender gave this reducer, with their hashes; the parts are empty if they are not kept."""
        self._commitments: dict[PeerID, bytes] = {}
        self._averages: dict[int, tuple[bytes, runtime_pb2.Tensor]] = {}
        """This reducer's averages by part, each with its hash."""
        self.receipts: dict[PeerID, Receipt] = {}
        """The receipts of all reducers with averages that have come, and of this one."""

    @property
    def stripe(self) -> bytes:
        """Name of the stripe."""
        return self._group.group_id

    def num_averages(self, reducer: PeerID) -> int:
        """How many averages of another reducer have come."""
        return len(self._received[reducer])

    # ---- as a sender ------------------------------------------------------------------------------------------------

    def sent(self, reducer: PeerID, offset: int, tensor: runtime_pb2.Tensor) -> None:
        """Note a part that goes to a reducer; may be called in a thread."""
        self._sent[reducer][offset] = hash_of(tensor)

    def commitment(self, reducer: PeerID) -> runtime_pb2.Tensor:
        """The seal with the commitment to a reducer; called after the last part."""
        return seal_with(commit(self._key, self.stripe, reducer, self._root_sent_to(reducer)))

    def _root_sent_to(self, reducer: PeerID) -> bytes:
        hashes = self._sent[reducer]
        return root_of(hashes[offset] for offset in sorted(hashes))

    def received(self, reducer: PeerID, average_hash: bytes) -> None:
        """Note the next average of a reducer."""
        self._received[reducer].append(average_hash)

    def check_receipt(self, reducer: PeerID, seal: runtime_pb2.Tensor) -> None:
        """Check a reducer's receipt, and keep it; called after its last average.

        Raises:
            ValueError: this reducer has not signed it, or it is not for what it sent, or not for what it was given
        """
        receipt = Receipt.from_bytes(seal.buffer)
        if receipt.reducer != reducer or receipt.stripe != self.stripe:
            raise ValueError("a receipt of another share")
        if receipt.averages != root_of(self._received[reducer]):
            raise ValueError("a receipt for other averages than those that it sent")
        if len(receipt.counted) != len(self._group.peer_ids):
            raise ValueError("a receipt for another group")
        own = self._sent[reducer]
        expected = Counted(len(own), self._root_sent_to(reducer), bool(own))
        if own and receipt.counted[self._group.peer_ids.index(self._me)] != expected:
            raise ValueError("a receipt for other parts than those that this peer gave")
        self.receipts[reducer] = receipt

    # ---- as a reducer -----------------------------------------------------------------------------------------------

    def given(self, sender: PeerID, part_hash: bytes, tensor: runtime_pb2.Tensor) -> None:
        """Note the next part of a sender."""
        self._given[sender].append((part_hash, self._kept(tensor)))

    def _kept(self, tensor: runtime_pb2.Tensor) -> runtime_pb2.Tensor:
        return tensor if self._keeps else _NOTHING

    def given_by_me(self, numbers: torch.Tensor) -> None:
        """Note the next part of this peer itself, shape [n]; may be called in a thread."""
        tensor = RAW.compress(numbers, CompressionInfo.from_tensor(numbers))
        self.given(self._me, hash_of(tensor), tensor)

    def take_commitment(self, sender: PeerID, seal: runtime_pb2.Tensor) -> None:
        """Check a sender's commitment, and keep it; called after its last part.

        Raises:
            ValueError: it is not the sender's signature for what it gave
        """
        if len(seal.buffer) > MAX_COMMITMENT_BYTES:
            raise ValueError("a commitment that is too long")
        check_commitment(seal.buffer, sender, self.stripe, self._me, self._root_given_by(sender))
        self._commitments[sender] = seal.buffer

    def _root_given_by(self, sender: PeerID) -> bytes:
        return root_of(part_hash for part_hash, _ in self._given[sender])

    def answered(self, part_index: int, tensor: runtime_pb2.Tensor) -> None:
        """Note the average of a part; may be called in a thread."""
        self._averages[part_index] = hash_of(tensor), self._kept(tensor)

    def receipt(self, num_counted: Mapping[PeerID, int]) -> runtime_pb2.Tensor:
        """The seal with this reducer's receipt; called after the last average, and may be called in a thread.

        Args:
            num_counted: for each sender, how many messages counted, the seal included
        """
        # A part that came after its sender was lost is kept here, but does not count.
        for sender, given in self._given.items():
            del given[num_counted.get(sender, 0) :]
        counted = [
            Counted(len(self._given[peer]), self._root_given_by(peer), peer in self._commitments or peer == self._me)
            for peer in self._group.peer_ids
        ]
        averages = root_of(self._averages[index][0] for index in sorted(self._averages))
        receipt = self.receipts[self._me] = Receipt.sign(self._key, self.stripe, averages, counted)
        return seal_with(receipt.data)

    def signed_part(self, sender: PeerID, part_index: int) -> SignedPart | None:
        """One part that another member has given to this reducer; None if it has not, or it was not kept."""
        given, commitment = self._given.get(sender, []), self._commitments.get(sender)
        if not self._keeps or commitment is None or part_index >= len(given):
            return None
        return SignedPart(sender, [part_hash for part_hash, _ in given], commitment, given[part_index][1])

    def show(self, part_index: int) -> bytes:
        """All that the average of one part was made of, to check with the receipt; may be called in a thread.

        Raises:
            ValueError: there is no such part, or it was not kept
        """
        if not self._keeps or part_index not in self._averages or self._me not in self.receipts:
            raise ValueError("there is no such part")
        inputs: list[tuple[list[bytes], bytes, bytes]] = []
        for peer in self._group.peer_ids:
            given = self._given[peer]
            part = given[part_index][1].SerializeToString() if part_index < len(given) else b""
            inputs.append(([part_hash for part_hash, _ in given], self._commitments.get(peer, b""), part))
        hashes = [self._averages[index][0] for index in sorted(self._averages)]
        return to_wire(hashes, self._averages[part_index][1].SerializeToString(), inputs)
