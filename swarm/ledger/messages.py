"""What is said when a ledger goes from one peer to whoever wants it; each side reads it as a stranger's word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.ledger.lines import DIGEST_BYTES
from swarm.protocol.wire import from_wire, to_wire

PIECE_BYTES = 2**16
"""Of one message."""
ANSWER_BYTES = 2**23
"""Of one call; who wants more calls again."""
MAX_PEER_BYTES = 64
MAX_ASK_BYTES = 160

_Peer = Annotated[bytes, Meta(max_length=MAX_PEER_BYTES)]
_Ledger = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
_Place = Annotated[int, Meta(ge=0, lt=2**53)]
_ASK = msgspec.msgpack.Decoder(tuple[_Peer, _Ledger, _Place])
_HAVE = msgspec.msgpack.Decoder(tuple[_Ledger, _Place, _Place])


@dataclass(frozen=True)
class LedgerWish:
    """What is asked for.

    Args:
        peer: whose ledger; empty for that of the peer that is called. Others pass on what a peer in client mode says
        ledger: digest of the first line of the ledger of which there is a part already; empty if there is none
        begin: bytes of it that are there already
    """

    peer: bytes = b""
    ledger: bytes = b""
    begin: int = 0

    def to_bytes(self) -> bytes:
        return to_wire(self.peer, self.ledger, self.begin)

    @classmethod
    def from_bytes(cls, data: bytes) -> LedgerWish:
        """Raises ValueError: it is none"""
        return cls(*from_wire(_ASK, data, MAX_ASK_BYTES))


@dataclass(frozen=True)
class LedgerOffer:
    """What the peer answers first; pieces follow.

    Args:
        ledger: digest of its first line; empty if there is none
        begin: of the bytes that follow; 0 if another ledger was asked for
        size: of the whole, in bytes
    """

    ledger: bytes = b""
    begin: int = 0
    size: int = 0

    def to_bytes(self) -> bytes:
        return to_wire(self.ledger, self.begin, self.size)

    @classmethod
    def from_bytes(cls, data: bytes) -> LedgerOffer:
        """Raises ValueError: it is none"""
        offer = cls(*from_wire(_HAVE, data, MAX_ASK_BYTES))
        if offer.begin > offer.size or len(offer.ledger) not in (0, DIGEST_BYTES):
            raise ValueError("no offer of a ledger")
        return offer
