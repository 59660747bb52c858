"""A peer's own ledger: a line for each update that it has made with others, written as it makes them."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from hivemind.p2p import PeerID
from hivemind.utils import get_logger
from msgspec import Struct

from swarm.ledger.lines import (
    FORMAT,
    MAX_LINE_BYTES,
    AnyLine,
    Certified,
    NotALine,
    Signature,
    Start,
    Update,
    digest_of,
    group_of,
    read_line,
    to_line,
)
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.attestation import Attestation
from swarm.protocol.certificates import RENEWED_AFTER, Certificate
from swarm.protocol.round_report import StepReport
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.once import Once

logger = get_logger(__name__)

SIGN_SECONDS = 10.0
"""Time between two signatures, each of which takes about a millisecond. Lines after the last one are not signed yet."""
SIGN_BYTES = 2**21
"""After this many unsigned bytes the peer signs at once."""
MAX_CERTIFICATES = 4096
"""How many members' certificates are written at most."""


class Owner(Protocol):
    """The peer that keeps a ledger, as far as its key goes: other peers know it by this key."""

    @property
    def own(self) -> PeerID:
        """Peer id of the owner."""

    @property
    def local_public_key(self) -> bytes:
        """Public key in brackets, as it is the subkey of the owner's records."""

    def sign(self, text: bytes) -> bytes:
        """Return the peer's signature, in base 64."""


class OtherVersion(Exception):  # noqa: N818 (reads as what it is)
    """The file has lines of another version of this program: nothing can follow on them."""


class _LineOfAnyVersion(Struct):
    """The fields that a line has in all versions. Bytes without them are rubbish."""

    kind: str
    n: int
    before: str


_ANY_VERSION = msgspec.json.Decoder(_LineOfAnyVersion)


class LedgerFile:
    """Appends lines, each with the hash of the one before. What a crash has left of a line is cut off first.

    Args:
        path: of the file, which is made with the first line

    Raises:
        OSError: there is a file that cannot be read or mended
        OtherVersion: the file is of another version; it is left as it is
    """

    def __init__(self, path: Path):
        self.path = path
        self.n, self.before = 0, b""
        """Number of the next line, and the hash of the line before it."""
        self.size = 0
        """Bytes of all whole lines."""
        if path.exists():
            self._find_end()

    def _find_end(self) -> None:
        """Find the end of the last line, and cut off what is behind it: part of a line, or rubbish if power failed."""
        with open(self.path, "r+b") as file:
            end = begin = file.seek(0, os.SEEK_END)
            while begin > 0:  # read more and more of the end, until a line is found
                begin = max(0, begin - 2 * MAX_LINE_BYTES)
                file.seek(begin)
                found = _last_line(file.read(end - begin), is_whole=begin == 0)
                if found is not None:
                    content, after = found
                    self.n, self.before, self.size = read_line(content).n + 1, digest_of(content), begin + after
                    break
            file.truncate(self.size)

    def first_line(self) -> bytes:
        """Return the first line without its end; empty if there is none."""
        if not self.size:
            return b""
        with open(self.path, "rb") as file:
            return file.readline(MAX_LINE_BYTES + 1).removesuffix(b"\n")

    def append(self, line: AnyLine) -> None:
        """Append a line that was made with `n` and `before`.

        Raises:
            OSError: there is no room; then it is as if it had not been tried
        """
        self.extend([to_line(line)])

    def extend(self, lines: Sequence[bytes]) -> None:
        """Append lines that follow on this file and on each other, encoded, without their ends.

        Raises:
            OSError: there is no room, or another program has shortened the file: a hole would look like changed lines
        """
        content = b"".join(line + b"\n" for line in lines)
        with open(self.path, "r+b" if self.size else "wb") as file:
            if file.seek(0, os.SEEK_END) < self.size:
                raise OSError(errno.ESTALE, "another program has shortened it")
            file.seek(self.size)
            file.truncate()  # cuts off what did not fit as a whole last time
            file.write(content)
        self.n, self.before, self.size = self.n + len(lines), digest_of(lines[-1]), self.size + len(content)


