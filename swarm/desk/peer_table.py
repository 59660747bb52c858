"""Which peers of many a page shows: whom a visitor looks for, in the order that she asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from swarm.desk.report import PeerReport

PAGE_ROWS = 100
"""Browsers lay out a thousand rows in a quarter of a second, and a hundred in no time."""
MAX_WORDS_LENGTH = 64
COLUMNS: dict[str, tuple[str, Callable[[PeerReport], Any]]] = {
    "name": ("Peer", lambda peer: peer.name.casefold()),
    "state": ("State", lambda peer: peer.phase),
    "role": ("Role", lambda peer: (peer.role, peer.reached)),
    "device": ("Device", lambda peer: peer.device and peer.device.casefold()),
    "update": ("Update", lambda peer: peer.step),
    "pace": ("Samples/s", lambda peer: peer.samples_per_second),
    "share": ("Share", lambda peer: peer.share),
    "loss": ("Loss", lambda peer: peer.loss),
    "line": ("Line", lambda peer: peer.upload_bytes_per_second),
    "seen": ("Last seen", lambda peer: peer.seen_at),
}
"""By their words in the address: heading, and what is compared."""
TEXTS = ("name", "state", "role", "device")
"""Sorted from A to Z at first; of numbers, the greatest come first."""


@dataclass(frozen=True)
class PeerQuery:
    """What a visitor asks for; from the address of the page, so it may be anything.

    Args:
        words: that have to be in the name or the peer id
        sort: one of `COLUMNS`
        is_rising: from A to Z, or from the least
        page: from 1 on; one that is not there counts as the last
    """

    words: str = ""
    sort: str = "pace"
    is_rising: bool = False
    page: int = 1

    @classmethod
    def of(cls, given: Mapping[str, str]) -> PeerQuery:
        """From the query of an address; what makes no sense is left out."""
        sort, page = given.get("sort", ""), given.get("page", "")
        sort = sort if sort in COLUMNS else cls.sort
        is_rising = given["order"] == "rising" if given.get("order") in ("rising", "falling") else sort in TEXTS
        words = " ".join(given.get("words", "")[:MAX_WORDS_LENGTH].split())
        return cls(words, sort, is_rising, max(1, int(page)) if page.isdecimal() and len(page) < 5 else 1)

    @property
    def address(self) -> str:
        """Of that page."""
        order = "rising" if self.is_rising else "falling"
        given = {"words": self.words, "sort": self.sort, "order": order, "page": str(self.page)}
        return f"peers?{urlencode(given)}"

    def sorted_by(self, column: str) -> PeerQuery:
        """What a click on that heading asks for: once more on the same one, the other way round."""
        is_rising = not self.is_rising if column == self.sort else column in TEXTS
        return replace(self, sort=column, is_rising=is_rising, page=1)

    def on_page(self, page: int) -> PeerQuery:
        """Another part of the same."""
        return replace(self, page=page)


@dataclass(frozen=True)
class PeerPage:
    """A part of the peers that were found.

    Args:
        query: with the number of the page that it is
        rows: at most `PAGE_ROWS`
        first: number of the first row, from 1 on; 0 if there is none
        found: how many there are on all pages
        pages: how many pages there are, at least one
    """

    query: PeerQuery
    rows: list[PeerReport]
    first: int
    found: int
    pages: int


def choose(peers: Sequence[PeerReport], query: PeerQuery) -> PeerPage:
    """Those that are there come before those that have gone, and who has no number comes last."""
    words = query.words.casefold()
    found = [peer for peer in peers if words in peer.name.casefold() or query.words in peer.peer_id]
    _, compared = COLUMNS[query.sort]
    known = [peer for peer in found if compared(peer) is not None]
    known.sort(key=compared, reverse=not query.is_rising)
    ordered = [*known, *(peer for peer in found if compared(peer) is None)]
    ordered.sort(key=lambda peer: peer.state != "here")
    pages = max(1, -(-len(ordered) // PAGE_ROWS))
    page = min(query.page, pages)
    begin = PAGE_ROWS * (page - 1)
    rows = ordered[begin : begin + PAGE_ROWS]
    return PeerPage(query.on_page(page), rows, begin + 1 if rows else 0, len(ordered), pages)
