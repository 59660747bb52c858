"""Reads one peer's ledger and checks it by itself: line numbers, hashes, signatures, and the names of groups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hivemind.p2p import PeerID

from recipe.errors import InputError
from swarm.ledger.lines import (
    MAX_LINE_BYTES,
    AnyLine,
    Certified,
    NotALine,
    Signature,
    Start,
    Update,
    digest_of,
    is_signed,
    read_line,
)
from swarm.protocol.certificates import printed
from swarm.protocol.run_names import has_organiser


class Kind(StrEnum):
    """What is wrong with a line: the end of a sentence that begins with "it"."""

    UNREADABLE = "is not a ledger line"
    TORN = "has no end: the file was cut off, or its peer crashed here and did not come back"
    HEADLESS = "begins in the middle of a ledger: lines before it were removed"
    CHANGED = "does not match the line above: one of the two was changed"
    MISSING = "does not follow the line above: lines between them were removed"
    OUT_OF_ORDER = "is in the wrong place: it was moved or repeated"
    OTHER_RUN = "belongs to the ledger of another run or another peer"
    FALSE_ORGANISER = "names another organiser than that of its run"
    FALSE_KEY = "has an invalid public key"
    FALSE_SIGNATURE = "was not signed by the peer whose ledger it is"
    FALSE_GROUP = "has a group id that does not match the tickets of its members"
    NOT_IN_GROUP = "is about a group without the peer that signed it"
    TWO_ROUNDS = "is a second update of the same weights: its peer reports two different rounds"
    TWO_VERSIONS = "contradicts what its peer has signed about the same round"
    CONTRADICTS = "contradicts most members of its round"
    TWO_HISTORIES = "is signed, and so is a different line with this number: its peer shows two histories"
    FALSE_CERTIFICATE = "has a certificate that the organiser has not signed"
    UNKNOWN_PEER = "begins the ledger of a peer that has no certificate of this run"


@dataclass(frozen=True)
class Place:
    """Where a line stands; the first one has the number 1."""

    file: str
    line: int


@dataclass(frozen=True)
class Finding:
    """Something in a ledger that an honest peer does not write.

    Args:
        place: of the line
        peer: owner of the ledger; empty if it is not known
        kind: what is wrong
    """

    place: Place
    peer: str
    kind: Kind

    def __str__(self) -> str:
        whose = f" ({self.peer})" if self.peer else ""
        return f"{self.place.file}, line {self.place.line}{whose}: it {self.kind}."


Find = Callable[[Kind, Place, str], None]
"""Called with what is wrong, where, and the peer id of the ledger's owner."""


@dataclass(frozen=True, slots=True)
class Word:
    """What a line of a ledger says about an update, without what the name of the group fixes already.

    Args:
        n: number of the line in the ledger
        digest: of the line
        place: of the line
        group: name of the round; empty for lines about something else
        most: samples for which one member counts at most
        state: step, lineage and digest of a state that the peer held
        certificate: that a member has shown; such a line says nothing else
    """

    n: int
    digest: bytes
    place: Place
    group: bytes = b""
    most: int = 0
    state: tuple[int, bytes, bytes] | None = None
    certificate: bytes = b""


@dataclass(frozen=True, slots=True)
class Given:
    """What the members of a group brought.

    Args:
        claims: each member, and the samples that it says it gave
        step: that the round has ended
        content: digest of all that the group's name is made of; the name was checked
    """

    claims: tuple[tuple[str, int], ...]
    step: int
    content: bytes


