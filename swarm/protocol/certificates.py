"""What the organiser of a run signs: members' certificates, the list of removed members, and warrants of deputies.

Keys and signatures are Ed25519 (RFC 8032), from the package `cryptography`. The signed bytes begin with the kind of
what is signed, so that a signature counts for nothing else.
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
"""Members in a list of removed members."""
MAX_WARRANT_BYTES = 320
MAX_WARRANTS = 256
"""Warrants that are remembered because their signatures were checked."""
MAX_CERTIFICATE_BYTES = 896
MAX_REMOVALS_BYTES = 2**16
MAX_REASONS_BYTES = MAX_REMOVALS_BYTES - 24 * MAX_REMOVED
"""Size of all reasons in a list of removed members. The rest is for the serials, the signature and the warrant."""
CLOCK_SECONDS = 24 * 3600
"""How far a signer's clock may be ahead."""
LATEST_SECONDS = 2**33
"""The year 2242, after which no time may be."""

CERTIFICATE, REMOVALS, WARRANT, MANIFEST = (f"swarm {kind} 1" for kind in ("certificate", "removals", "warrant", "run"))
"""Kinds of what is signed."""
ORDER, REVOCATION = "swarm order 3 {}", "swarm revocation 1 {}"
"""Kinds that contain the run, so that the many orders need not each carry it. For an order that is the prefix of the
run's keys: an order counts for one recipe and one beginning. For a revocation it is the run id, as for a warrant."""

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
    """Give gradients in rounds."""
    SERVE = 2
    """Lead groups, average shares for other members, and hand over the state; without `TRAIN`, as a helper."""
    WATCH = 4
    """Download the state, and see which peers are there."""


EVERYTHING = Role.TRAIN | Role.SERVE | Role.WATCH
HELPER = Role.SERVE | Role.WATCH
"""Roles of a helper: it takes part in rounds, but its samples count for nothing."""
IN_ROUNDS = Role.TRAIN | Role.SERVE
"""Roles of which one is needed to take part in a round."""


class Right(IntFlag):
    """What a deputy may sign in the organiser's place."""

    ENROL = 1
    """Certificates of members."""
    REMOVE = 2
    """The list of removed members."""
    CONTROL = 4
    """Orders while the run is under way."""


class NotSigned(ValueError):  # noqa: N818 (reads as what it says)
    """Neither the organiser nor a deputy with the right to has signed this.

    The text is the end of a sentence that begins with what was to be signed.
    """


@dataclass(frozen=True)
class Signed:
    """Content whose signature was checked.

    Args:
        content: the content as it was given to `Signer.sign`
        begin: time from which its signer has the right to sign it, seconds since 1970
        end: time until which its signer has that right, seconds since 1970
        key: the signer's public key, 32 bytes
    """

    content: bytes
    begin: int
    end: int
    key: bytes

    def check_time(self, now: float | None = None) -> None:
        """Check that its signer has the right to sign at this time.

        Args:
            now: seconds since 1970; None for this machine's time

        Raises:
            NotSigned: it has not
        """
        _check_time(self.begin, self.end, now, "was signed by a deputy whose warrant")


@dataclass(frozen=True)
class Signer:
    """A private key that signs for a run, and its warrant.

    Args:
        key: the private key of the organiser or of a deputy
        warrant: the organiser's signed statement that makes this key a deputy's; empty for her own key
    """

    key: Ed25519PrivateKey
    warrant: bytes = b""

    @property
    def public_key(self) -> bytes:
        """Its public key, 32 bytes."""
        return self.key.public_key().public_bytes_raw()

    def sign(self, kind: str, content: bytes) -> bytes:
        """The content with its signature and the warrant. `Authority.read` reads it."""
        return to_wire(content, self.signature(kind, content), self.warrant)

    def signature(self, kind: str, content: bytes) -> bytes:
        """The signature alone, 64 bytes, for content that travels apart from it."""
        return self.key.sign(_text(kind, content))


