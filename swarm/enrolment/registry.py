"""The organiser's books of a run: invitations, members, and members that were removed.

They are one SQLite file, since several processes write at the same time: the enrolment server, and the organiser's
commands.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from hivemind.p2p import PeerID

from recipe.errors import InputError
from swarm.enrolment.contact import BOOKS_FILE
from swarm.enrolment.join_line import TOKEN_BYTES
from swarm.enrolment.messages import printable
from swarm.enrolment.organiser_key import CLOCK_SECONDS, check_right
from swarm.enrolment.removal_books import TABLES, RemovalBooks
from swarm.enrolment.removed import SAID
from swarm.protocol.certificates import Authority, Certificate, Removals, Right, Role, Signer

VERSION = 1
BUSY_SECONDS = 10.0
"""How long a process waits while another one writes."""
MAX_MEMBERS = 100_000
MAX_DAYS = 3650
NO_NAME = "unnamed"
_TABLES = (
    """CREATE TABLE IF NOT EXISTS invitations (
        token_sha256 BLOB PRIMARY KEY, name TEXT NOT NULL, roles INTEGER NOT NULL, uses_left INTEGER NOT NULL,
        expires_at REAL NOT NULL, created_at REAL NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS members (
        serial INTEGER PRIMARY KEY, peer_id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, roles INTEGER NOT NULL,
        enrolled_at REAL NOT NULL, certificate_ends_at INTEGER NOT NULL, token_sha256 BLOB NOT NULL)""",
    *TABLES,
)
_USABLE = "invitations WHERE uses_left > 0 AND expires_at >= ?"
_OF_MEMBER = "token_sha256 = (SELECT token_sha256 FROM members WHERE serial = ?)"
_MEMBERS = """SELECT members.serial, peer_id, name, roles, enrolled_at, certificate_ends_at, why
    FROM members LEFT JOIN removed ON removed.serial = members.serial"""


class NotInvited(ValueError):  # noqa: N818 (reads as what it says)
    """This volunteer does not become a member. The text, the reason, is the end of a sentence for the volunteer."""


@dataclass(frozen=True)
class Member:
    """A member, as the books have it.

    Args:
        serial: number of this member, in all its certificates
        peer_id: the only peer that can use them
        name: under which the organiser knows the member
        roles: what the member may do
        enrolled_at: seconds since 1970
        certificate_ends_at: latest end of its certificates, seconds since 1970; 0 before the first
        why_removed: the organiser's reason; None as long as the member may take part
    """

    serial: int
    peer_id: PeerID
    name: str
    roles: Role
    enrolled_at: float
    certificate_ends_at: int
    why_removed: str | None


@dataclass(frozen=True)
class Invitation:
    """An invitation, with which people enrol.

    Args:
        name: of the invited person; empty if members choose their own names
        roles: what these members may do
        uses_left: how many can still enrol with it; 0 as well if the organiser has closed it
        expires_at: seconds since 1970
    """

    name: str
    roles: Role
    uses_left: int
    expires_at: float


class Registry:
    """The books of one run. Each method is a transaction. Any number of threads and processes may use the same folder.

    Args:
        folder: of this run; made if it is missing
        clock: returns seconds since 1970

    Raises:
        InputError: the books cannot be used; all methods raise it as well
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time):
        self.folder, self._clock = folder, clock
        self._path = folder / BOOKS_FILE
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite cannot switch on its log of changes while another process writes, so one at a time may try.
            with FileLock(folder / f"{BOOKS_FILE}.lock", timeout=BUSY_SECONDS, mode=0o600):
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
                self._prepare()
        except OSError as error:
            raise InputError(
                f"The organiser's books {self._path} cannot be used ({error.strerror or error}): see that this user "
                "may read and write there."
            ) from None

    # ---- invitations ------------------------------------------------------------------------------------------------

    def invite(self, name: str, days: float, uses: int, roles: Role) -> bytes:
        """Make a new invitation: 16 bytes, of which only a hash is kept here.

        Args:
            name: of the invited person; empty if members choose their own names
            days: how long it can be used, from now on
            uses: how many may enrol with it
            roles: what these members may do

        Raises:
            InputError: as the class, or a number is out of bounds
        """
        if not 0 < days <= MAX_DAYS:
            raise InputError(
                f"An invitation for {days:g} days cannot be made: give more than 0 and at most {MAX_DAYS}."
            )
        if not 1 <= uses <= MAX_MEMBERS:
            raise InputError(f"An invitation for {uses} members cannot be made: give 1 to {MAX_MEMBERS}.")
        if not roles:
            raise InputError("An invitation without a role allows nothing: give at least one.")
        token, now = secrets.token_bytes(TOKEN_BYTES), self._clock()
        with self._books() as books:
            books.execute(
                "INSERT INTO invitations VALUES (?, ?, ?, ?, ?, ?)",
                (_digest(token), printable(name), int(roles), uses, now + days * 24 * 3600, now),
            )
        return token

    def invitations(self) -> list[Invitation]:
        """Return the invitations that can still be used, in the order in which they were made, without their tokens."""
        with self._books() as books:
            rows = books.execute(
                f"SELECT name, roles, uses_left, expires_at FROM {_USABLE} ORDER BY created_at, rowid",
                (self._clock(),),
            ).fetchall()
        return [Invitation(name, Role(roles), uses_left, expires_at) for name, roles, uses_left, expires_at in rows]

    def invitation_of(self, token: bytes) -> Invitation | None:
        """Return the invitation as it stands now, usable or not; None if it is not known here."""
        with self._books() as books:
            found = books.execute(
                "SELECT name, roles, uses_left, expires_at FROM invitations WHERE token_sha256 = ?", (_digest(token),)
            ).fetchone()
        return None if found is None else Invitation(found[0], Role(found[1]), found[2], found[3])

    def use_invitation(self, token: bytes, peer_id: PeerID, name: str) -> Member:
        """Make the peer a member, which costs one use of the invitation. A peer that is a member stays what it is.

        Args:
            name: that the peer gives itself; counts only if the invitation has no name

        Raises:
            NotInvited: the peer does not become a member
        """
        with self._books() as books:
            member = _one_member(books, peer_id)
            if member is not None and member.why_removed is not None:
                raise NotInvited(removed_sentence(member))
            found = books.execute(
                "SELECT name, roles, uses_left, expires_at FROM invitations WHERE token_sha256 = ?", (_digest(token),)
            ).fetchone()
            if found is None:
                raise NotInvited("this invitation is not known here: ask the organiser for a new join line")
            if member is not None:
                return member
            given, roles, uses_left, expires_at = found
            if self._clock() > expires_at:
                raise NotInvited("this invitation has expired: ask the organiser for a new join line")
            if uses_left < 1:
                raise NotInvited("this invitation has been used up: ask the organiser for a new join line")
            if books.execute("SELECT COUNT(*) FROM members").fetchone()[0] >= MAX_MEMBERS:
                raise NotInvited(f"this run has {MAX_MEMBERS} members, more cannot be kept")
            self._enrol(books, peer_id, given or printable(name) or NO_NAME, roles, _digest(token))
            books.execute("UPDATE invitations SET uses_left = uses_left - 1 WHERE token_sha256 = ?", (_digest(token),))
            return _one_member(books, peer_id)

    def close_invitation_of(self, serial: int) -> int:
        """Close the invitation with which this member came: no other peer can use it any more.

        Returns:
            how many could have used it until now
        """
        with self._books() as books:
            uses = self._uses_left(books, serial)
            books.execute(f"UPDATE invitations SET uses_left = 0 WHERE {_OF_MEMBER}", (serial,))
        return uses

    def close_invitations(self) -> int:
        """Close all invitations that were made so far.

        Returns:
            how many of them could be used until now
        """
        with self._books() as books:
            (num_open,) = books.execute(f"SELECT COUNT(*) FROM {_USABLE}", (self._clock(),)).fetchone()
            books.execute("UPDATE invitations SET uses_left = 0")
        return num_open

    def uses_left_of(self, serial: int) -> int:
        """Return how many may still join with the invitation with which this member came."""
        with self._books() as books:
            return self._uses_left(books, serial)

    def _uses_left(self, books: sqlite3.Connection, serial: int) -> int:
        found = books.execute(
            f"SELECT uses_left FROM invitations WHERE {_OF_MEMBER} AND expires_at >= ?", (serial, self._clock())
        ).fetchone()
        return found[0] if found else 0

    def _enrol(self, books: sqlite3.Connection, peer_id: PeerID, name: str, roles: int, token: bytes) -> None:
        now = self._clock()
        greatest = books.execute("SELECT COALESCE(MAX(serial), 0) FROM members").fetchone()[0]
        serial = max(int(1000 * now), greatest + 1)
        books.execute(
            "INSERT INTO members VALUES (?, ?, ?, ?, ?, 0, ?)", (serial, peer_id.to_base58(), name, roles, now, token)
        )

    # ---- members ----------------------------------------------------------------------------------------------------

    def member_of(self, peer_id: PeerID) -> Member | None:
        """Return the member with this peer id; None if it has never enrolled here."""
        with self._books() as books:
            return _one_member(books, peer_id)

    def members(self) -> list[Member]:
        """Return all members in the order in which they have enrolled, removed ones included."""
        with self._books() as books:
            return _members(books, "ORDER BY members.serial")

    def find(self, name_or_peer_id_or_serial: str) -> list[Member]:
        """Return the members that the text may mean; several may have the same name."""
        wanted = name_or_peer_id_or_serial
        if not wanted.isprintable():  # all names are printable, and SQLite takes no half of a surrogate pair
            return []
        with self._books() as books:
            return _members(
                books,
                "WHERE name = ?1 OR peer_id = ?1 OR CAST(members.serial AS TEXT) = ?1 ORDER BY members.serial",
                wanted,
            )

    def certify(self, member: Member, signer: Signer, authority: Authority, days: float) -> bytes:
        """Sign a certificate of what the books say of a member, and note its end.

        A certificate that a deputy signs ends with the deputy's warrant at the latest.

        Args:
            member: as the books have it
            signer: the organiser's key, or that of a deputy with the right to enrol
            authority: the run, and the organiser's public key
            days: how long it counts

        Raises:
            InputError: as the class, or this key cannot sign certificates
        """
        now = self._clock()
        check_right(signer, authority, Right.ENROL, now)
        begin, end = int(now - CLOCK_SECONDS), min(int(now + days * 24 * 3600), authority.end_of(signer))
        made = Certificate(authority.run_id, member.peer_id, member.serial, member.roles, begin, end, member.name)
        self.note_certificate(member.serial, end)
        return made.signed_by(signer)

    def note_certificate(self, serial: int, ends_at: int) -> None:
        """Note that this member has got a certificate. A full list of removed members goes by the latest end.

        Args:
            serial: of the member
            ends_at: seconds since 1970
        """
        with self._books() as books:
            books.execute(
                "UPDATE members SET certificate_ends_at = MAX(certificate_ends_at, ?) WHERE serial = ?",
                (ends_at, serial),
            )

    # ---- removed members --------------------------------------------------------------------------------------------

    def remove(
        self, serials: Iterable[int], why: str, signer: Signer, authority: Authority, has_looked: bool = True
    ) -> bytes:
        """Remove members: they may not take part any more.

        Args:
            serials: of these members
            why: the reason, which the members themselves read
            signer: the organiser's key, or that of a deputy with the right to remove
            authority: the run, and the organiser's public key
            has_looked: the swarm's newest list is in the books. If not, the new list is numbered right after the last
                one that is known here, so that it takes the place of none that was signed elsewhere meanwhile; `merged`
                brings the two together. A deputy signs none then if the last known one is older than its warrant: what
                it signs counts from then on only.

        Returns:
            the new list, signed

        Raises:
            InputError: as the class, or this key cannot sign the list, or not without a look
        """
        with self._removals() as removals:
            return removals.sign(signer, authority, has_looked, removed=set(serials), why=why)

    def restore(self, serials: Iterable[int], signer: Signer, authority: Authority, has_looked: bool = True) -> bytes:
        """Let these members take part again; the rest as `remove`."""
        with self._removals() as removals:
            return removals.sign(signer, authority, has_looked, restored=set(serials))

    def removals(self) -> bytes:
        """Return the newest list of removed members, as it was signed; empty if none was ever signed."""
        with self._removals() as removals:
            return removals.newest[1]

    def why_removed(self, serial: int) -> str | None:
        """Return the reason in the books, also for an unknown member; None if this member is not removed."""
        with self._removals() as removals:
            return removals.removed.get(serial)

    @property
    def why_peers_refuse_the_list(self) -> str:
        """A sentence that says why, if the list was made while the clock was more than a day ahead; else empty."""
        with self._removals() as removals:
            return removals.from_the_future

    def begin_list_anew(self) -> None:
        """Let the next list be numbered by this clock alone, which has to be right. The members stay removed."""
        with self._removals() as removals:
            removals.begin_anew()

    def keep_removals(self, signed: bytes, authority: Authority) -> bool:
        """Take over a list of removed members that came from elsewhere, if it is newer than the one here.

        Members that were removed here stay so even if the other list does not have them: its signer may not have known.
        Others that the list before had and this one lacks may take part again, unless this one is full. Members that
        were restored here after the other list was made stay restored.

        Returns:
            whether the list is newer

        Raises:
            NotSigned: it is no list of this run
        """
        list_ = Removals.read(signed, authority, self._clock())
        with self._removals() as removals:
            return removals.take_over(list_, signed, authority)

    def merged(self, heard: bytes, signer: Signer, authority: Authority) -> bytes:
        """Take over the swarm's list as `keep_removals` does, and return the newest list.

        It is signed anew if it lacks members that were removed here, or has some that were restored here: its signer
        did not know. If this key may not sign lists, or the list has no room, it stays as it is.

        Args:
            heard: the swarm's newest list, as it was signed
            signer: the organiser's key, or that of a deputy
            authority: the run, and the organiser's public key

        Raises:
            InputError: as the class
            NotSigned: it is no list of this run
        """
        list_ = Removals.read(heard, authority, self._clock())
        with self._removals() as removals:
            removals.take_over(list_, heard, authority)
            with contextlib.suppress(InputError):
                if removals.is_outdated(authority):
                    removals.sign(signer, authority, has_looked=True)
            return removals.newest[1]

    @contextlib.contextmanager
    def _removals(self) -> Iterator[RemovalBooks]:
        with self._books() as books:
            yield RemovalBooks(books, self._path, self._clock)

    # ---- the file ---------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        with self._connected() as books:
            books.execute("PRAGMA journal_mode = WAL")
            books.execute("BEGIN IMMEDIATE")
            version = books.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise InputError(
                    f"The organiser's books {self._path} were written by a later version of this program: update it."
                )
            for table in _TABLES:
                books.execute(table)
            books.execute(f"PRAGMA user_version = {VERSION}")
            books.execute("COMMIT")

    @contextlib.contextmanager
    def _books(self) -> Iterator[sqlite3.Connection]:
        """Open one transaction: all of it happens, or nothing."""
        with self._connected() as books:
            books.execute("BEGIN IMMEDIATE")
            yield books
            books.execute("COMMIT")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for one use: none is ever shared with another thread, or with a forked process."""
        try:
            with contextlib.closing(
                sqlite3.connect(
                    f"{self._path.resolve().as_uri()}?mode=rw", BUSY_SECONDS, isolation_level=None, uri=True
                )
            ) as books:
                yield books
        except sqlite3.OperationalError as error:
            raise InputError(
                f"The organiser's books {self._path} cannot be used ({error}): see that the file is there, that this "
                "user may write it, and that the disk has room."
            ) from None
        except sqlite3.DatabaseError as error:
            raise InputError(
                f"The organiser's books {self._path} are damaged ({error}): restore the file from a copy."
            ) from None


def removed_sentence(member: Member) -> str:
    """Return the end of the sentence that a removed volunteer reads."""
    return f"{SAID}: {member.why_removed or 'no reason given'}"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _members(books: sqlite3.Connection, which: str, *values: str) -> list[Member]:
    rows = books.execute(f"{_MEMBERS} {which}", values).fetchall()
    return [
        Member(serial, PeerID.from_base58(peer_id), name, Role(roles), enrolled_at, ends_at, why)
        for serial, peer_id, name, roles, enrolled_at, ends_at, why in rows
    ]


def _one_member(books: sqlite3.Connection, peer_id: PeerID) -> Member | None:
    return next(iter(_members(books, "WHERE peer_id = ?", peer_id.to_base58())), None)
