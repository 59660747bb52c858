"""Reads and writes the progress records of a run: all are under one key of the DHT, each in its peer's own name.

A peer pushes its record to the nodes next to that key. In a small swarm these are all nodes that can be called. Such a
node reads the records from its own storage without any call, while a search calls each of the nodes. So a peer searches
only in these cases: it gets no records, or not in time; some time has passed; or a caller has to be sure. Some time
after the last search, it also searches for the nodes to push to.
"""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import Future
from dataclasses import replace

from hivemind import DHT
from hivemind.dht.node import DHTNode
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time, get_logger

from swarm.membership.progress_record import PeerProgress
from swarm.membership.run_manifest import RunManifest
from swarm.network.dht_bounds.searches import SEARCH_SECONDS
from swarm.network.record_push import Push, PushedHere, publish
from swarm.network.signed_records import PROGRESS, owned_entries
from swarm.protocol.admission import OPEN, SHOWN_BYTES, Admission, NotAMember
from swarm.protocol.certificates import EVERYTHING, IN_ROUNDS, Role
from swarm.protocol.messages import MAX_GROUP_SIZE
from swarm.runtime.once import Once
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts

logger = get_logger(__name__)

LATE_REPORTS = 2.5
"""Report periods after which a silent peer must have pushed its record to other nodes, or to none: then a search is
made."""
FORGET_SECONDS = 0.1
"""Time that the DHT process gets to forget nodes that have not answered a search."""
MAX_SIGNED_BYTES = 2**11
"""Bytes of a record and its signature."""


class ProgressStore:
    """The progress records of a run, read and written by one thread.

    Args:
        dht: a running DHT, of `start_dht`
        key: DHT key of the run's records
        admission: decides which peers' records count
    """

    def __init__(self, dht: DHT, key: str, timeouts: Timeouts = DEFAULT_TIMEOUTS, admission: Admission = OPEN):
        self._dht, self._key, self._timeouts, self._admission = dht, key, timeouts, admission
        self._found: dict[PeerID, PeerProgress] = {}
        self._searched = self._stored = -math.inf
        self._complaints = Once()

    def post(self, record: PeerProgress | None) -> Future:
        """Begin to store the own record; None takes it back, since this peer leaves.

        With a silent node in the DHT that takes seconds, which must not keep this peer from looking. So the returned
        future is that of the push, and the search for nodes goes on beside it. Only a goodbye waits for the search.
        """
        content = b"" if record is None else replace(record, time=max(get_dht_time(), record.joined)).to_bytes()
        value = self._admission.show(content) or None
        expiration = get_dht_time() + self._timeouts.record_seconds
        if record is not None and time.monotonic() < self._stored + self._timeouts.search_seconds:
            return self._dht.run_coroutine(Push(self._key, self._dht.owner, value, expiration), return_future=True)
        self._stored = time.monotonic()
        pushed, stored = publish(self._dht, self._key, value, expiration)
        return stored if record is None else pushed

    def look(self, search: bool = False) -> dict[PeerID, PeerProgress]:
        """Read the records of the other peers.

        Args:
            search: ask all nodes that may have them
        """
        search |= self._dht.client_mode or time.monotonic() > self._searched + self._timeouts.search_seconds
        found = {} if search else self._pushed()
        expected = get_dht_time() - LATE_REPORTS * self._timeouts.report_seconds
        if not found or any(peer not in found or found[peer].time < expected for peer in self._found):
            try:
                found = self._searched_for()
            except TimeoutError:
                # A node that answers slowly, and names ever more nodes, must not keep this peer from what is here.
                if not (found := self._pushed()):
                    raise
            self._searched = time.monotonic()
        self._found = found
        return found

    def _searched_for(self) -> dict[PeerID, PeerProgress]:
        """Find records by a search in the DHT.

        Raises:
            TimeoutError: the search was broken off and has found no record, although there may be some
        """
        began = time.monotonic()
        found = self._read(self._dht.get(self._key, latest=True, return_future=True))
        if not found and time.monotonic() - began >= SEARCH_SECONDS:
            raise TimeoutError("the nodes that may know of other peers have not answered in time")
        return found

    def _pushed(self) -> dict[PeerID, PeerProgress]:
        """Records that other peers have stored on this node."""
        pushed = PushedHere(self._key, 2 * MAX_GROUP_SIZE, MAX_SIGNED_BYTES + SHOWN_BYTES)
        return self._read(self._dht.run_coroutine(pushed, return_future=True))

    def _read(self, coming: Future) -> dict[PeerID, PeerProgress]:
        found = coming.result(timeout=self._timeouts.record_seconds / 3)
        now, records = get_dht_time(), {}
        for peer_id, value in owned_entries(found, 2 * MAX_GROUP_SIZE, self._dht.acquaintances):
            if peer_id == self._dht.peer_id:
                continue
            try:
                record = read_record(value, peer_id, self._admission, now)
            except NotAMember:
                continue  # already reported; the record of a removed member stays for a while
            except ValueError as error:
                if self._complaints.first(peer_id):
                    logger.warning(f"Ignoring a peer with an invalid progress record ({error})")
                continue
            if record is not None:
                records[peer_id] = record
        return records