@dataclass(frozen=True)
class Authority:
    """The organiser of a run, by whose key everything that is signed for the run is checked.

    Args:
        run_id: name of the run
        organiser: her public key, 32 bytes
        run: prefix of the run's keys, with its recipe and beginning, for which orders count; empty where none are read
    """

    run_id: str
    organiser: bytes
    run: str = ""

    def read(self, kind: str, data: bytes, most_bytes: int, right: Right | None = None) -> Signed:
        """Read signed content, and check that the organiser or a deputy with the right to has signed it.

        Args:
            kind: kind that it has to be of
            data: what `Signer.sign` has returned
            most_bytes: size of `data` at most
            right: right that a deputy needs; None if only the organiser's own signature counts

        Raises:
            NotSigned: it cannot be read, or was signed by another key or as another kind
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
        """Read a deputy's warrant.

        Returns:
            the deputy's public key, its rights, and the begin and end of its time in seconds since 1970

        Raises:
            NotSigned: the organiser has not signed it, or has for another run
        """
        return _read_warrant(self, warrant)

    def end_of(self, signer: Signer) -> int:
        """Time until which signatures of this key count, seconds since 1970.

        Raises:
            NotSigned: as `read_warrant`
        """
        return self.read_warrant(signer.warrant)[3] if signer.warrant else LATEST_SECONDS

    def check_run(self, run_id: str) -> None:
        """Check that this is the id of the organiser's run.

        Raises:
            NotSigned: it is another run's
        """
        if run_id != self.run_id:
            raise NotSigned(f"is for run {run_id!r}, not for {self.run_id!r}")


@lru_cache(maxsize=MAX_WARRANTS)
def _read_warrant(authority: Authority, warrant: bytes) -> tuple[bytes, Right, int, int]:
    """As `Authority.read_warrant`. Results are cached, so the signature is not checked again for each order."""
    content, signature, above = _parts(warrant, MAX_WARRANT_BYTES)
    if above:
        raise NotSigned("was signed by the deputy of a deputy")
    _check_signature(authority.organiser, signature, _text(WARRANT, content))
    run_id, key, rights, begin, end = _fields(_WARRANT, content, MAX_WARRANT_BYTES)
    authority.check_run(run_id)
    return key, Right(rights), begin, end


def warrant(organiser: Signer, run_id: str, deputy: bytes, rights: Right, begin: int, end: int) -> bytes:
    """The warrant that makes another key a deputy's, signed by the organiser.

    Args:
        organiser: her key
        run_id: name of the run
        deputy: the deputy's public key, 32 bytes
        rights: what it may sign
        begin: time from which it may sign, seconds since 1970
        end: time until which it may sign, seconds since 1970
    """
    return organiser.sign(WARRANT, to_wire(run_id, deputy, int(rights), begin, end))


RENEWED_AFTER = 0.5
"""Fraction of a certificate's time after which a member asks for another one."""


