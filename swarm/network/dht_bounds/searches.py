"""Bounds of a search in the DHT, so that every search ends, and every store, whatever other nodes answer.

Hivemind goes on as long as an answer names a node that is nearer to the key. A node that names further ones without
end, each a little nearer, would keep it asking for good. Nothing would be stored or found any more, and new searches
would pile up. So a search has a limit of calls and of time. At the limit it asks the nearest nodes that this node knows
itself, all at once, and ends with what it has. So named nodes cannot hide the known ones. It asks them as well when
several named nodes have not answered: made-up nodes could fill all places that it looks at. A search for records asks
the peers that this peer has met in any case, as soon as it begins.

Made-up names cost a liar nothing, and Hivemind would remember for good that they have not answered. So this is bounded,
too.
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
"""Calls that one search may make, beside those to met peers and its last ones. A search for the 20 nearest of a
thousand honest nodes makes some dozens."""
SEARCH_SECONDS = 3.0
"""Time limit of a search. Hivemind waits so long for one answer, so a search with a silent node takes it anyway."""
LAST_SECONDS = 1.5
"""Time limit for the known nodes that are asked at the end. Callers of a search wait a little longer than both."""
MAX_UNANSWERED = 5
"""Nodes named by other nodes that did not answer, or named no node, before the known nodes are asked as well. It is a
quarter of the nodes that a search looks at."""
MAX_SILENT = 4096
"""Peers whose unanswered calls a node counts, beside the peers that it does not ask at present."""

Neighbours = dict[DHTID, tuple[Collection[DHTID], bool]]
"""An answer: by key, the nodes that it names, and whether the search for the key ends."""
NOTHING: tuple[Collection[DHTID], bool] = ((), False)
"""What an answer says of a key, if it says nothing."""


class Search:
    """Asks nodes on behalf of Hivemind's `traverse_dht`, within bounds.

    Args:
        ask: asks one node for some keys
        known: nodes that this node knows itself
        keys: keys that are searched for
        met: the known nodes that are asked in any case, at once
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
        """The answer of a node; at the limits of the search, an answer that ends it."""
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
            seconds = min(LAST_SECONDS, self._ends + LAST_SECONDS - time.monotonic())
            await asyncio.wait(self._met.values(), timeout=max(0.0, seconds))

    async def _others_asked(self) -> None:
        """Ask the known nodes that were not asked yet, once in a search; wait until that is over."""
        if self._last is None:
            self._last = asyncio.ensure_future(self._ask_the_others())
        await asyncio.wait([self._last])

    async def _ask_the_others(self) -> None:
        if calls := [asyncio.ensure_future(self._answer(node, self._keys)) for node in self._not_asked]:
            await asyncio.wait(calls, timeout=LAST_SECONDS)

    async def _answer(self, node: DHTID, keys: Collection[DHTID]) -> Neighbours:
        """Ask a node. An answer that cannot be used counts as none: its error would end the whole search silently."""
        try:
            return await self._ask(node, keys)
        except Exception as error:
            logger.debug(f"an answer that ends no search: {error!r}")
            return dict.fromkeys(keys, NOTHING)


_register_failure = Blacklist.register_failure


def register_failure(self: Blacklist, peer: PeerID) -> None:
    """As Hivemind's, but with a bound on the peers that are counted. Hivemind keeps each count for good."""
    _register_failure(self, peer)
    if len(self.ban_counter) > MAX_SILENT + len(self.banned_peers):
        counts = {silent: count for silent, count in self.ban_counter.items() if silent in self.banned_peers}
        self.ban_counter.clear()
        self.ban_counter.update(counts)


def with_an_end(traverse):
    """Wrap Hivemind's `traverse_dht`, which all searches use, so that it ends."""

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
