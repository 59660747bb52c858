"""How a peer takes part in a run by invitation: how it gets its certificate, and what it keeps to come back."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hivemind.p2p import PeerID

from recipe.errors import InputError
from recipe.run_folder import RunFolder, write_private
from swarm.enrolment.client import TryLater, enrol, renew
from swarm.enrolment.join_line import JoinLine
from swarm.enrolment.organiser_folder import OrganiserFolder
from swarm.membership.run_manifest import RunManifest
from swarm.network.signed_records import LISTS, peer_with, read_key
from swarm.protocol.admission import Admission
from swarm.protocol.certificates import (
    EVERYTHING,
    MAX_CERTIFICATE_BYTES,
    Authority,
    Certificate,
    NotSigned,
    Signer,
    shown_date,
)
from swarm.protocol.order_book import revocations_in
from swarm.protocol.signed_lists import ORDERS, REMOVED

ORGANISERS_DAYS = 365
"""For how long a certificate of the organiser's own peers counts. They renew it themselves."""


@dataclass(frozen=True)
class Credentials:
    """What a member keeps on its disk.

    Args:
        line: join line without its invitation
        certificate: as it was signed
        lists: the newest ones that the organiser has signed, by kind, as they were signed
        manifest: of the run, as its organiser has signed it; empty before this peer has seen it
    """

    line: JoinLine
    certificate: bytes
    lists: Mapping[str, bytes] = field(default_factory=dict)
    manifest: bytes = b""

    def to_json(self) -> str:
        """Return the text that is kept; `from_json` reads it."""
        kept = {"certificate": self.certificate, "manifest": self.manifest, **self.lists}
        texts = {name: base64.b64encode(data).decode() for name, data in kept.items()}
        return json.dumps({"line": str(self.line), **texts})

    @classmethod
    def from_json(cls, text: str) -> Credentials | None:
        """Read what `to_json` has written; None if that cannot be read."""
        try:
            content = json.loads(text)
            certificate, manifest = (base64.b64decode(content[name]) for name in ("certificate", "manifest"))
            lists = {kind: base64.b64decode(content[kind]) for kind in LISTS if kind in content}
            return cls(JoinLine.parse(content["line"]), certificate, lists, manifest)
        except (ValueError, TypeError, KeyError, RecursionError, InputError):
            return None

    def write(self, path: Path) -> None:
        """Write a file that only this user can read.

        Raises:
            OSError: the disk is full, for instance
        """
        write_private(path, self.to_json().encode(), overwrite=True)

    @classmethod
    def read(cls, path: Path) -> Credentials | None:
        """Read the file; None if it is missing or cannot be read."""
        try:
            return cls.from_json(path.read_text())
        except (OSError, UnicodeDecodeError):
            return None

    def with_list(self, kind: str, signed: bytes) -> Credentials:
        """Return a copy with this list; an empty list changes nothing."""
        return replace(self, lists={**self.lists, kind: signed}) if signed else self

    def certificate_of(self, peer_id: PeerID) -> Certificate | None:
        """Return the decoded certificate; None if it is of another peer, or no certificate of this run."""
        try:
            found = Certificate.read(self.certificate, Authority(self.line.run_id, self.line.organiser))
        except NotSigned:
            return None
        return found if found.peer_id == peer_id else None


@dataclass(frozen=True)
class Membership:
    """The membership of this peer in one run.

    Args:
        credentials: what this peer shows to others and keeps
        renew: gets a new certificate for the present one; raises InputError if that fails
        sign: signs a manifest with the organiser's key; None except at the organiser's own peer
        run: start of the run's keys; empty as long as its recipe is not known
        merge: brings the swarm's list of removed members together with the organiser's books, and returns the newest
            list; None except at the organiser's own peer
    """

    credentials: Credentials
    renew: Callable[[bytes], bytes]
    sign: Callable[[RunManifest], RunManifest] | None = None
    run: str = ""
    merge: Callable[[bytes], bytes] | None = None

    def new_admission(self) -> Admission:
        """Make the record of which peers may take part, for one process of this peer.

        A kept list that is refused, as after the clock was set back, is left out: other peers of the swarm have it.
        """
        line, kept = self.credentials.line, self.credentials.lists
        admission = Admission(Authority(line.run_id, line.organiser, self.run), self.credentials.certificate)
        with contextlib.suppress(NotSigned):
            admission.lists.take_all({REMOVED: kept.get(REMOVED, b"")})
        with contextlib.suppress(NotSigned):
            try:
                admission.lists.take_all({ORDERS: kept.get(ORDERS, b"")})
            except NotSigned:  # the run was begun anew, and of its orders only the revocations of deputies count still
                admission.lists.take(ORDERS, revocations_in(kept[ORDERS]))
        return admission