class Ledger:
    """The ledger of one peer. A full disk costs lines and never the training, and causes one warning.

    Args:
        path: of its file
        run: start of the run's keys in the DHT
        protocol: wire protocol of this program; another one may name rounds in another way
        owner: signs
        name: under which the peer is shown
        admission: has the certificates that other members have shown
        sign_seconds: time between two signatures
    """

    def __init__(
        self,
        path: Path,
        run: str,
        protocol: int,
        owner: Owner,
        name: str,
        admission: Admission = OPEN,
        sign_seconds: float = SIGN_SECONDS,
    ):
        self._path, self._run, self._owner, self._name, self._admission = path, run, owner, name, admission
        self._protocol, self._sign_seconds = protocol, sign_seconds
        self._file: LedgerFile | None = None
        self._signed_at, self._signed_bytes = 0.0, 0
        self._certificates: dict[PeerID, Certificate] = {}
        """By peer, the last certificate that was written."""
        self._told: Attestation | None = None
        self._complaints = Once()

    def begin(self) -> None:
        """Begin to write, since the peer begins to train. The ledger goes on where it was."""
        self._write(self._begin)

    def _begin(self) -> LedgerFile:
        key = self._owner.local_public_key.decode().removeprefix("[owner:").removesuffix("]")
        file = self._open(key)
        organiser = b"" if self._admission.is_open else self._admission.authority.organiser
        start = Start(file.n, file.before, time.time(), FORMAT, self._run, organiser, key, self._name, self._protocol)
        file.append(start)
        self._file = file
        self._show([self._owner.own])
        self._sign()  # this covers lines from before a crash, too
        return file

    def _open(self, key: str) -> LedgerFile:
        """Open the earlier file. If no line can follow on it, it is kept under another name, and a new one begins."""
        try:
            file = LedgerFile(self._path)
            if not file.size or self._goes_on(file.first_line(), key):
                return file
            _moved_aside(self._path)
        except OtherVersion:
            kept = _moved_aside(self._path)
            said = f"it is kept as {kept.name}, and a new one begins"
            logger.warning(f"The ledger {self._path} is of another version of this program: {said}.")
        return LedgerFile(self._path)

    def _goes_on(self, first: bytes, key: str) -> bool:
        """Whether a file that begins with this line is of this run and peer.

        Raises:
            OtherVersion: it is, but a program of another protocol has written it
        """
        try:
            start = read_line(first)
        except NotALine:
            return False
        if not isinstance(start, Start) or (start.run, start.key) != (self._run, key):
            return False
        if start.protocol != self._protocol:
            raise OtherVersion
        return True

    def note(self, report: StepReport, attested: Attestation | None = None) -> None:
        """Write a line about an update that the peer has made.

        Args:
            report: on the update
            attested: what the peer says of the state that it holds
        """
        self._write(lambda: self._note(report, attested))

    def _note(self, report: StepReport, attested: Attestation | None) -> None:
        file = self._file or self._begin()  # when the training began, there was no room
        group = group_of(report, self._owner.own, os.urandom(LINEAGE_BYTES), self._run)
        self._show(group.peer_ids)
        state = None
        if attested is not None and attested is not self._told and attested.digest:
            state, self._told = (attested.step, attested.lineage, attested.digest), attested
        file.append(Update.of(file.n, file.before, time.time(), group, state))
        is_late = time.monotonic() - self._signed_at >= self._sign_seconds
        if is_late or file.size - self._signed_bytes >= SIGN_BYTES:
            self._sign()

    def _show(self, peers: Iterable[PeerID]) -> None:
        """Write the certificates of these peers, unless one is written and it is too early for another one."""
        if self._admission.is_open:
            return
        for peer in peers:
            member = self._admission.own if peer == self._owner.own else self._admission.member(peer)
            if member is None:
                continue
            written = self._certificates.get(peer)
            is_new = len(self._certificates) < MAX_CERTIFICATES if written is None else _follows(member, written)
            if is_new:
                self._file.append(Certified(self._file.n, self._file.before, member.signed))
                self._certificates[peer] = member

    def _sign(self) -> None:
        file = self._file
        signature = self._owner.sign(Signature.text(self._run, file.n, file.before)).decode()
        file.append(Signature(file.n, file.before, signature))
        self._signed_at, self._signed_bytes = time.monotonic(), file.size

    def close(self) -> None:
        """Sign what is not signed yet, since the peer leaves."""
        if self._file is not None and self._file.size > self._signed_bytes:
            self._write(self._sign)

    def _write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if self._complaints.first():
                advice = " Make room." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
                logger.warning(
                    f"{self._path} cannot be written any more ({error.strerror}): training goes on without it.{advice}"
                )


def _follows(member: Certificate, written: Certificate) -> bool:
    """Whether a certificate is written in place of the last one: a member that renews all the time must fill no ledger.

    It is written if it was made when at least half of the time was over after which members renew. It is also written
    if the last one has ended.
    """
    if member.end <= written.end:
        return False
    return written.is_to_be_renewed(member.begin, RENEWED_AFTER / 2) or time.time() > written.end


def _moved_aside(path: Path) -> Path:
    """Rename the file so that it is kept, and return its new path."""
    number = 1
    while (other := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(other)


def _last_line(content: bytes, is_whole: bool) -> tuple[bytes, int] | None:
    """Return the last line that can be read, and where it ends; None if there is none in this content.

    Args:
        content: the end of a file
        is_whole: whether the content begins with a line, not in the middle of one

    Raises:
        OtherVersion: there are lines of another version behind it
    """
    after = len(content)
    while (end := content.rfind(b"\n", 0, after)) >= 0:
        begin = content.rfind(b"\n", 0, end) + 1
        if begin == 0 and not is_whole:
            return None
        try:
            read_line(content[begin:end])
        except NotALine:
            if _is_of_another_version(content[begin:end]):
                raise OtherVersion from None
            after = begin  # it is cut off with all that is behind it
            continue
        return content[begin:end], end + 1
    return None


def _is_of_another_version(line: bytes) -> bool:
    """Whether bytes that are no line here are one of another version."""
    try:
        _ANY_VERSION.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True
