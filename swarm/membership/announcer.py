"""Keeps the run manifest and a peer's own addresses in the DHT for newcomers, while the peer trains."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import ClassVar

import hivemind
import msgpack
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import get_dht_time

from swarm.membership.run_manifest import RunManifest, publish_manifest
from swarm.network.hivemind_internals import connect, disconnect
from swarm.network.known_peers import (
    MAX_ADDRESSES,
    MAX_REMEMBERED,
    one_of_each_first,
    peer_of_address,
    read_book,
    to_remember,
    usable,
    write_book,
)
from swarm.network.record_push import publish
from swarm.network.signed_records import ADDRESSES, owned_entries
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.certificates import EVERYTHING
from swarm.runtime.once import Once
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS

KEEP_SECONDS = 600.0
"""Seconds for which manifest and addresses stay after the last peer that announces them has gone."""
PERIOD_SECONDS = 10.0
PUBLISH_EVERY = 3
"""Periods from one publication to the next, after the first few quick ones."""

logger = logging.getLogger(__name__)


class Announcer:
    """Publishes manifest and addresses, notes the addresses of other peers, and calls peers that the DHT has lost.

    The calls heal a network that was divided: by then the DHT of each half has forgotten the other half.

    Args:
        addresses: where this peer can be called, if it can
        book: file of other peers' addresses
        keep_seconds: how long published entries stay
        period_seconds: longest time between two looks for other peers
        admission: decides which peers' addresses count
    """

    def __init__(
        self,
        dht: hivemind.DHT,
        manifest: RunManifest,
        addresses: Iterable[str] = (),
        book: Path | None = None,
        keep_seconds: float = KEEP_SECONDS,
        period_seconds: float = PERIOD_SECONDS,
        admission: Admission = OPEN,
    ):
        self._admission = admission
        self._dht, self._manifest, self._addresses, self._book = dht, manifest, list(addresses)[:MAX_ADDRESSES], book
        self._keep_seconds, self._period_seconds = keep_seconds, period_seconds
        self._timeout_seconds = PUBLISH_EVERY * period_seconds
        self._key = f"{manifest.key_prefix}.{ADDRESSES}"
        self._stopped = threading.Event()
        self._complaints = Once()
        self._thread = threading.Thread(target=self._keep, name="announcer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop publishing. Waits at most a second for the thread."""
        self._stopped.set()
        self._thread.join(1)

    def _keep(self) -> None:
        pause_seconds, periods = 1.0, 0  # much changes at the beginning, so the first pauses are short
        self._try(self._publish)
        while not self._stopped.is_set():
            self._try(self._find_others)  # first: in a divided network, perhaps no node takes what is published
            if periods and (pause_seconds < self._period_seconds or periods % PUBLISH_EVERY == 0):
                self._try(self._publish)
            periods += 1
            pause_seconds = min(2 * pause_seconds, self._period_seconds)
            self._stopped.wait(pause_seconds)

    def _try(self, job: Callable[[], None]) -> None:
        try:
            if not self._stopped.is_set():
                job()
        except Exception as error:  # the DHT may be busy or ending: training goes on either way
            if not self._stopped.is_set() and self._complaints.first():
                what = "This peer could not publish or read the run manifest or addresses"
                logger.warning(f"{what}, so newcomers may not find the run: {error!r}")

    def _publish(self) -> None:
        publish_manifest(self._dht, self._manifest, self._keep_seconds, timeout_seconds=self._timeout_seconds)
        if self._addresses and not self._stopped.is_set():
            shown = self._admission.show(msgpack.packb(self._addresses))
            _, stored = publish(self._dht, self._key, shown, get_dht_time() + self._keep_seconds)
            stored.result(self._timeout_seconds)

    def _find_others(self) -> None:
        own = self._dht.peer_id
        found = self._dht.get(self._key, latest=True, return_future=True).result(self._timeout_seconds)
        others = addresses_in(found, own, self._dht.acquaintances, self._admission)
        if self._book is not None:
            earlier = [address for address in read_book(self._book) if not address.endswith(own.to_base58())]
            write_book(self._book, to_remember(others, earlier))
            others = list(dict.fromkeys([*others, *earlier]))
        self._dht.run_coroutine(CallLost(others), return_future=True).result(self._timeout_seconds)


def addresses_in(found: object, own: PeerID, first: Container[PeerID] = (), admission: Admission = OPEN) -> list[str]:
    """Up to `MAX_REMEMBERED` addresses that other peers have published of themselves, first one of each peer.

    Anything else in the entry is left out.

    Args:
        found: the DHT entry
        own: this peer, which is left out
        first: peers whose addresses come first
        admission: decides which peers' addresses count
    """
    addresses: list[str] = []
    for peer, value in owned_entries(found, MAX_REMEMBERED + 1, first):
        if peer == own:
            continue
        try:
            said = msgpack.unpackb(admission.admit(value, peer, EVERYTHING))
        except Exception:  # bytes of a stranger, which may be anything, or of a peer that is not a member
            continue
        addresses += usable(said, peer_id=peer.to_base58())[:MAX_ADDRESSES]
    return one_of_each_first(addresses)[:MAX_REMEMBERED]


class CallLost:
    """Connects to the peers that this DHT node does not know, or no longer knows. Runs in the DHT process.

    A peer that does not answer twice is called over a new connection. On the old one, TCP would wait before its next
    attempt for as long as it has tried in vain.
    """

    silent: ClassVar[set[PeerID]] = set()
    """Lost peers that did not answer the last call. It belongs to the class because each call is a new object."""

    def __init__(self, addresses: list[str]):
        self.addresses = addresses

    async def __call__(self, _dht: hivemind.DHT, node: hivemind.dht.DHTNode) -> None:
        peers: dict[PeerID, list[Multiaddr]] = {}
        for address in self.addresses:
            peer = PeerID.from_base58(peer_of_address(address))
            peers.setdefault(peer, []).append(Multiaddr(address.rpartition("/p2p/")[0]))
        known = node.protocol.routing_table.peer_id_to_uid
        lost = {peer: at for peer, at in peers.items() if peer not in known or peer in node.blacklist}
        lost.pop(node.peer_id, None)
        CallLost.silent.intersection_update(lost)
        await asyncio.gather(*(self._call(node, peer, at) for peer, at in lost.items()), return_exceptions=True)

    @staticmethod
    async def _call(node: hivemind.dht.DHTNode, peer: PeerID, addresses: list[Multiaddr]) -> None:
        seconds = DEFAULT_TIMEOUTS.call_seconds
        await asyncio.wait_for(connect(node.p2p, peer, addresses), seconds)
        if await asyncio.wait_for(node.protocol.call_ping(peer), seconds):  # which puts it into the routing table
            node.blacklist.register_success(peer)
        elif peer in CallLost.silent:
            CallLost.silent.remove(peer)
            await disconnect(node.p2p, peer)
            await asyncio.wait_for(connect(node.p2p, peer, addresses), seconds)
            await node.protocol.call_ping(peer)
        else:
            CallLost.silent.add(peer)
