"""A volunteer's identity, which is a private key: where it lies, its memberships, and how it is backed up and moved.

What a peer has done, and the certificates that make it a member, belong to its peer id, and so to its private key.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
from hivemind.p2p import PeerID
from msgspec import Meta

from recipe.errors import InputError
from recipe.run_folder import RunFolder, check_name, write_private
from swarm.enrolment.organiser_key import MAX_PASSPHRASE_BYTES
from swarm.peer.membership.credentials import Credentials
from swarm.peer.membership.sealed import (
    MAX_SEALED_BYTES,
    NotSealed,
    WrongPassphrase,
    check_sealed,
    seal,
    unseal,
)
from swarm.protocol.certificates import Authority, Certificate, NotSigned, Removals
from swarm.protocol.signed_lists import REMOVED

FOLDER = "identities"
SUFFIX = ".key"
MAX_KEY_BYTES = 2**14
MAX_MEMBERSHIPS, MAX_MEMBERSHIP_BYTES = 64, 2**19
"""A membership has a manifest and two lists of up to 64 KiB each, in base64."""
_DAEMON = "p2pd"
_Membership = Annotated[str, Meta(max_length=MAX_MEMBERSHIP_BYTES)]


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a backup seals: the key as its file has it, and the `membership.json` of each run."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    key: Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
    memberships: Annotated[list[_Membership], Meta(max_length=MAX_MEMBERSHIPS)]


@dataclass(frozen=True)
class Kept:
    """A membership that is kept on the disk of this machine.

    Args:
        certificate: what the organiser has signed
        credentials: everything that is kept
    """

    certificate: Certificate
    credentials: Credentials

    @property
    def why_removed(self) -> str | None:
        """The reason in the kept list of removed members; None if the list does not name this member."""
        line = self.credentials.line
        try:
            signed = self.credentials.lists.get(REMOVED, b"")
            removals = Removals.read(signed, Authority(line.run_id, line.organiser))
        except NotSigned:
            return None
        serial = self.certificate.serial
        return removals.why(serial) if serial in removals.removed else None


@dataclass(frozen=True)
class Identity:
    """A private key on this disk.

    Args:
        name: public name of its peer
        path: file of the key
        output_dir: where its runs are
    """

    name: str
    path: Path
    output_dir: Path

    @property
    def peer_id(self) -> PeerID:
        """Raises InputError: the file is not there, or is no private key"""
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise InputError(f"The identity {self.path} cannot be read ({error.strerror}): name another one.") from None
        return _peer_id(content, f"{self.path} holds no private key of a peer")

    def memberships(self) -> Iterator[Kept]:
        """Yield the memberships of this identity in all runs of the output folder, under any public name."""
        peer_id = self.peer_id
        for path in sorted(self.output_dir.glob(f"*/*/{RunFolder('').membership.name}")):
            credentials = Credentials.read(path)
            certificate = None if credentials is None else credentials.certificate_of(peer_id)
            if certificate is not None:
                yield Kept(certificate, credentials)

    def users(self) -> list[int]:
        """Return the ids of the p2pd processes of this machine that run with this identity."""
        return [process.pid for process in psutil.process_iter() if _uses(process, self.path)]


def identities(output_dir: Path) -> list[Identity]:
    """Return the identities of an output folder, sorted by name."""
    output_dir = output_dir.expanduser()
    return [Identity(path.stem, path, output_dir) for path in sorted((output_dir / FOLDER).glob(f"*{SUFFIX}"))]


def chosen_identity(output_dir: Path, name: str | None, path: Path | None) -> Identity:
    """Return the identity that the arguments mean.

    Raises:
        InputError: it is not there, or several could be meant
    """
    there = identities(output_dir)
    if path is not None:
        found = Identity(check_name(name or path.stem, "--public-name"), path.expanduser(), output_dir.expanduser())
    elif name is not None:
        found = Identity(check_name(name, "--public-name"), _path_of(output_dir, name), output_dir.expanduser())
    elif len(there) == 1:
        found = there[0]
    else:
        names = ", ".join(identity.name for identity in there[:20])
        hint = f"give --public-name, one of {names}" if there else "give the --output-dir of your peer"
        raise InputError(f"{len(there) or 'No'} identities are in {output_dir / FOLDER}: {hint}.")
    found.peer_id  # noqa: B018 -- raises InputError if something is wrong with the file
    return found


def export_identity(identity: Identity, file: Path, passphrase: str, overwrite: bool) -> tuple[int, int]:
    """Write a backup of the key and of its memberships, which only the passphrase opens.

    Returns:
        how many memberships are in it, and how many are left out because their certificates end earlier

    Raises:
        InputError: the file cannot be written, or exists already
    """
    found = sorted(identity.memberships(), key=lambda kept: kept.certificate.end, reverse=True)
    memberships = [kept.credentials.to_json() for kept in found[:MAX_MEMBERSHIPS]]
    content = msgspec.json.encode(_Content(identity.name, identity.path.read_bytes(), memberships))
    _write(file.expanduser(), seal(content, passphrase).encode(), overwrite)
    return len(memberships), len(found) - len(memberships)


def read_backup(file: Path) -> bytes:
    """Read a backup for `import_identity`. No passphrase is needed to see whether the file is complete.

    Raises:
        InputError: it is no backup, or not complete
    """
    try:
        with open(file.expanduser(), encoding="utf-8") as opened:
            text = opened.read(MAX_SEALED_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(f"{file} cannot be read ({said}): name the file that swarm identity export wrote.") from None
    try:
        return check_sealed(text)
    except NotSealed as error:
        raise InputError(f"{file} {error}: take another copy of what swarm identity export wrote.") from None


def import_identity(
    backup: bytes, passphrase: str, output_dir: Path, name: str | None, path: Path | None, overwrite: bool
) -> Identity:
    """Put the key and its memberships where a peer of this machine looks for them.

    Args:
        backup: as `read_backup` returned it
        name: public name of the peer here; None for the name in the backup
        path: file for the key; None for the usual one in the output folder
        overwrite: replace another identity of that name

    Raises:
        InputError: the passphrase is wrong; another identity is there, or a running peer uses it; or nothing can be
            written
    """
    try:
        content = msgspec.json.decode(unseal(backup, passphrase), type=_Content)
    except WrongPassphrase:
        raise InputError("The passphrase is wrong: try again with the one with which the backup was made.") from None
    except (msgspec.MsgspecError, RecursionError):
        raise InputError("The backup was made by another version of this program: update it, and try again.") from None
    peer_id = _peer_id(content.key, "The backup holds no private key of a peer")
    name = check_name(name or content.name, "--public-name")
    output_dir = output_dir.expanduser()
    identity = Identity(name, path.expanduser() if path is not None else _path_of(output_dir, name), output_dir)
    _put_key(identity, content.key, peer_id, overwrite)
    try:
        for text in content.memberships:
            _put_membership(identity, text, peer_id)
    except OSError as error:
        raise InputError(f"The memberships cannot be written to {output_dir} ({error.strerror}): make room.") from None
    return identity


def check_passphrase(passphrase: str) -> str:
    """Raises InputError: it is too long"""
    if len(passphrase.encode(errors="surrogateescape")) > MAX_PASSPHRASE_BYTES:
        raise InputError(f"A passphrase has at most {MAX_PASSPHRASE_BYTES} bytes: choose a shorter one.")
    return passphrase


def _put_key(identity: Identity, key: bytes, peer_id: PeerID, overwrite: bool) -> None:
    if identity.path.exists():
        with contextlib.suppress(InputError):  # a file that is no key is treated like another identity
            if identity.peer_id == peer_id:
                return
        if identity.users():
            raise InputError(f"A running peer uses {identity.path}: end it first, or give another --public-name.")
        if not overwrite:
            raise InputError(
                f"{identity.path} is another identity: give another --public-name, or add --overwrite to lose that one."
            )
    _write(identity.path, key, overwrite)


def _put_membership(identity: Identity, text: str, peer_id: PeerID) -> None:
    """Write a membership, unless there is one already that counts at least as long."""
    credentials = Credentials.from_json(text)
    certificate = None if credentials is None else credentials.certificate_of(peer_id)
    if certificate is None:
        return
    folder = RunFolder.create(identity.output_dir, credentials.line.run_id, identity.name)
    there = Credentials.read(folder.membership)
    has = None if there is None else there.certificate_of(peer_id)
    if has is None or has.end < certificate.end:
        credentials.write(folder.membership)


def _write(path: Path, content: bytes, overwrite: bool) -> None:
    """Raises InputError: it is there already, and may not be replaced; or it cannot be written"""
    try:
        write_private(path, content, overwrite)
    except OSError as error:
        if not overwrite and os.path.lexists(path):  # says False where the folder may not be entered
            raise InputError(f"{path} is there already: choose another name, or add --overwrite.") from None
        raise InputError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder you may write to."
        ) from None


def _path_of(output_dir: Path, name: str) -> Path:
    return output_dir.expanduser() / FOLDER / f"{name}{SUFFIX}"


def _peer_id(key: bytes, otherwise: str) -> PeerID:
    try:
        return PeerID.from_identity(key)
    except Exception:  # protobuf, cryptography and hivemind each raise errors of their own
        raise InputError(f"{otherwise}: name another one, or restore it from a backup.") from None


def _uses(process: psutil.Process, identity: Path) -> bool:
    """Whether this process is the p2pd of a peer with this identity.

    p2pd gets the key file as an option `id=PATH`, which may be relative to its working folder.
    """
    try:
        if process.name() != _DAEMON:
            return False
        given = next((word for word in process.cmdline() if word.lstrip("-").startswith("id=")), None)
        return given is not None and Path(process.cwd(), given.partition("=")[2]).resolve() == identity.resolve()
    except psutil.Error:  # it has ended, or belongs to another user
        return False
