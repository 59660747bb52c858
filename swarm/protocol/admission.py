"""Who may take part in a run: every message that opens something carries its sender's certificate.

A certificate names a peer id, and libp2p proves the id of who calls. So a certificate needs no secrecy, and no other
signature: `Admission.show` puts it before what is sent, and `Admission.admit` takes it off again where it arrives. In a
run that is open to everybody both do nothing.
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
"""By which a message grows at most."""
MAX_REMEMBERED = 8192
MAX_SHOWN_BYTES = 2**17
MAX_COMPLAINTS = 16

logger = get_logger(__name__)

_SHOWN = msgspec.msgpack.Decoder(tuple[Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)], bytes])


class NotAMember(ValueError):  # noqa: N818 (reads as what it says)
    """This peer may not do that. The text is the end of a sentence that begins with its name."""


class Admission:
    """What one process knows of the members of a run; each process of a peer has its own.

    Args:
        authority: whose word counts; None: the run is open to everybody
        certificate: of this peer; empty for one that only stores what members say
        lists: the newest ones that the organiser has signed, as they were signed
    """

    def __init__(self, authority: Authority | None = None, certificate: bytes = b"", lists: Mapping[str, bytes] = {}):
        self.authority, self.certificate = authority, certificate
        self.lists = SignedLists(authority)
        """Who may not take part any more, and what is ordered."""
        self._read: OrderedDict[bytes, Certificate | str] = OrderedDict()
        self._members: OrderedDict[PeerID, Certificate] = OrderedDict()
        self._complaints: set[str] = set()
        self.welcome: Callable[[list[PeerID]], None] = _say_nothing
        """Called with who has shown a certificate for the first time: it is no stranger from now on."""
        self.lists.take_all(lists)

    @property
    def is_open(self) -> bool:
        """Whether everybody may take part."""
        return self.authority is None

    def show(self, content: bytes) -> bytes:
        """The content as this peer sends it."""
        return content if self.is_open else to_wire(self.certificate, content)

    def admit(self, shown: bytes, peer: PeerID, role: Role = Role.TRAIN, late_seconds: float = 0.0) -> bytes:
        """The content of what a peer has sent.

        Args:
            peer: who has sent it, or, in what others pass on, who is said to have
            role: of which it needs one
            late_seconds: what has happened no longer ago does not count yet, where somebody else may not know it: a
                certificate has ended, or it was heard for the first time that a member was removed

        Raises:
            NotAMember: it may not do that
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
        """Whether this peer has shown this certificate before: to check it again costs next to nothing."""
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
        """What is written in it; its signature is checked once."""
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
        """The certificate that it has shown last; None in an open run, and of who has shown none."""
        return self._members.get(peer)

    def may(self, peer: PeerID, role: Role) -> bool:
        """Whether a peer has one of these roles; in an open run, and of who has shown no certificate yet: all have."""
        member = self._members.get(peer)
        return member is None or bool(member.roles & role)

    def is_removed(self, peer: PeerID) -> bool:
        """Whether it was a member and may not take part any more."""
        certificate = self._members.get(peer)
        return certificate is not None and certificate.serial in self.lists.removals.removed

    def has_left(self, peer: PeerID) -> bool:
        """Whether it was a member and is none any more: it was removed, or its certificate has ended."""
        certificate = self._members.get(peer)
        return self.is_removed(peer) or (certificate is not None and get_dht_time() > certificate.end)

    def removed(self, peers: Iterable[PeerID]) -> list[PeerID]:
        """Those of these who may not take part any more."""
        return [peer for peer in peers if self.is_removed(peer)]

    @property
    def own(self) -> Certificate | None:
        """What this peer's certificate says."""
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
"""Of a run that everybody may join."""
