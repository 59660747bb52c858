"""Checks which peers may take part in a run: every request carries its sender's certificate.

A certificate names a peer id, and libp2p proves the id of the caller. So a certificate needs no secrecy and no further
signature. `Admission.show` puts it before the content of a message, and the receiver's `Admission.admit` checks it and
takes it off. In a run that is open to everybody both do nothing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated

import msgspec
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time, get_logger
from msgspec import Meta

from swarm.protocol.certificates import MAX_CERTIFICATE_BYTES, Authority, Certificate, NotSigned, Role
from swarm.protocol.signed_lists import SignedLists
from swarm.protocol.wire import from_wire, to_wire

SHOWN_BYTES = MAX_CERTIFICATE_BYTES + 16
"""Bytes by which a certificate makes a message longer at most."""
MAX_REMEMBERED = 8192
"""Certificates that a process remembers, and members."""
MAX_SHOWN_BYTES = 2**17
"""Size of a message with its certificate."""
MAX_COMPLAINTS = 16
"""Warnings about refused peers, each with another reason."""

logger = get_logger(__name__)

_SHOWN = msgspec.msgpack.Decoder(tuple[Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)], bytes])


class NotAMember(ValueError):  # noqa: N818 (reads as what it says)
    """A peer may not do what it asks for. The text is the end of a sentence that begins with its name."""


class Admission:
    """What one process knows of the members of a run; each process of a peer has its own.

    Args:
        authority: the organiser of the run; None if the run is open to everybody
        certificate: this peer's certificate; empty for a peer that only stores members' records
        lists: the newest lists that the organiser has signed, as they were signed, by kind
    """

    def __init__(self, authority: Authority | None = None, certificate: bytes = b"", lists: Mapping[str, bytes] = {}):
        self.authority, self.certificate = authority, certificate
        self.lists = SignedLists(authority)
        """The removed members, and the organiser's orders."""
        self._read: OrderedDict[bytes, Certificate | str] = OrderedDict()
        self._members: OrderedDict[PeerID, Certificate] = OrderedDict()
        self._complaints: set[str] = set()
        self.welcome: Callable[[list[PeerID]], None] = _say_nothing
        """Called with a peer that has shown a certificate for the first time: it is no stranger from now on."""
        self.lists.take_all(lists)

    @property
    def is_open(self) -> bool:
        """Whether the run is open to everybody."""
        return self.authority is None

    def show(self, content: bytes) -> bytes:
        """The content with this peer's certificate, as it is sent."""
        return content if self.is_open else to_wire(self.certificate, content)

    def admit(self, shown: bytes, peer: PeerID, role: Role = Role.TRAIN, late_seconds: float = 0.0) -> bytes:
        """Check the certificate of a message, and return the message's content.

        Args:
            shown: the message as it was sent
            peer: its sender, as libp2p proves it, or as the peer that passes it on claims
            role: roles of which the sender needs one
            late_seconds: time for which the end of a certificate, or a removal that was just heard of, does not count
                yet, since other peers may not know it

        Raises:
            NotAMember: the sender may not do that
        """
        if self.is_open:
            return shown
        try:
            try:
                certificate, content = from_wire(_SHOWN, shown, MAX_SHOWN_BYTES)
            except ValueError:
                raise NotAMember("shows no certificate") from None
            self._check(certificate, peer, role, late_seconds)
        except NotAMember as error:
            self._complain_once(peer, str(error))
            raise
        return content

    def _complain_once(self, peer: PeerID, why: str) -> None:
        if why not in self._complaints and len(self._complaints) < MAX_COMPLAINTS:
            self._complaints.add(why)
            member = self._members.get(peer)
            name = str(peer) if member is None else f"{member.name} ({peer})"
            logger.warning(f"{name} is refused: it {why} (said once)")

    def has_seen(self, shown: object, peer: PeerID) -> bool:
        """Whether this peer has shown this certificate before, so that checking it again costs next to nothing."""
        try:
            digest = hashlib.sha256(from_wire(_SHOWN, shown, MAX_SHOWN_BYTES)[0]).digest()
        except ValueError:
            return False
        found = self._read.get(digest)
        return isinstance(found, Certificate) and found.peer_id == peer

    def _check(self, certificate: bytes, peer: PeerID, role: Role, late_seconds: float) -> None:
        found = self._certificate(certificate)
        if found.peer_id != peer:
            raise NotAMember("shows the certificate of another peer")
        try:
            now = get_dht_time()
            # Up to `late_seconds` after its end, the certificate is checked as in the last second in which it counts.
            found.check_time(min(now, found.end) if now <= found.end + late_seconds else now)
        except NotSigned as error:
            raise NotAMember(f"shows a certificate that {error}") from None
        if found.serial in self.lists.removals.removed and self.lists.seconds_removed(found.serial) > late_seconds:
            raise NotAMember(f"was removed by the organiser: {self.lists.removals.why(found.serial)}")
        if not found.roles & role:
            raise NotAMember("shows a certificate that does not allow this")
        if peer not in self._members:
            self.welcome([peer])
        self._members[peer] = found
        self._members.move_to_end(peer)
        if len(self._members) > MAX_REMEMBERED:
            self._members.popitem(last=False)

    def _certificate(self, data: bytes) -> Certificate:
        """Read a certificate. Its signature is checked once, and the result is remembered.

        Raises:
            NotAMember: it is none of this run
        """
        digest = hashlib.sha256(data).digest()
        if digest not in self._read:
            try:
                self._read[digest] = Certificate.read(data, self.authority)
            except NotSigned as error:
                self._read[digest] = str(error).partition(" (")[0]  # without details that a stranger chooses
            if len(self._read) > MAX_REMEMBERED:
                self._read.popitem(last=False)
        found = self._read[digest]
        if isinstance(found, str):
            raise NotAMember(f"shows a certificate that {found}")
        return found

    # ---- members ----------------------------------------------------------------------------------------------------

    def member(self, peer: PeerID) -> Certificate | None:
        """The certificate that a peer has shown last; None in an open run, or if it has shown none."""
        return self._members.get(peer)

    def may(self, peer: PeerID, role: Role) -> bool:
        """Whether a peer has one of these roles. True in an open run, or if the peer has shown no certificate yet."""
        member = self._members.get(peer)
        return member is None or bool(member.roles & role)

    def is_removed(self, peer: PeerID) -> bool:
        """Whether a peer was a member and the organiser has removed it."""
        certificate = self._members.get(peer)
        return certificate is not None and certificate.serial in self.lists.removals.removed

    def has_left(self, peer: PeerID) -> bool:
        """Whether a peer was a member and is none any more: it was removed, or its certificate has ended."""
        certificate = self._members.get(peer)
        return self.is_removed(peer) or (certificate is not None and get_dht_time() > certificate.end)

    def removed(self, peers: Iterable[PeerID]) -> list[PeerID]:
        """Those of these peers that the organiser has removed."""
        return [peer for peer in peers if self.is_removed(peer)]

    @property
    def own(self) -> Certificate | None:
        """This peer's own certificate; None if it has none, or the run is open."""
        return self._certificate(self.certificate) if self.certificate and not self.is_open else None

    @property
    def why_this_peer_was_removed(self) -> str | None:
        """The organiser's reason; None as long as this peer may take part."""
        own = self.own
        if own is None or own.serial not in self.lists.removals.removed:
            return None
        return self.lists.removals.why(own.serial)


def _say_nothing(_peers: list[PeerID]) -> None:
    pass


OPEN = Admission()
"""The admission of a run that is open to everybody."""