def read_record(value: bytes, peer_id: PeerID, admission: Admission, now: float) -> PeerProgress | None:
    """Decode and check the record of a peer as the DHT holds it; None if the peer has left.

    A member's certificate limits what its record can say. The peer has not joined before it became a member. If it may
    not train, it is a helper. Its name is that of the certificate: with the name of another member, it could make the
    organiser remove the wrong one.

    Raises:
        NotAMember: the record does not count
        ValueError: for everything that no honest peer can send
    """
    content = admission.admit(value, peer_id, EVERYTHING)
    if not content:
        return None
    record, member = PeerProgress.from_bytes(content, now), admission.member(peer_id)
    if member is None:
        return record
    if not member.roles & IN_ROUNDS:
        raise ValueError("a certificate with which it cannot take part in rounds")
    if not record.client_mode and Role.SERVE not in member.roles:
        raise ValueError("a certificate with which it cannot be called")
    joined = record.joined
    # With an organiser's clock that was ahead, `member_since` is in the future. It is ignored then: bounded by `now`,
    # `joined` would change at each look.
    if member.member_since <= now:
        joined = max(joined, member.member_since)
    record = replace(record, name=member.name, joined=joined, time=max(record.time, joined))
    return record if Role.TRAIN in member.roles else replace(record, helps=True, samples=0, rate=0.0)


def progress_records(
    dht: DHT, manifest: RunManifest, admission: Admission | None = None, timeout_seconds: float = 5
) -> dict[PeerID, PeerProgress]:
    """Search the DHT for the records of all peers of a run. Records that make no sense are left out.

    Where no node answers any more, a search soon ends with nothing, or with what this node stores itself. That tells
    nothing of the run: all peers may have left, or this machine's network is down.

    Args:
        admission: an admission of the run that a caller which reads repeatedly keeps; None: a new one

    Raises:
        TimeoutError: no node answers any more, or the DHT process does not answer in time
        OSError: the DHT process has ended
    """
    found = dht.get(f"{manifest.key_prefix}.{PROGRESS}", latest=True, return_future=True).result(timeout_seconds)
    if dht.run_coroutine(knows_no_node, return_future=True).result(timeout_seconds):
        raise TimeoutError("no node that may know of the run's peers answers")
    admission, records = admission or Admission(manifest.authority), {}
    for peer_id, value in owned_entries(found, MAX_GROUP_SIZE):
        try:
            record = read_record(value, peer_id, admission, get_dht_time())
        except ValueError:
            continue
        if record is not None:
            records[peer_id] = record
    return records


async def knows_no_node(_dht: DHT, node: DHTNode) -> bool:
    """Whether this node knows no other node: those that did not answer are forgotten. Runs in the DHT process."""
    # The time limits of a search and of its calls are equal, so a silent node may be forgotten right after the search.
    await asyncio.sleep(FORGET_SECONDS)
    return not node.protocol.routing_table.peer_id_to_uid
