"""What members sign in a round with checked averages: what they have sent, and what they have averaged.

A *commitment* is a sender's signature, for one reducer, over the parts that it gave. A *receipt* is a reducer's
signature, for all members, over the parts that it was given and the averages that it made of them. Both are over hashes
of encoded bytes, so it does not matter which codec made them. They are signed with the key of which the peer id is the
hash. Such a signature takes 0.2 ms and its check 0.02 ms. A key that only lives as long as a process (Ed25519: 0.02 ms
and 0.06 ms) would make a round of three to eight members one to two milliseconds shorter. But it would be one more key
to certify.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from msgspec import Meta

from swarm.network.signed_records import MAX_SUBKEY_BYTES, peer_of
from swarm.protocol.messages import MAX_GROUP_SIZE
from swarm.protocol.wire import LINEAGE_BYTES, from_wire, to_wire

HASH_BYTES = 32
MAX_PARTS = 2**16
"""Most parts of one share in one stripe."""
MAX_SIGNATURE_BYTES = 1024
MAX_COMMITMENT_BYTES = 2**12
MAX_RECEIPT_BYTES = 2**16
COMMITMENT = "swarm parts 1"
"""Beginning of what a sender signs, so that it cannot be taken for another statement."""
RECEIPT = "swarm averages 1"
"""Beginning of what a reducer signs."""

Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Hashes = Annotated[list[Hash], Meta(max_length=MAX_PARTS)]
StripeName = Annotated[bytes, Meta(min_length=LINEAGE_BYTES, max_length=LINEAGE_BYTES)]
_Owner = Annotated[bytes, Meta(max_length=MAX_SUBKEY_BYTES)]
_Signature = Annotated[bytes, Meta(max_length=MAX_SIGNATURE_BYTES)]
_Counted = tuple[Annotated[int, Meta(ge=0, le=MAX_PARTS)], Hash, bool]
_COMMITMENT = msgspec.msgpack.Decoder(tuple[_Owner, _Signature])
_RECEIPT = msgspec.msgpack.Decoder(
    tuple[StripeName, Hash, Annotated[list[_Counted], Meta(max_length=MAX_GROUP_SIZE)], _Owner, _Signature]
)


def hash_of(tensor: runtime_pb2.Tensor) -> bytes:
    """The hash of an encoded part, 32 bytes: of all that decoding it depends on."""
    form = to_wire(list(tensor.size), tensor.dtype, tensor.compression, tensor.requires_grad, tensor.chunks)
    found = hashlib.sha256(form)
    found.update(tensor.buffer)
    return found.digest()


def root_of(hashes: Iterable[bytes]) -> bytes:
    """One hash over the hashes of several parts, in their order."""
    return hashlib.sha256(b"".join(hashes)).digest()


def owner_of(key: RSAPrivateKey) -> bytes:
    """The public key, in the form in which it names the owner of records."""
    return b"[owner:" + key.get_public_key().to_bytes() + b"]"


def check_signature(owner: bytes, signature: bytes, content: bytes) -> PeerID:
    """The peer that has signed this content.

    Raises:
        ValueError: no peer has signed it
    """
    peer = peer_of(owner)
    if peer is None or not _public_key(owner).verify(content, signature):
        raise ValueError("it is not signed by the peer that it names")
    return peer


@lru_cache(maxsize=1024)
def _public_key(owner: bytes) -> RSAPublicKey:
    return RSAPublicKey.from_bytes(owner.removeprefix(b"[owner:").removesuffix(b"]"))


def commit(key: RSAPrivateKey, stripe: bytes, reducer: PeerID, root: bytes) -> bytes:
    """A sender's commitment: its signature for having given a reducer these parts."""
    return to_wire(owner_of(key), key.sign(to_wire(COMMITMENT, stripe, reducer.to_bytes(), root)))


def check_commitment(data: bytes, sender: PeerID, stripe: bytes, reducer: PeerID, root: bytes) -> None:
    """Check a commitment.

    Raises:
        ValueError: it is not this sender's signature for these parts
    """
    owner, signature = from_wire(_COMMITMENT, data, MAX_COMMITMENT_BYTES)
    if check_signature(owner, signature, to_wire(COMMITMENT, stripe, reducer.to_bytes(), root)) != sender:
        raise ValueError("it is signed by another peer")


@dataclass(frozen=True)
class Counted:
    """What counted of one member in one share, as its reducer says.

    Args:
        num_parts: parts that it gave, before it was lost if it was; 0 for a member without samples
        root: root of their hashes
        is_signed: whether the member has sent its commitment to them
    """

    num_parts: int = 0
    root: bytes = root_of(())
    is_signed: bool = False


@dataclass(frozen=True)
class Receipt:
    """A reducer's signed statement about its share of one stripe; the same for all members.

    Args:
        stripe: name of the stripe: a hash that names the round, its members and their weights as well
        averages: root of the hashes of all averages
        counted: what counted of each member, in the order of the group
        reducer: the member that has signed it
        data: the receipt as it travels
    """

    stripe: bytes
    averages: bytes
    counted: tuple[Counted, ...]
    reducer: PeerID
    data: bytes

    @classmethod
    def sign(cls, key: RSAPrivateKey, stripe: bytes, averages: bytes, counted: Sequence[Counted]) -> Receipt:
        """Sign this peer's own receipt."""
        said = [(one.num_parts, one.root, one.is_signed) for one in counted]
        owner, signature = owner_of(key), key.sign(to_wire(RECEIPT, stripe, averages, said))
        return cls(stripe, averages, tuple(counted), peer_of(owner), to_wire(stripe, averages, said, owner, signature))

    @classmethod
    def from_bytes(cls, data: bytes) -> Receipt:
        """Read a receipt, and check its signature.

        Raises:
            ValueError: it is malformed, or its signature is wrong
        """
        stripe, averages, said, owner, signature = from_wire(_RECEIPT, data, MAX_RECEIPT_BYTES)
        reducer = check_signature(owner, signature, to_wire(RECEIPT, stripe, averages, said))
        return cls(stripe, averages, tuple(Counted(*one) for one in said), reducer, data)

    def contradicts(self, other: Receipt) -> bool:
        """Whether no honest reducer signs both."""
        is_of_the_same = (self.stripe, self.reducer) == (other.stripe, other.reducer)
        return is_of_the_same and (self.averages, self.counted) != (other.averages, other.counted)