def become_member(line: JoinLine, identity: Path, name: str, folder: RunFolder, given: str | None = None) -> Membership:
    """Use the certificate that this peer has or that a person gave, or else ask the organiser for one.

    Args:
        line: join line
        identity: file of the peer's private key
        name: public name
        folder: of this peer in the run
        given: a certificate that the organiser has made for this peer, as text

    Raises:
        InputError: no certificate counts, and the organiser gives none
    """
    key, path = read_key(identity), folder.membership
    peer_id = peer_with(key)
    kept = Credentials.read(path)
    bare = replace(line, token=b"")
    if kept is not None and (kept.line.run_id, kept.line.organiser) != (line.run_id, line.organiser):
        kept = None  # another organiser's run of the same name
    if kept is not None:
        kept = replace(kept, line=bare)  # the newest line has the latest addresses of the organiser
    if given is not None:
        kept = _with_given(kept or Credentials(bare, b""), given, peer_id)
    has = None if kept is None else kept.certificate_of(peer_id)
    if has is None or has.end <= time.time():
        try:
            answer = _ask(line, key, name, kept if has is not None else None)
        except TryLater as error:
            said = str(error).rstrip(".")
            if has is not None:
                said = f"This peer's certificate ended on {shown_date(has.end)}, and {said[:1].lower()}{said[1:]}"
            raise TryLater(
                f"{said}; or ask for a certificate for {peer_id} (swarm invite --peer-id), which goes with "
                f"--public-name {name}."
            ) from None
        kept = replace(kept or Credentials(bare, b""), certificate=answer.certificate)
        kept = kept.with_list(REMOVED, answer.removals)
    elif has.begin > time.time():
        raise InputError("This peer's certificate is not valid yet by this machine's clock: set the clock right (NTP).")
    return Membership(kept, lambda before: renew(bare, key, name, before).certificate)


def _with_given(kept: Credentials, given: str, peer_id: PeerID) -> Credentials:
    """Return the credentials with the certificate that a person gave, or as they were kept if that counts for longer.

    Raises:
        InputError: the given certificate is malformed or has ended, or is for another peer or run
    """
    line, before = kept.line, kept.certificate_of(peer_id)
    try:
        made = replace(kept, certificate=base64.b64decode("".join(given.split()), validate=True))
        if len(made.certificate) > MAX_CERTIFICATE_BYTES:
            raise NotSigned("is too long")
        found = Certificate.read(made.certificate, Authority(line.run_id, line.organiser))
        if before is not None and before.end > found.end:
            return kept
        found.check_time()
        if found.peer_id != peer_id:
            raise NotSigned(
                f"is for peer {found.peer_id}, and this one is {peer_id} (--public-name or --identity-path)"
            )
    except ValueError as error:
        said = error if isinstance(error, NotSigned) else "cannot be read"
        raise InputError(f"The --certificate {said}: ask the organiser for another one.") from None
    return made


def _ask(line: JoinLine, key, name: str, before: Credentials | None):
    """Ask the organiser's server: renew if this peer was a member before, otherwise use the invitation.

    If the server does not renew, the invitation is used as well.
    """
    if before is not None:
        try:
            return renew(line, key, name, before.certificate)
        except TryLater:
            raise
        except InputError:
            if not line.token:
                raise
    return enrol(line, key, name)


def organisers_own(
    folder: OrganiserFolder,
    signer: Signer,
    addresses: Sequence[str],
    port: int,
    peer_id: PeerID,
    name: str,
    public_ip: str | None = None,
) -> Membership:
    """Return the membership of a peer on the organiser's machine, which signs its own certificate.

    Args:
        folder: of the organiser
        signer: the organiser's key, or a deputy's
        addresses: of this peer
        port: where newcomers enrol
        public_ip: of this machine, as the organiser gave it

    Raises:
        InputError: the folder cannot be used; or this peer was removed, or no other machine could call it
    """
    registry = folder.registry
    member = registry.member_of(peer_id)
    if member is None:
        token = registry.invite(name, 1, 1, EVERYTHING)
        member = registry.use_invitation(token, peer_id, name)
    if member.why_removed is not None:
        raise InputError(f"This peer was removed from the run: swarm remove {name} --restore lets it in again.")
    folder.note_contact(signer.public_key, addresses, port, public_ip)
    if why := registry.why_peers_refuse_the_list:
        print(f"warning: {why}", flush=True)

    authority = folder.authority

    def certify(_before: bytes = b"") -> bytes:
        return registry.certify(member, signer, authority, ORGANISERS_DAYS)

    credentials = Credentials(folder.join_line(), certify()).with_list(REMOVED, registry.removals())
    return Membership(
        credentials,
        certify,
        lambda manifest: manifest.signed_by(signer),
        merge=lambda heard: registry.merged(heard, signer, authority),
    )


def keep(membership: Membership, admission: Admission, manifest: RunManifest, folder: RunFolder) -> None:
    """Write down what this peer needs to come back.

    Raises:
        OSError: the disk is full, for instance
    """
    newest = replace(
        membership.credentials,
        certificate=admission.certificate,
        lists=admission.lists.all_signed,
        manifest=manifest.to_bytes(),
    )
    newest.write(folder.membership)
