"""The page of all peers: which of them a visitor searches for, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from swarm.desk.report import PeerReport

PAGE_ROWS = 100
"""Rows of one page. Browsers lay out a thousand rows in a quarter of a second, and a hundred in no time."""
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
"""Columns by their words in the address of the page: the heading, and the value by which peers are sorted."""
TEXTS = ("name", "state", "role", "device")
"""Columns that are sorted from A to Z at first. Columns of numbers begin with the greatest."""


@dataclass(frozen=True)
class PeerQuery:
    """What a visitor asks for. It comes from the address of the page, so it may be anything.

    Args:
        words: text that has to be in the name or the peer id
        sort: one of `COLUMNS`
        is_rising: sorted from A to Z, or from the least number
        page: number of the page, from 1 on; a number that is too large means the last page
    """

    words: str = ""
    sort: str = "pace"
    is_rising: bool = False
    page: int = 1

    @classmethod
    def of(cls, given: Mapping[str, str]) -> PeerQuery:
        """The query in an address. What makes no sense in it is left out."""
        sort, page = given.get("sort", ""), given.get("page", "")
        sort = sort if sort in COLUMNS else cls.sort
        is_rising = given["order"] == "rising" if given.get("order") in ("rising", "falling") else sort in TEXTS
        words = " ".join(given.get("words", "")[:MAX_WORDS_LENGTH].split())
        return cls(words, sort, is_rising, max(1, int(page)) if page.isdecimal() and len(page) < 5 else 1)

    @property
    def address(self) -> str:
        """Relative address of the page with this query."""
        order = "rising" if self.is_rising else "falling"
        given = {"words": self.words, "sort": self.sort, "order": order, "page": str(self.page)}
        return f"peers?{urlencode(given)}"

    def sorted_by(self, column: str) -> PeerQuery:
        """What a click on a heading asks for. A click on the heading that is sorted by turns the order round."""
        is_rising = not self.is_rising if column == self.sort else column in TEXTS
        return replace(self, sort=column, is_rising=is_rising, page=1)

    def on_page(self, page: int) -> PeerQuery:
        """The same query, for another page."""
        return replace(self, page=page)


@dataclass(frozen=True)
class PeerPage:
    """A part of the peers that were found.

    Args:
        query: with the number of this page
        rows: at most `PAGE_ROWS` peers
        first: number of the first row, from 1 on; 0 if there is none
        found: number of peers on all pages
        pages: number of pages, at least one
    """

    query: PeerQuery
    rows: list[PeerReport]
    first: int
    found: int
    pages: int


def choose(peers: Sequence[PeerReport], query: PeerQuery) -> PeerPage:
    """The page of peers for a query.

    Peers that are there come before those that have gone, and among each of these, peers without a value come last.
    """
    words = query.words.casefold()
    found = [peer for peer in peers if words in peer.name.casefold() or query.words in peer.peer_id]
    _, compared = COLUMNS[query.sort]
    known = [peer for peer in found if compared(peer) is not None]
    known.sort(key=compared, reverse=not query.is_rising)
    ordered = [*known, *(peer for peer in found if compared(peer) is None)]
    ordered.sort(key=lambda peer: peer.state != "here")  # a stable sort: the order within each half stays
    pages = max(1, -(-len(ordered) // PAGE_ROWS))
    page = min(query.page, pages)
    begin = PAGE_ROWS * (page - 1)
    rows = ordered[begin : begin + PAGE_ROWS]
    return PeerPage(query.on_page(page), rows, begin + 1 if rows else 0, len(ordered), pages)