@dataclass(frozen=True)
class Certificate:
    """The organiser's statement that a peer is a member of a run.

    Args:
        run_id: name of the run
        peer_id: id of the member; no other peer can use the certificate
        serial: number of this member, which stays the same when the certificate is renewed. It is the time of its
            enrolment in milliseconds since 1970, or a little later where several members enrolled at once
        roles: what the member may do
        begin: time from which it counts, seconds since 1970
        end: time until which it counts, seconds since 1970
        name: name under which the organiser knows the member
        signed: the certificate as it was read, with its signature; it is no field on the wire
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
        """When it became a member, seconds since 1970. It cannot have taken part earlier."""
        return self.serial / 1000

    def signed_by(self, signer: Signer) -> bytes:
        """The signed certificate as members show it, at most 896 bytes."""
        peer = self.peer_id.to_bytes()
        fields = (self.run_id, peer, self.serial, int(self.roles), self.begin, self.end, self.name)
        return signer.sign(CERTIFICATE, to_wire(*fields))

    @classmethod
    def read(cls, data: bytes, authority: Authority) -> Certificate:
        """Read a member's certificate. If a deputy has signed it, it counts only within the time of the warrant.

        Whether it counts now is checked by `check_time`.

        Raises:
            NotSigned: it is no certificate of this run
        """
        signed = authority.read(CERTIFICATE, data, MAX_CERTIFICATE_BYTES, Right.ENROL)
        run_id, peer, serial, roles, begin, end, name = _fields(_CERTIFICATE, signed.content, MAX_CERTIFICATE_BYTES)
        authority.check_run(run_id)
        if not name.isprintable():
            raise NotSigned("has a name that is not printable")
        begin, end = max(begin, signed.begin), min(end, signed.end)
        return cls(run_id, PeerID(peer), serial, Role(roles & EVERYTHING), begin, end, name, data)

    def is_to_be_renewed(self, now: float, share: float = RENEWED_AFTER) -> bool:
        """Whether this fraction of its time is over."""
        return now > self.begin + share * (self.end - self.begin)

    def check_time(self, now: float | None = None) -> None:
        """Check that it counts at this time.

        Args:
            now: seconds since 1970; None for this machine's time

        Raises:
            NotSigned: it does not count yet, or not any more
        """
        _check_time(self.begin, self.end, now, "")


@dataclass(frozen=True)
class Removals:
    """The list of members that may not take part any more.

    Args:
        run_id: name of the run
        number: time when the list was made, milliseconds since 1970, or right after the number of the list before if
            its signer could not look at the swarm's; the list with the greatest number counts
        removed: the organiser's reason, by the member's serial
    """

    run_id: str
    number: int
    removed: dict[int, str]

    def signed_by(self, signer: Signer) -> bytes:
        """The signed list as members pass it on, at most 64 KiB.

        Raises:
            ValueError: it has more than 400 members, or too long reasons
        """
        if len(self.removed) > MAX_REMOVED:
            raise ValueError(f"more than {MAX_REMOVED} removed members")
        signed = signer.sign(REMOVALS, to_wire(self.run_id, self.number, list(self.removed.items())))
        if len(signed) > MAX_REMOVALS_BYTES:
            raise ValueError(f"a list of {len(signed)} bytes, more than {MAX_REMOVALS_BYTES}")
        return signed

    @classmethod
    def read(cls, data: bytes, authority: Authority, now: float | None = None) -> Removals:
        """Read a list. It counts for good, even if it was signed by a deputy whose warrant has ended since.

        Raises:
            NotSigned: it is no list of this run, or dated in the future, so that no later list would count
        """
        signed = authority.read(REMOVALS, data, MAX_REMOVALS_BYTES, Right.REMOVE)
        run_id, number, removed = _fields(_REMOVALS, signed.content, MAX_REMOVALS_BYTES)
        authority.check_run(run_id)
        if number / 1000 > (time.time() if now is None else now) + CLOCK_SECONDS:
            raise NotSigned("was made in the future: are both clocks right?")
        signed.check_time(number / 1000)
        return cls(run_id, number, {serial: printed(why) for serial, why in removed})  # a deputy can sign any reason

    def why(self, serial: int) -> str:
        """Why this member was removed, as the end of a sentence."""
        return self.removed[serial] or "no reason given"

    def with_removed(self, serials: Iterable[int], why: str) -> Removals:
        """The next list, with these members added at its end."""
        added = dict.fromkeys(serials, printed(why)[:MAX_REASON_LENGTH])
        others = self.without(added)
        return Removals(self.run_id, others.number, others.removed | added)

    def without(self, serials: Iterable[int]) -> Removals:
        """The next list, without these members, which may take part again."""
        back = set(serials)
        kept = {serial: why for serial, why in self.removed.items() if serial not in back}
        return Removals(self.run_id, max(self.number + 1, int(1000 * time.time())), kept)


def printed(text: str) -> str:
    """A stranger's text without characters that control a terminal."""
    return "".join(letter for letter in text if letter.isprintable())


def _text(kind: str, content: bytes) -> bytes:
    """The bytes that are signed."""
    return to_wire(kind, content)


def _parts(data: bytes, most_bytes: int) -> tuple[bytes, bytes, bytes]:
    """Content, signature and warrant, as `Signer.sign` has put them together.

    msgpack can encode the same values in some fifty ways. Only one of them is accepted: otherwise a liar could pass on
    the same signed content as something new.

    Raises:
        NotSigned: it cannot be read, or is encoded in another way
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


def _check_time(begin: int, end: int, now: float | None, what: str) -> None:
    now = time.time() if now is None else now
    said = f"{what} " if what else ""
    if now < begin:
        raise NotSigned(
            f"{said}begins on {shown_date(begin)}, and it is {shown_date(now)} here (are both clocks right?)"
        )
    if now > end:
        raise NotSigned(f"{said}has ended on {shown_date(end)}")


def shown_date(seconds: float) -> str:
    """The date and time in UTC, for people."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
