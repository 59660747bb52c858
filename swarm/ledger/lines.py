"""The lines of a ledger: what one peer says of the updates that it took part in, each bound to the line before it.

A ledger is a file of JSON lines. Each line has its number and the SHA-256 of the line before it, so a signature stands
for all lines above it. An update has everything of which its group's name was made. A reader makes the name again, so
no member's claim can be changed.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPublicKey
from msgspec import Meta, Struct

from swarm.network.signed_records import MAX_KEY_BITS, MAX_SUBKEY_BYTES, peer_of
from swarm.protocol.auto_mode import Pace
from swarm.protocol.certificates import KEY_BYTES, MAX_CERTIFICATE_BYTES, MAX_NAME_LENGTH
from swarm.protocol.messages import ANY_LINEAGE, MAX_GROUP_SIZE, NOWHERE, BackTo, Group, LineKbps, Ticket, TicketNonce
from swarm.protocol.orders import DIGEST_BYTES as ORDERS_BYTES
from swarm.protocol.round_report import StepReport
from swarm.protocol.run_names import PREFIX_PATTERN
from swarm.protocol.wire import MAX_SKETCH, PEER_ID_BYTES, Lineage, Name, Samples, Step, to_wire

FORMAT = 1
KIND = "swarm ledger 1"
"""Beginning of all that is signed here, so that such a signature counts for nothing else."""
DIGEST_BYTES = 32
MAX_LINE_BYTES = 2**20
"""Enough for a group of 1,024 members with sketches."""
MAX_LINES = 2**40
MAX_KEY_LENGTH = MAX_SUBKEY_BYTES - len("[owner:]")
MAX_RUN_LENGTH = 256
MAX_PROTOCOL = 2**16
MAX_SIGNATURE_LENGTH = 4 * -(-MAX_KEY_BITS // 8 // 3) + 4
CLIENT_MODE, LISTENS, WARM = 1, 2, 4
"""Flags for what a member's ticket said."""

_Number = Annotated[int, Meta(ge=0, lt=MAX_LINES)]
_Before = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
_Peer = Annotated[str, Meta(min_length=40, max_length=80)]
_Seconds = Annotated[float, Meta(ge=0, le=2**33)]
_State = tuple[Step, Lineage, Lineage]


class NotALine(ValueError):  # noqa: N818 (reads as what it says)
    """These bytes are no line of a ledger."""


class Line(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """The fields that all lines have.

    Args:
        n: its number; line 0 begins a ledger
        before: SHA-256 of the line before it, without its end; empty in the first one
    """

    n: _Number
    before: _Before


class Start(Line, frozen=True, tag="start"):
    """The line of a peer that begins, or was started again.

    Args:
        time: seconds since 1970, by its own clock
        format: version of the format of the lines
        run: start of the run's keys in the DHT, which names run, recipe and organiser
        organiser: public key of the organiser; empty in an open run
        key: the peer's public key, as OpenSSH writes it; its peer id is the hash of it
        name: under which the peer is shown
        protocol: wire protocol of its program; 0 if the program has not said it
    """

    time: _Seconds
    format: Literal[1]
    run: Annotated[str, Meta(max_length=MAX_RUN_LENGTH, pattern=PREFIX_PATTERN)]
    organiser: Annotated[bytes, Meta(max_length=KEY_BYTES)]
    key: Annotated[str, Meta(max_length=MAX_KEY_LENGTH)]
    name: Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
    protocol: Annotated[int, Meta(ge=0, lt=MAX_PROTOCOL)] = 0

    @property
    def peer(self) -> PeerID | None:
        """Owner of the ledger; None if the key is not sound."""
        return peer_of(b"[owner:" + self.key.encode(errors="replace") + b"]")


class Certified(Line, frozen=True, tag="member"):
    """The line for a certificate, or a new one, that a member has shown.

    Args:
        certificate: as the organiser has signed it (`swarm.protocol.certificates`)
    """

    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]


