"""The tables of removed members in the organiser's books, and the signed list that is made of them."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Set
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from recipe.errors import InputError
from swarm.enrolment.organiser_key import check_right
from swarm.protocol.certificates import (
    CLOCK_SECONDS,
    MAX_REASONS_BYTES,
    MAX_REMOVED,
    Authority,
    Removals,
    Right,
    Signer,
    shown_date,
)

SET_BACK_SECONDS = 5.0
"""A time of this machine may be so far in the future and still count: NTP sets a clock back by less."""
MAX_SKIPPED = 1000
"""Numbers that may lie between two lists of which the later was signed without a look at the swarm's: two signers that
both have not looked rarely take the same one."""
TABLES = (
    "CREATE TABLE IF NOT EXISTS removed (place INTEGER PRIMARY KEY, serial INTEGER NOT NULL UNIQUE, why TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS removed_here (serial INTEGER PRIMARY KEY)",  # removed here, not in lists from elsewhere
    "CREATE TABLE IF NOT EXISTS restored_here (serial INTEGER PRIMARY KEY, number INTEGER NOT NULL)",
    """CREATE TABLE IF NOT EXISTS removal_list (
        only_one INTEGER PRIMARY KEY CHECK (only_one = 1), number INTEGER NOT NULL, signed BLOB NOT NULL)""",
)


class RemovalBooks:
    """The removed members, in one open transaction of the organiser's books.

    Args:
        books: the transaction
        path: of the books, for sentences
        clock: returns seconds since 1970
    """

    def __init__(self, books: sqlite3.Connection, path: Path, clock: Callable[[], float]):
        self._books, self._path, self._clock = books, path, clock

    # ---- what the books have ----------------------------------------------------------------------------------------

    @property
    def newest(self) -> tuple[int, bytes]:
        """Number and bytes of the signed list."""
        return self._books.execute("SELECT number, signed FROM removal_list").fetchone() or (0, b"")

    @property
    def removed(self) -> dict[int, str]:
        """The reasons by the members' serials, the earliest removal first."""
        return dict(self._books.execute("SELECT serial, why FROM removed ORDER BY place").fetchall())

    @property
    def _removed_here(self) -> set[int]:
        """The members that these books have removed, not only lists from elsewhere."""
        return {serial for (serial,) in self._books.execute("SELECT serial FROM removed_here").fetchall()}

    @property
    def _restored_here(self) -> dict[int, int]:
        """When members were restored here that are not removed again, in milliseconds since 1970.

        Times that are still to come are left out: the clock was wrong, so nobody knows which lists were made before.
        """
        latest = int(1000 * (self._clock() + SET_BACK_SECONDS))
        return dict(
            self._books.execute("SELECT serial, number FROM restored_here WHERE number <= ?", (latest,)).fetchall()
        )

    @property
    def from_the_future(self) -> str:
        """A sentence that says why peers refuse the list, if it was made a day ahead of this clock; else empty."""
        made_at = self.newest[0] / 1000
        if made_at <= self._clock() + CLOCK_SECONDS:
            return ""
        return (
            f"The list of removed members in {self._path} was made on {shown_date(made_at)}, in the future, so peers "
            "refuse it: set this machine's clock right (NTP); if it is right, `swarm remove NAME` with a removed "
            "member's name makes the list anew as soon as a peer answers."
        )

    # ---- lists from elsewhere ---------------------------------------------------------------------------------------

    def take_over(self, list_: Removals, signed: bytes, authority: Authority) -> bool:
        """Take over a list if it is newer; return whether it is."""
        number, before = self.newest
        if list_.number <= number:
            return False
        ours, restored = self.removed, self._restored_here
        theirs = {
            serial: why or ours.get(serial, "")
            for serial, why in list_.removed.items()
            if list_.number > restored.get(serial, -1)
        }
        if before and len(list_.removed) < MAX_REMOVED:  # a full list leaves out members that stay removed
            listed = Removals.read(before, authority, self._clock()).removed.keys()
            for serial in listed - list_.removed.keys() - self._removed_here:
                ours.pop(serial, None)
        self._keep(list_.number, signed, ours | theirs)
        return True

    def is_outdated(self, authority: Authority) -> bool:
        """Whether the newest list has members that were restored here, or lacks some that were removed here and fit in.

        Other members that it lacks are of earlier lists from elsewhere, and full lists have left them out.

        Raises:
            InputError: the list has no room for all members that have to be in it
        """
        number, signed = self.newest
        if not signed or self.from_the_future:
            return False
        listed, removed = Removals.read(signed, authority, self._clock()).removed.keys(), self.removed
        if not listed.isdisjoint(self._restored_here):
            return True
        lacking = self._removed_here & removed.keys() - listed
        fitting = self._fitting(Removals(authority.run_id, number, removed), frozenset()) if lacking else None
        return fitting is not None and not lacking.isdisjoint(fitting.removed)

    # ---- the list that is signed here -------------------------------------------------------------------------------

    def sign(
        self,
        signer: Signer,
        authority: Authority,
        has_looked: bool,
        removed: Set[int] = frozenset(),
        why: str = "",
        restored: Set[int] = frozenset(),
    ) -> bytes:
        """Sign the next list, and keep it; arguments and errors as of `Registry.remove`.

        Args:
            removed: serials of members that are removed now, for the reason `why`
            restored: serials of members that may take part again
        """
        check_right(signer, authority, Right.REMOVE, self._clock())
        if future := self.from_the_future:
            raise InputError(future)
        newest = self.newest[0]
        if not has_looked and signer.warrant and newest < 1000 * authority.read_warrant(signer.warrant)[2]:
            raise InputError(
                "No list was signed: none that is known here is newer than this deputy's warrant, so a new one could "
                "let in members that were removed since. Give the command again without --offline while peers train."
            )
        before = Removals(authority.run_id, newest, self.removed)
        everybody = before.with_removed(removed, why) if removed else before.without(restored)
        self._books.executemany("INSERT OR IGNORE INTO removed_here VALUES (?)", [(serial,) for serial in removed])
        list_ = self._fitting(everybody, removed)
        if not has_looked:
            number = newest + 1 + secrets.randbelow(MAX_SKIPPED)
            list_ = replace(list_, number=min(number, everybody.number))
        signed = list_.signed_by(signer)
        self._keep(list_.number, signed, everybody.removed)  # also the ones that the list leaves out
        since = [(serial, everybody.number) for serial in restored]
        self._books.executemany("INSERT OR REPLACE INTO restored_here VALUES (?, ?)", since)
        return signed

    def begin_anew(self) -> None:
        """Let the next list be numbered by this clock alone, which has to be right. The members stay removed."""
        self._books.execute("DELETE FROM removal_list")
        self._books.execute("DELETE FROM restored_here")  # with times of the wrong clock

    def _fitting(self, list_: Removals, chosen: Set[int]) -> Removals:
        """Shorten a list that is full: it leaves out members with ended certificates, which the books still know.

        Some serials may be of no member here. Of these, the ones that these books have removed come first, and of the
        rest the latest: a deputy can have invented all of them. If the reasons are too long together, the last members
        in this order have none.

        Args:
            chosen: members that are removed now, and stay in the list in any case
        """
        ends = dict(self._books.execute("SELECT serial, certificate_ends_at FROM members").fetchall())
        here = self._removed_here

        def rank(serial: int) -> int:
            if serial in chosen or ends.get(serial, 0) > self._clock():
                return 0
            if serial in ends:  # a member whose certificate has ended
                return 3
            return 1 if serial in here else 2

        ranked = sorted(reversed(list_.removed), key=rank)
        if len(ranked) > MAX_REMOVED and rank(ranked[MAX_REMOVED]) == 0:
            raise InputError(
                f"Run {list_.run_id} has {MAX_REMOVED} removed members with certificates that still count, and the "
                "list has no room for more. Close all invitations (swarm invite --close) and wait until some "
                "certificates have ended, or start another run."
            )
        sizes = accumulate(len(list_.removed[serial].encode()) for serial in ranked)
        fits = {serial: size <= MAX_REASONS_BYTES for serial, size in zip(ranked[:MAX_REMOVED], sizes, strict=False)}
        removed = {serial: why if fits[serial] else "" for serial, why in list_.removed.items() if serial in fits}
        return replace(list_, removed=removed)

    def _keep(self, number: int, signed: bytes, removed: dict[int, str]) -> None:
        self._books.execute("INSERT OR REPLACE INTO removal_list VALUES (1, ?, ?)", (number, signed))
        self._books.execute("DELETE FROM removed")
        self._books.executemany("INSERT INTO removed (serial, why) VALUES (?, ?)", removed.items())
        self._books.execute("DELETE FROM removed_here WHERE serial NOT IN (SELECT serial FROM removed)")
        self._books.execute("DELETE FROM restored_here WHERE serial IN (SELECT serial FROM removed)")