class Chain:
    """One peer's ledger, read line by line.

    Args:
        start: its first line
        peer: its owner
        place: of that line
        given: by name of a group, what its members brought; filled in here
        find: called with each fault
    """

    def __init__(self, start: Start, peer: PeerID, place: Place, given: dict[bytes, Given], find: Find):
        self.start, self.place, self.peer = start, place, peer.to_base58()
        self.id = b""
        """Digest of the first line."""
        self.said: list[Word] = []
        """What the peer has signed."""
        self.unsigned: list[Word] = []
        """What the peer has written and not signed, or not yet."""
        self._given, self._find = given, find
        self._n, self._before = 0, b""
        self._updated: set[tuple[int, bytes]] = set()
        """Step and lineage of the weights that the peer has updated since its last start. A crash may take it back to
        weights that it has updated before."""

    @property
    def name(self) -> str:
        """Name under which the peer wants to be shown."""
        return printed(self.start.name)

    def follow(self, line: AnyLine, data: bytes, place: Place) -> None:
        """Take one more line.

        Args:
            line: the next line
            data: its bytes
            place: where it stands
        """
        if (line.n, line.before) != (self._n, self._before):
            kind = Kind.CHANGED if line.n == self._n else Kind.MISSING if line.n > self._n else Kind.OUT_OF_ORDER
            self._find(kind, place, self.peer)
            self.unsigned.clear()  # a later signature does not cover these lines
        digest = digest_of(data)
        self.id = self.id or digest
        self._n, self._before = line.n + 1, digest
        match line:
            case Signature():
                self._take(line, place)
                return
            case Start() if (line.run, line.organiser, line.key) != (
                self.start.run,
                self.start.organiser,
                self.start.key,
            ):
                self._find(Kind.OTHER_RUN, place, self.peer)
                return
            case Start():
                self._updated.clear()
                word = Word(line.n, digest, place)
            case Certified():
                word = Word(line.n, digest, place, certificate=line.certificate)
            case Update():
                if (kind := self._fault(line)) is not None:
                    self._find(kind, place, self.peer)
                    return
                word = Word(line.n, digest, place, line.group, line.most, line.state)
        self.unsigned.append(word)

    def _take(self, line: Signature, place: Place) -> None:
        if not is_signed(self.start, line):
            self._find(Kind.FALSE_SIGNATURE, place, self.peer)
            return
        self.said += self.unsigned
        self.unsigned.clear()

    def _is_named_rightly(self, line: Update) -> bool:
        """Do the same as `Update.is_named_rightly`, at a fifth of the cost if another member has said the same."""
        known, content = self._given.get(line.group), line.content
        if known is not None:
            return known.content == content or line.is_named_rightly(self.start.run)
        if not line.is_named_rightly(self.start.run):
            return False
        claims = tuple((sys.intern(claim.peer), claim.samples) for claim in line.members)
        self._given[line.group] = Given(claims, line.step, content)
        return True

    def _fault(self, line: Update) -> Kind | None:
        """Return what an honest peer would not say of an update; None if nothing is wrong."""
        if not self._is_named_rightly(line):
            return Kind.FALSE_GROUP
        if all(claim.peer != self.peer for claim in line.members):
            return Kind.NOT_IN_GROUP
        if len(line.members) > 1:  # a peer that went on alone may go back, and update the same weights again
            weights = (line.step, line.lineage)
            if weights in self._updated:
                return Kind.TWO_ROUNDS
            self._updated.add(weights)
        return None


def read_chains(path: Path, given: dict[bytes, Given], find: Find) -> list[Chain]:
    """Read the ledgers in a file, mostly one.

    Args:
        path: of the file
        given: by name of a group, what its members brought; filled in here
        find: called with each fault

    Raises:
        InputError: the file cannot be read
    """
    chains: list[Chain] = []
    chain: Chain | None = None
    awaits_start = True
    name = printed(f"{path.parent.name}/{path.name}")  # with its folder: the files of all peers have the same name
    for number, data, has_end in _lines_of(path):
        place, whose = Place(name, number), chain.peer if chain else ""
        try:
            line = read_line(data)
        except NotALine:
            find(Kind.UNREADABLE if has_end else Kind.TORN, place, whose)
            continue
        if not has_end:
            find(Kind.TORN, place, whose)
        if isinstance(line, Start) and line.n == 0:
            chain = _begin(line, place, given, find)
            chains += [chain] if chain else []
            awaits_start = False  # also where that start is false
        elif awaits_start:
            awaits_start = False
            find(Kind.HEADLESS, place, whose)
        if chain is not None:
            chain.follow(line, data, place)
    return chains


def _begin(start: Start, place: Place, given: dict[bytes, Given], find: Find) -> Chain | None:
    if (peer := start.peer) is None:
        find(Kind.FALSE_KEY, place, "")
        return None
    if not has_organiser(start.run, start.organiser):
        find(Kind.FALSE_ORGANISER, place, peer.to_base58())
        return None
    return Chain(start, peer, place, given, find)


def _lines_of(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield each line's number, its content, and whether it has an end; a line that is far too long has no content."""
    try:
        with open(path, "rb") as file:
            number = 0
            while data := file.readline(MAX_LINE_BYTES + 1):
                number, has_end = number + 1, data.endswith(b"\n")
                while not has_end and (more := file.readline(MAX_LINE_BYTES)):
                    data, has_end = b"", more.endswith(b"\n")
                yield number, data.removesuffix(b"\n"), has_end
    except OSError as error:
        raise InputError(f"{printed(str(path))} cannot be read ({error.strerror}).") from None
