"""The messages with which a ledger goes from a peer to any caller. Neither side trusts the other's message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.ledger.lines import DIGEST_BYTES
from swarm.protocol.wire import from_wire, to_wire

PIECE_BYTES = 2**16
"""Bytes of a ledger in one message."""
ANSWER_BYTES = 2**23
"""Bytes of a ledger in the answer to one call; a caller that wants more calls again."""
MAX_PEER_BYTES = 64
MAX_ASK_BYTES = 160

_Peer = Annotated[bytes, Meta(max_length=MAX_PEER_BYTES)]
_Ledger = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
_Place = Annotated[int, Meta(ge=0, lt=2**53)]
_ASK = msgspec.msgpack.Decoder(tuple[_Peer, _Ledger, _Place])
_HAVE = msgspec.msgpack.Decoder(tuple[_Ledger, _Place, _Place])


@dataclass(frozen=True)
class LedgerWish:
    """What a caller asks for.

    Args:
        peer: owner of the ledger; empty for the called peer. Server-mode peers pass on ledgers of client-mode peers
        ledger: digest of the first line of the ledger of which the caller has a part; empty if it has none
        begin: bytes of it that the caller has already
    """

    peer: bytes = b""
    ledger: bytes = b""
    begin: int = 0

    def to_bytes(self) -> bytes:
        return to_wire(self.peer, self.ledger, self.begin)

    @classmethod
    def from_bytes(cls, data: bytes) -> LedgerWish:
        """Raises ValueError: these bytes are no such message"""
        return cls(*from_wire(_ASK, data, MAX_ASK_BYTES))


@dataclass(frozen=True)
class LedgerOffer:
    """What the called peer answers first; pieces of the ledger follow.

    Args:
        ledger: digest of the ledger's first line; empty if there is no ledger
        begin: place of the first byte that follows; 0 if another ledger was asked for
        size: of the whole ledger, in bytes
    """

    ledger: bytes = b""
    begin: int = 0
    size: int = 0

    def to_bytes(self) -> bytes:
        return to_wire(self.ledger, self.begin, self.size)

    @classmethod
    def from_bytes(cls, data: bytes) -> LedgerOffer:
        """Raises ValueError: these bytes are no such message"""
        offer = cls(*from_wire(_HAVE, data, MAX_ASK_BYTES))
        if offer.begin > offer.size or len(offer.ledger) not in (0, DIGEST_BYTES):
            raise ValueError("no offer of a ledger")
        return offer
