"""What the organiser of a run signs: who may take part, who may not any more, and who may sign in her place.

Keys and signatures are Ed25519 (RFC 8032), those of `cryptography`. What is signed begins with its kind: a signature
counts for nothing else than what it was made for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntFlag
from functools import lru_cache
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hivemind.p2p import PeerID
from msgspec import Meta

from swarm.protocol.wire import from_wire, to_wire

KEY_BYTES, SIGNATURE_BYTES = 32, 64
MAX_RUN_ID_BYTES = 64
MAX_NAME_LENGTH = 64
MAX_REASON_LENGTH = 120
MAX_REMOVED = 400
"""Of a list."""
MAX_WARRANT_BYTES = 320
MAX_WARRANTS = 256
"""Whose signature is remembered."""
MAX_CERTIFICATE_BYTES = 896
MAX_REMOVALS_BYTES = 2**16
MAX_REASONS_BYTES = MAX_REMOVALS_BYTES - 24 * MAX_REMOVED
"""Of a list, together: the rest is for the serials, the signature and the warrant."""
CLOCK_SECONDS = 24 * 3600
"""By which the clock of who signs may be ahead."""
LATEST_SECONDS = 2**33
"""The year 2242: no time is later."""

CERTIFICATE, REMOVALS, WARRANT, MANIFEST = (f"swarm {kind} 1" for kind in ("certificate", "removals", "warrant", "run"))
"""Kinds of what is signed."""
ORDER, REVOCATION = "swarm order 3 {}", "swarm revocation 1 {}"
"""The same, with the run in them: there are many, and they need not all carry it. An order counts for one recipe and
one beginning (the start of the run's keys); who is revoked is so under the run's id, as a warrant counts."""

_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
_RunId = Annotated[str, Meta(min_length=1, max_length=MAX_RUN_ID_BYTES)]
_PeerBytes = Annotated[bytes, Meta(min_length=32, max_length=64)]
_Serial = Annotated[int, Meta(ge=0, lt=2**53)]
_Flags = Annotated[int, Meta(ge=0, lt=2**16)]
_Seconds = Annotated[int, Meta(ge=0, le=LATEST_SECONDS)]
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
_Reason = Annotated[str, Meta(max_length=MAX_REASON_LENGTH)]

_SIGNED = msgspec.msgpack.Decoder(tuple[bytes, _Signature, Annotated[bytes, Meta(max_length=MAX_WARRANT_BYTES)]])
_WARRANT = msgspec.msgpack.Decoder(tuple[_RunId, _Key, _Flags, _Seconds, _Seconds])
_CERTIFICATE = msgspec.msgpack.Decoder(tuple[_RunId, _PeerBytes, _Serial, _Flags, _Seconds, _Seconds, _Name])
_REMOVALS = msgspec.msgpack.Decoder(
    tuple[_RunId, _Serial, Annotated[list[tuple[_Serial, _Reason]], Meta(max_length=MAX_REMOVED)]]
)


class Role(IntFlag):
    """What a member may do."""

    TRAIN = 1
    """Give gradients, in rounds."""
    SERVE = 2
    """Lead groups, average shares for others, and hand over the state; without `TRAIN`, as a helper."""
    WATCH = 4
    """Download the state and read who is there."""


EVERYTHING = Role.TRAIN | Role.SERVE | Role.WATCH
HELPER = Role.SERVE | Role.WATCH
"""It takes part in rounds, and whatever it says that it has computed counts for nothing."""
IN_ROUNDS = Role.TRAIN | Role.SERVE
"""One of them is needed to take part in a round."""


class Right(IntFlag):
    """What somebody may sign in the organiser's place."""

    ENROL = 1
    """Certificates of members."""
    REMOVE = 2
    """The list of those who may not take part any more."""
    CONTROL = 4
    """What is ordered while the run is under way."""


class NotSigned(ValueError):  # noqa: N818 (reads as what it says)
    """Nobody whose word counts has signed this. The text is the end of a sentence that begins with what it is."""


@dataclass(frozen=True)
class Signed:
    """What was signed.

    Args:
        content: as it was given to `Signer.sign`
        begin, end: between which its signer has the right to, seconds since 1970
        key: the signer's, 32 bytes
    """

    content: bytes
    begin: int
    end: int
    key: bytes

    def check_time(self, now: float = 0.0) -> None:
        """Raises NotSigned: its signer has no right to at this time"""
        _check_time(self.begin, self.end, now, "was signed by a deputy whose warrant")


@dataclass(frozen=True)
class Signer:
    """A private key, and by what right it signs.

    Args:
        key: the organiser's, or a deputy's
        warrant: with which the organiser made this key a deputy's; empty for her own
    """

    key: Ed25519PrivateKey
    warrant: bytes = b""

    @property
    def public_key(self) -> bytes:
        """32 bytes."""
        return self.key.public_key().public_bytes_raw()

    def sign(self, kind: str, content: bytes) -> bytes:
        """The content with its signature; `Authority.read` reads it."""
        return to_wire(content, self.signature(kind, content), self.warrant)

    def signature(self, kind: str, content: bytes) -> bytes:
        """64 bytes, where the content and the warrant travel by themselves."""
        return self.key.sign(_text(kind, content))


@dataclass(frozen=True)
class Authority:
    """Whose word counts in a run.

    Args:
        run_id: the run
        organiser: her public key, 32 bytes
        run: start of the run's keys, with its recipe and beginning, of which orders are read; empty where none are
    """

    run_id: str
    organiser: bytes
    run: str = ""

    def read(self, kind: str, data: bytes, most_bytes: int, right: Right | None = None) -> Signed:
        """What was signed, if the organiser has signed it, or a deputy of hers.

        Args:
            kind: what it has to be
            right: that a deputy needs; None where only the organiser's own word counts

        Raises:
            NotSigned: it is anything else
        """
        content, signature, warrant = _parts(data, most_bytes)
        key, begin, end = self.organiser, 0, LATEST_SECONDS
        if warrant:
            key, rights, begin, end = self.read_warrant(warrant)
            if right is None or not rights & right:
                raise NotSigned("was signed by a deputy who has no right to")
        _check_signature(key, signature, _text(kind, content))
        return Signed(content, begin, end, key)

    def read_warrant(self, warrant: bytes) -> tuple[bytes, Right, int, int]:
        """The deputy's key, what it may sign, and between which seconds since 1970.

        Raises:
            NotSigned: the organiser has not signed it, or for another run
        """
        return _read_warrant(self, warrant)

    def end_of(self, signer: Signer) -> int:
        """Until when what this key signs counts, seconds since 1970.

        Raises:
            NotSigned: as `read_warrant`
        """
        return self.read_warrant(signer.warrant)[3] if signer.warrant else LATEST_SECONDS

    def check_run(self, run_id: str) -> None:
        """Raises NotSigned: that is another run"""
        if run_id != self.run_id:
            raise NotSigned(f"is for run {run_id!r}, not for {self.run_id!r}")


@lru_cache(maxsize=MAX_WARRANTS)
def _read_warrant(authority: Authority, warrant: bytes) -> tuple[bytes, Right, int, int]:
    """As `Authority.read_warrant`; its signature is checked once in each process, not at each order under it."""
    content, signature, above = _parts(warrant, MAX_WARRANT_BYTES)
    if above:
        raise NotSigned("was signed by the deputy of a deputy")
    _check_signature(authority.organiser, signature, _text(WARRANT, content))
    run_id, key, rights, begin, end = _fields(_WARRANT, content, MAX_WARRANT_BYTES)
    authority.check_run(run_id)
    return key, Right(rights), begin, end


def warrant(organiser: Signer, run_id: str, deputy: bytes, rights: Right, begin: int, end: int) -> bytes:
    """Makes another key a deputy's.

    Args:
        deputy: its public key, 32 bytes
        begin, end: between which it may sign, seconds since 1970
    """
    return organiser.sign(WARRANT, to_wire(run_id, deputy, int(rights), begin, end))


RENEWED_AFTER = 0.5
"""Of its time, a member asks for another certificate."""


@dataclass(frozen=True)
class Certificate:
    """Says that a peer is a member of a run.

    Args:
        run_id: of which run
        peer_id: only the peer with this id can use it
        serial: number of this member, which stays the same when the certificate is renewed: the time of its enrolment
            in milliseconds since 1970, or a little later where several came at once
        roles: what it may do
        begin, end: between which it counts, seconds since 1970
        name: under which the organiser knows it
        signed: all of it, as it was read; it does not travel again
    """

    run_id: str
    peer_id: PeerID
    serial: int
    roles: Role
    begin: int
    end: int
    name: str
    signed: bytes = field(default=b"", compare=False, repr=False)

    @property
    def member_since(self) -> float:
        """Seconds since 1970: earlier than that it cannot have been there."""
        return self.serial / 1000

    def signed_by(self, signer: Signer) -> bytes:
        """As members show it, at most 896 bytes."""
        peer = self.peer_id.to_bytes()
        fields = (self.run_id, peer, self.serial, int(self.roles), self.begin, self.end, self.name)
        return signer.sign(CERTIFICATE, to_wire(*fields))

    @classmethod
    def read(cls, data: bytes, authority: Authority) -> Certificate:
        """A member's certificate; one of a deputy's begins and ends with the deputy's warrant, if not within it.

        Raises:
            NotSigned: it is none of this run; whether it counts at this time is asked by `check_time`
        """
        signed = authority.read(CERTIFICATE, data, MAX_CERTIFICATE_BYTES, Right.ENROL)
        run_id, peer, serial, roles, begin, end, name = _fields(_CERTIFICATE, signed.content, MAX_CERTIFICATE_BYTES)
        authority.check_run(run_id)
        if not name.isprintable():
            raise NotSigned("has a name that is not printable")
        begin, end = max(begin, signed.begin), min(end, signed.end)
        return cls(run_id, PeerID(peer), serial, Role(roles & EVERYTHING), begin, end, name, data)

    def is_to_be_renewed(self, now: float, share: float = RENEWED_AFTER) -> bool:
        """Whether this share of its time is over."""
        return now > self.begin + share * (self.end - self.begin)

    def check_time(self, now: float = 0.0) -> None:
        """Raises NotSigned: it does not count yet, or not any more"""
        _check_time(self.begin, self.end, now, "")


@dataclass(frozen=True)
class Removals:
    """Members who may not take part any more.

    Args:
        run_id: of which run
        number: the list with the greatest counts; milliseconds since 1970 when it was made
        removed: by the member's serial, why
    """

    run_id: str
    number: int
    removed: dict[int, str]

    def signed_by(self, signer: Signer) -> bytes:
        """As members pass it on, at most 64 KiB.

        Raises:
            ValueError: there are more than 400, or their reasons are too long
        """
        if len(self.removed) > MAX_REMOVED:
            raise ValueError(f"more than {MAX_REMOVED} removed members")
        signed = signer.sign(REMOVALS, to_wire(self.run_id, self.number, list(self.removed.items())))
        if len(signed) > MAX_REMOVALS_BYTES:
            raise ValueError(f"a list of {len(signed)} bytes, more than {MAX_REMOVALS_BYTES}")
        return signed

    @classmethod
    def read(cls, data: bytes, authority: Authority, now: float = 0.0) -> Removals:
        """A list counts for good, also one of a deputy whose warrant has ended since.

        Raises:
            NotSigned: it is no list of this run, or one of the future, after which no other could come
        """
        signed = authority.read(REMOVALS, data, MAX_REMOVALS_BYTES, Right.REMOVE)
        run_id, number, removed = _fields(_REMOVALS, signed.content, MAX_REMOVALS_BYTES)
        authority.check_run(run_id)
        if number / 1000 > (now or time.time()) + CLOCK_SECONDS:
            raise NotSigned("was made in the future: are both clocks right?")
        signed.check_time(number / 1000)
        return cls(run_id, number, {serial: printed(why) for serial, why in removed})  # a deputy can sign any reason

    def why(self, serial: int) -> str:
        """Why this member was removed, as the end of a sentence."""
        return self.removed[serial] or "no reason given"

    def with_removed(self, serials: Iterable[int], why: str) -> Removals:
        """The list that comes after this one, with these at its end."""
        added = dict.fromkeys(serials, printed(why)[:MAX_REASON_LENGTH])
        others = self.without(added)
        return Removals(self.run_id, others.number, others.removed | added)

    def without(self, serials: Iterable[int]) -> Removals:
        """The list that comes after this one, in which these may take part again."""
        back = set(serials)
        kept = {serial: why for serial, why in self.removed.items() if serial not in back}
        return Removals(self.run_id, max(self.number + 1, int(1000 * time.time())), kept)


def printed(text: str) -> str:
    """A stranger's text, without what a terminal obeys."""
    return "".join(letter for letter in text if letter.isprintable())


def _text(kind: str, content: bytes) -> bytes:
    """What is signed."""
    return to_wire(kind, content)


def _parts(data: bytes, most_bytes: int) -> tuple[bytes, bytes, bytes]:
    """Content, signature and warrant, as `Signer.sign` has put them together.

    msgpack can write the same in fifty ways: in each of them, anybody could pass it on as something new.
    """
    content, signature, warrant = _fields(_SIGNED, data, most_bytes)
    if to_wire(content, signature, warrant) != data:
        raise NotSigned("is written in another way than its signer has written it")
    return content, signature, warrant


def _fields(decoder, data: bytes, most_bytes: int):
    try:
        return from_wire(decoder, data, most_bytes)
    except ValueError:
        raise NotSigned("cannot be read") from None


def _check_signature(key: bytes, signature: bytes, text: bytes) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        raise NotSigned("was not signed by the organiser of this run") from None


def _check_time(begin: int, end: int, now: float, what: str) -> None:
    now = now or time.time()
    said = f"{what} " if what else ""
    if now < begin:
        raise NotSigned(
            f"{said}begins on {shown_date(begin)}, and it is {shown_date(now)} here (are both clocks right?)"
        )
    if now > end:
        raise NotSigned(f"{said}has ended on {shown_date(end)}")


def shown_date(seconds: float) -> str:
    """As a person reads it."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