class Claim(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a member brought to a group, as its ticket said.

    Args:
        peer: its peer id
        samples: in its gradient
        loss: mean over them; null if it is not finite
        flags: client mode 1, listens 2, PowerSGD is warm 4
        sketch: of its weights, every eighth update
        receipts: hash over what reducers have signed in the round before; empty if it has none
        accuses: name of a proof against a member; empty if it has none
        back_to: step of the state to which it wanted to go back; -1 for none
        pace: what it had measured, with `--averaging auto`
        line_kbps: speed of its line, in kbit/s; 0 if it is not known
        work: name of the list of what it had computed
        doubts: name of a member that had done other work than it claimed; empty if there is none
        nonce: random bytes of this ticket
    """

    peer: _Peer
    samples: Samples
    loss: float | None
    flags: Annotated[int, Meta(ge=0, lt=8)]
    sketch: Annotated[tuple[float, ...], Meta(max_length=MAX_SKETCH)] = ()
    receipts: Name = b""
    accuses: Name = b""
    back_to: BackTo = NOWHERE
    pace: Pace | None = None
    line_kbps: LineKbps = 0
    work: Name = b""
    doubts: Name = b""
    nonce: TicketNonce = b""

    @classmethod
    def of(cls, peer: PeerID, ticket: Ticket) -> Claim:
        """Make the claim of a member from its ticket."""
        flags = CLIENT_MODE * ticket.client_mode | LISTENS * ticket.listens | WARM * ticket.warm
        loss = ticket.loss if math.isfinite(ticket.loss) else None
        rest = (
            ticket.receipts,
            ticket.accuses,
            ticket.back_to,
            ticket.pace,
            ticket.line_kbps,
            ticket.work,
            ticket.doubts,
            ticket.nonce,
        )
        return cls(peer.to_base58(), ticket.samples, loss, flags, ticket.sketch, *rest)

    @property
    def id(self) -> PeerID:
        """Peer id of the member. Raises ValueError: it is malformed"""
        return peer_named(self.peer)

    def ticket(self, step: int, lineage: bytes, orders: bytes) -> Ticket:
        """Return the ticket as the member sent it."""
        lineage = ANY_LINEAGE if self.flags & LISTENS else lineage
        loss = math.nan if self.loss is None else self.loss
        client_mode, warm = bool(self.flags & CLIENT_MODE), bool(self.flags & WARM)
        rest = self.sketch, warm, orders, self.receipts, self.accuses, self.back_to, self.pace
        rest += self.line_kbps, self.work, self.doubts, self.nonce
        return Ticket(step, self.samples, client_mode, loss, lineage, *rest)


class Update(Line, frozen=True, tag="update"):
    """The line for an average that the peer has applied.

    Args:
        time: seconds since 1970, by the peer's own clock
        step: that the average ended
        lineage: of the weights before it; the group's name is the lineage of the weights after it
        group: name of the round
        nonce: random bytes of which the name was made, with the run, the members and what they brought
        most: samples for which one member counts at most
        members: in the order of their shares; a single member was alone
        state: step, lineage and digest of the peer's latest state, if it has taken a digest since the line before
        orders: name of the organiser's orders that count for it; empty if there are none
    """

    time: _Seconds
    step: Step
    lineage: Lineage
    group: Lineage
    nonce: Lineage
    most: Samples
    members: Annotated[tuple[Claim, ...], Meta(min_length=1, max_length=MAX_GROUP_SIZE)]
    state: _State | None = None
    orders: Annotated[bytes, Meta(max_length=ORDERS_BYTES)] = b""

    @classmethod
    def of(
        cls, n: int, before: bytes, time: float, group: Group, state: tuple[int, bytes, bytes] | None = None
    ) -> Update:
        """Make the line for a round that gave an average."""
        members = tuple(Claim.of(peer, ticket) for peer, ticket in zip(group.peer_ids, group.said, strict=True))
        step, orders = group.said[0].step, group.said[0].orders
        names = group.lineage, group.group_id, group.nonce
        return cls(n, before, time, step, *names, group.most, members, state, orders)

    @property
    def content(self) -> bytes:
        """SHA-256 of all that the group's name is made of, as it stands here."""
        content = msgspec.json.encode((self.nonce, self.lineage, self.step, self.orders, self.members))
        return hashlib.sha256(content).digest()

    def is_named_rightly(self, run: str) -> bool:
        """Whether the group's name is made of what stands here, and of this run (`Start.run`)."""
        try:
            peers = tuple(claim.id for claim in self.members)
            tickets = tuple(claim.ticket(self.step, self.lineage, self.orders) for claim in self.members)
            group = Group.close(self.nonce, peers, tickets, run)
            return len(set(peers)) == len(peers) and group.group_id == self.group
        except ValueError:
            return False


class Signature(Line, frozen=True, tag="signature"):
    """The line with which the peer signs all lines above it.

    Args:
        signature: by the peer's key (RSA-PSS, SHA-256), over what `text` returns; base 64
    """

    signature: Annotated[str, Meta(max_length=MAX_SIGNATURE_LENGTH)]

    @staticmethod
    def text(run: str, n: int, before: bytes) -> bytes:
        """Return the bytes that are signed."""
        return to_wire(KIND, run, n, before)


AnyLine = Start | Certified | Update | Signature
_DECODER = msgspec.json.Decoder(AnyLine)


def read_line(data: bytes) -> AnyLine:
    """Decode a line, without its end. Its writer is not trusted.

    Raises:
        NotALine: something is wrong with it
    """
    if len(data) > MAX_LINE_BYTES:
        raise NotALine(f"it has more than {MAX_LINE_BYTES} bytes")
    try:
        line = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise NotALine(str(error)) from None
    if len(line.before) != (DIGEST_BYTES if line.n else 0):
        raise NotALine("it is bound to no line")
    if line.n == 0 and not isinstance(line, Start):
        raise NotALine("it cannot be the first one")
    return line


def to_line(line: AnyLine) -> bytes:
    """Encode a line as it is written, without its end."""
    return msgspec.json.encode(line)


def digest_of(line: bytes) -> bytes:
    """Return the SHA-256 of a line without its end, which the next line has as `before`."""
    return hashlib.sha256(line).digest()


def is_signed(start: Start, line: Signature) -> bool:
    """Whether the peer that began the ledger has signed this line."""
    text = Signature.text(start.run, line.n, line.before)
    return _public_key(start.key).verify(text, line.signature.encode(errors="replace"))


@lru_cache(maxsize=1024)
def _public_key(key: str) -> RSAPublicKey:
    return RSAPublicKey.from_bytes(key.encode())


@lru_cache(maxsize=8192)
def peer_named(text: str) -> PeerID:
    """Return the peer with this id in base 58.

    Raises:
        ValueError: it is no peer id, or is written in another way
    """
    peer = PeerID.from_base58(text)
    if peer.to_base58() != text or len(peer.to_bytes()) != PEER_ID_BYTES:
        raise ValueError("no peer id")
    return peer


def group_of(report: StepReport, me: PeerID, nonce: bytes, run: str) -> Group:
    """Return the group behind an update; for a peer that was alone, a group of itself.

    Args:
        report: on the update
        me: this peer
        nonce: 16 random bytes, used if there was no group
        run: start of the run's keys
    """
    if report.round is not None:
        return report.round.group
    return Group.close(nonce, (me,), (report.ticket,), run)
