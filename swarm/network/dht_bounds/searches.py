"""Every search of the DHT ends, and a store with it, whatever a node is told on the way.

Hivemind asks whoever is named, as long as somebody is named who is nearer to the key. A node that names others without
end, each of them a little nearer, would be asked for good: nothing would be stored or found any more, and what was
begun anew would pile up. So a search makes so many calls and takes so long. One that is broken off asks the nearest of
those whom this node knows itself, all at once, since who is named must not hide them; and ends with what it has. One
that has heard of several who do not answer asks them, too: made-up peers would fill all places that it looks at. A
search for records asks the peers that this node has met in any case, as soon as it begins.

A name that belongs to nobody costs its inventor nothing, and would be remembered for good for not having answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from functools import wraps

from hivemind.dht.node import Blacklist
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from swarm.network.dht_bounds.places import met_of_the_search

logger = get_logger(__name__)

MAX_CALLS = 128
"""Of one search; one for the 20 nearest of a thousand honest nodes makes some dozens."""
SEARCH_SECONDS = 3.0
"""As long as Hivemind waits for one answer: with a silent node a search takes so long anyway."""
LAST_SECONDS = 1.5
"""For those who are asked at the end; whoever waits for records waits a little longer than both."""
MAX_UNANSWERED = 5
"""Whom others have named, and who did not answer or named nobody: a quarter of the nodes that a search looks at."""
MAX_SILENT = 4096
"""Peers of whom a node remembers how often they have not answered, beside those that it does not ask at present."""

Neighbours = dict[DHTID, tuple[Collection[DHTID], bool]]
"""By key: who is named, and whether the search for it ends."""
NOTHING: tuple[Collection[DHTID], bool] = ((), False)
"""That a node says of a key."""


class Search:
    """Asks for Hivemind's `traverse_dht`, within bounds.

    Args:
        ask: one node for some keys
        known: nodes that this one knows itself
        keys: that are searched for
        met: of the known nodes, those that are asked in any case, at once
    """

    def __init__(
        self,
        ask: Callable[[DHTID, Collection[DHTID]], Awaitable[Neighbours]],
        known: Collection[DHTID],
        keys: Collection[DHTID],
        met: Collection[DHTID] = (),
    ):
        self._ask, self._keys = ask, list(keys)
        self._known, self._not_asked = frozenset(known), dict.fromkeys(node for node in known if node not in met)
        self._calls, self._ends = 0, time.monotonic() + SEARCH_SECONDS
        self._unanswered = 0
        self._met = {node: asyncio.ensure_future(self._answer(node, self._keys)) for node in met}
        self._last: asyncio.Task[None] | None = None

    async def neighbours(self, node: DHTID, keys: Collection[DHTID]) -> Neighbours:
        """What this node says; when the search has lasted long enough, that it ends."""
        seconds = self._ends - time.monotonic()
        if self._calls < MAX_CALLS and seconds > 0:
            self._calls += 1
            self._not_asked.pop(node, None)
            asked = self._met.get(node) or asyncio.ensure_future(self._answer(node, keys))
            if (await asyncio.wait([asked], timeout=seconds))[0]:
                said = {key: asked.result().get(key, NOTHING) for key in keys}
                if node not in self._known and not any(named or ends for named, ends in said.values()):
                    self._unanswered += 1
                    if self._unanswered >= MAX_UNANSWERED:
                        await self._others_asked()
                return said
        await self._others_asked()
        return {key: ((), True) for key in keys}

    async def met_have_answered(self) -> None:
        """Return when the met peers have answered, or have had time enough."""
        if self._met:
            await asyncio.wait(self._met.values(), timeout=LAST_SECONDS)

    async def _others_asked(self) -> None:
        """Once in a search."""
        if self._last is None:
            self._last = asyncio.ensure_future(self._ask_the_others())
        await asyncio.wait([self._last])

    async def _ask_the_others(self) -> None:
        if calls := [asyncio.ensure_future(self._answer(node, self._keys)) for node in self._not_asked]:
            await asyncio.wait(calls, timeout=LAST_SECONDS)

    async def _answer(self, node: DHTID, keys: Collection[DHTID]) -> Neighbours:
        """An answer of which nothing can be made is none: the search would otherwise end without a word."""
        try:
            return await self._ask(node, keys)
        except Exception as error:
            logger.debug(f"an answer that ends no search: {error!r}")
            return dict.fromkeys(keys, NOTHING)


_register_failure = Blacklist.register_failure


def register_failure(self: Blacklist, peer: PeerID) -> None:
    """As Hivemind's, which would count for good how often each has not answered."""
    _register_failure(self, peer)
    if len(self.ban_counter) > MAX_SILENT + len(self.banned_peers):
        counts = {silent: count for silent, count in self.ban_counter.items() if silent in self.banned_peers}
        self.ban_counter.clear()
        self.ban_counter.update(counts)


def with_an_end(traverse):
    """Wraps Hivemind's `traverse_dht`, which all searches use."""

    @wraps(traverse)
    async def repaired(queries, initial_nodes, *, get_neighbors, found_callback=None, **kwargs):
        search = Search(get_neighbors, initial_nodes, queries, met_of_the_search())

        async def found(*result) -> None:
            await search.met_have_answered()
            await found_callback(*result)

        return await traverse(
            queries,
            initial_nodes,
            get_neighbors=search.neighbours,
            found_callback=found_callback and found,
            **kwargs,
        )

    return repaired
