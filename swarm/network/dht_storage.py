"""The records that a DHT node keeps for other peers: those of runs that it knows, within limits.

Hivemind's storage takes any number of records under any key. This storage takes run manifests, and the records of a
bounded number of runs: the runs under whose keys this peer writes itself, and runs whose manifests it has. So a node
that trains nothing itself still keeps the records of a run. A full storage takes no more records of strangers. Records
of this peer and of its acquaintances then take the place of strangers' records.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time, get_logger
from hivemind.utils.timed_storage import TimedStorage

from swarm.network.dht_bounds.decoding import plain
from swarm.network.signed_records import (
    MAX_LIFE_SECONDS,
    MAX_SUBKEY_BYTES,
    RUNS_ID,
    OwnedRecords,
    keys_of,
    peer_of,
    records_of,
)
from swarm.protocol.admission import Admission
from swarm.protocol.certificates import Authority
from swarm.protocol.run_names import authority_in, key_prefix

logger = get_logger(__name__)

MAX_OTHER_RUNS = 16
"""Known runs under whose keys this peer does not write itself."""
MAX_MANIFESTS = 1000
"""Run manifests that are stored."""
MAX_RECORDS = 2048
"""Records under each key that is not for run manifests or the organiser's lists."""
MAX_COPIES = 4
"""Copies of a list that a run's organiser has signed. All copies are equal."""
MAX_KEY_BYTES = 3 * 2**20
"""Bytes under one key. An answer of more than 4 MiB does not get through."""
MAX_OTHERS_BYTES = 2**24
"""Bytes under all keys of runs under whose keys this peer does not write itself."""
PROGRESS_SECONDS = 120.0
"""Longest life of a progress record. Peers renew them every second or two."""
ENTRY_BYTES = 32
"""Bytes that each record counts for beside its subkey and value."""
COUNT_AGAIN_SECONDS = 0.2
"""Least time between two counts of the bytes under a key."""
CHECKED_AT_ONCE = 64
"""Records that are checked before other calls get their turn. Checking signatures takes time."""
BYTES_AT_ONCE = 2**18
"""Bytes of records that are checked before other calls get their turn."""
VAIN_CHECK_RECORDS = 64
"""Number of records that a wrong signature, or an unreadable dictionary, counts as in its caller's limit."""
RECORD_BYTES = 2**11
"""Bytes of a dictionary that count as one record, where it has fewer records than that. All of it has to be read."""


@dataclass(frozen=True)
class Allowance:
    """How many more records this node looks at for a caller.

    Args:
        is_left: whether it looks at any more
        spend: counts so many records
    """

    is_left: Callable[[], bool] = lambda: True
    spend: Callable[[int], None] = lambda _: None


UNLIMITED = Allowance()


class Turns:
    """Lets other tasks run while many records are checked."""

    def __init__(self) -> None:
        self._records = self._bytes = 0

    async def after(self, num_bytes: int) -> None:
        """Count a checked record of so many bytes; pause if it is another task's turn."""
        self._records, self._bytes = self._records + 1, self._bytes + num_bytes
        if self._records >= CHECKED_AT_ONCE or self._bytes >= BYTES_AT_ONCE:
            self._records = self._bytes = 0
            await asyncio.sleep(0)


class KnownKeys:
    """DHT keys under which this node stores records.

    Args:
        records: knows under which keys this peer writes, and which peers' records come first
    """

    def __init__(self, records: OwnedRecords):
        self.records = records
        self.until: dict[str, float] = {}
        """By the prefix of a run's keys: DHT time at which its last known manifest expires."""
        self._prefixes: dict[DHTID, str] = {}
        self._progress: set[DHTID] = set()

    def knows(self, key: DHTID) -> bool:
        """Whether this node stores records under this key."""
        return key == RUNS_ID or self.is_own(key) or self.until.get(self._prefixes.get(key, ""), 0) > get_dht_time()

    def is_own(self, key: DHTID) -> bool:
        """Whether this peer writes under this key itself."""
        return key.to_bytes() in self.records.written

    def comes_first(self, subkey: bytes) -> bool:
        """Whether the record is this peer's or an acquaintance's."""
        owner = peer_of(subkey)
        return owner is not None and (owner == self.records.own or owner in self.records.met)

    def most(self, key: DHTID) -> int:
        """Records that may be stored under this key."""
        if self.records.kind_of_list(key.to_bytes()) is not None:
            return MAX_COPIES
        return MAX_MANIFESTS if key == RUNS_ID else MAX_RECORDS

    def longest_life(self, key: DHTID) -> float:
        """Seconds for which a record under this key may stay."""
        return PROGRESS_SECONDS if key in self._progress else MAX_LIFE_SECONDS

    def note_manifest(self, manifest: Any, expiration_time: float) -> None:
        """Note the run of a stored manifest. The run is known until the manifest expires, unless too many are known.

        Args:
            manifest: the content of a record, from any peer
            expiration_time: of that record, DHT time in seconds
        """
        found = _run_in(manifest)
        if found is None:
            return
        prefix, authority = found
        if prefix not in self.until:
            self._forget_over()
            keys = keys_of(prefix)
            others = sum(not self._is_own_run(other) for other in self.until)
            if others >= MAX_OTHER_RUNS and not any(self.is_own(key) for key in keys):
                return
            self._prefixes.update(dict.fromkeys(keys, prefix))
            self._progress.update(key for key, kind in keys.items() if kind == "progress")
            if authority is not None:
                self.records.admit_by(Admission(authority), prefix)
        self.until[prefix] = max(expiration_time, self.until.get(prefix, 0.0))

    def _is_own_run(self, prefix: str) -> bool:
        return any(self.is_own(key) for key, other in self._prefixes.items() if other == prefix)

    def _forget_over(self) -> None:
        now = get_dht_time()
        over = {prefix for prefix, until in self.until.items() if until <= now}
        self.until = {prefix: until for prefix, until in self.until.items() if prefix not in over}
        for key in [key for key, prefix in self._prefixes.items() if prefix in over]:
            del self._prefixes[key]
            self.records.forget_admission(key.to_bytes())
            self._progress.discard(key)


def _run_in(manifest: Any) -> tuple[str, Authority | None] | None:
    """The prefix of a run's keys, and its organiser or None, from its manifest; None if the manifest is not valid.

    Manifests of other versions of this program are read, too.
    """
    try:
        content = json.loads(manifest)
        authority = authority_in(content)
        organiser = b"" if authority is None else authority.organiser
        # Manifests of earlier versions do not say when the run was begun.
        prefix = key_prefix(content["run_id"], content["fingerprint"], organiser, content.get("begun", 0))
        return prefix, None if authority is None else replace(authority, run=prefix)
    except (ValueError, TypeError, KeyError, RecursionError):  # a stranger's bytes
        return None


class BoundedStorage(DHTLocalStorage):
    """Stores records that have an owner, under known keys, as many as there is room for.

    Args:
        known: the keys under which this node stores records
    """

    def __init__(self, known: KnownKeys):
        super().__init__()
        self.known = known
        self._bytes: dict[DHTID, int] = {}  # upper bounds: expired records are taken off at the next count
        self._counted_at: dict[DHTID, float] = {}
        self._others_are_full_until, self._has_complained = 0.0, False

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Store one record; return whether it was stored. A value without a subkey has no owner, and is not stored."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        self._forget_older_list(key)
        if not self.may_store(key, subkey, len(value), expiration_time):
            return False
        entries, num_bytes, num_records = self._entries(key), len(subkey) + len(value) + ENTRY_BYTES, 1
        if entries is not None and subkey in entries:
            num_bytes, num_records = len(value) - len(entries.get(subkey).value), 0
        if not self._make_room(key, subkey, num_bytes, num_records):
            return False
        self._bytes[key] = num_bytes + (self._bytes.get(key, 0) if entries is not None else 0)
        stored = super().store_subkey(key, subkey, value, expiration_time)
        for storage in (self, self._entries(key)):
            if storage is not None:
                _forget_ghosts(storage)
        if stored and key == RUNS_ID:
            self._note_manifest(value, expiration_time)
        return stored

    def forget(self, key: DHTID) -> None:
        """Remove everything that is stored under this key."""
        if key in self:
            del self[key]
        self._bytes.pop(key, None)

    def _forget_older_list(self, key: DHTID) -> None:
        """Remove the copies of a list that is not the newest one any more. All copies are equal."""
        records = self.known.records
        if records.kind_of_list(key.to_bytes()) is None or (entries := self._entries(key)) is None:
            return
        for subkey, (value, expiration_time) in list(entries.items())[:1]:
            if not records.has_newest_list(DHTRecord(key.to_bytes(), subkey, value, expiration_time)):
                self.forget(key)

    def may_store(self, key: DHTID, subkey: Any, num_bytes: int, expiration_time: float) -> bool:
        """Whether there would be room for such a record. This is cheaper than checking its signature.

        Args:
            num_bytes: size of its value and signature
        """
        if not isinstance(subkey, bytes) or not self.known.knows(key):
            return False
        if not expiration_time <= get_dht_time() + self.known.longest_life(key):
            return False
        if (entries := self._entries(key)) is not None and (before := entries.get(subkey)) is not None:
            grows = num_bytes - len(before.value)
            is_newer = before.expiration_time < expiration_time  # Hivemind would give an older one's end to it
            return is_newer and (grows <= 0 or self._has_room(key, grows, 0) or self.known.comes_first(subkey))
        if self._has_room(key, len(subkey) + num_bytes + ENTRY_BYTES) or self.known.comes_first(subkey):
            return True
        if not self._has_complained:
            self._has_complained = True
            logger.warning("Unknown peers fill this node's DHT storage; new records of unknown peers are refused")
        return False

    def _entries(self, key: DHTID) -> DictionaryDHTValue | None:
        found = self.get(key)
        return found.value if found is not None and isinstance(found.value, DictionaryDHTValue) else None

    def _has_room(self, key: DHTID, num_bytes: int, num_records: int = 1) -> bool:
        return not self._is_full(key, num_bytes, num_records) and self._others_have_room(key, num_bytes)

    def _is_full(self, key: DHTID, num_bytes: int, num_records: int) -> bool:
        """Whether so many more bytes and records would be too many under this key."""
        entries = self._entries(key)
        if entries is None:
            return False
        if len(entries) + num_records > self.known.most(key):
            return True
        if self._bytes.get(key, 0) + num_bytes > MAX_KEY_BYTES:
            self._count_again(key, entries)
        return self._bytes.get(key, 0) + num_bytes > MAX_KEY_BYTES

    def _others_have_room(self, key: DHTID, num_bytes: int) -> bool:
        """Whether all other runs together may have so many more bytes; always true for the keys of own runs."""
        if key == RUNS_ID or self.known.is_own(key):
            return True
        if sum(self._bytes.values()) + num_bytes <= MAX_OTHERS_BYTES:  # a quick upper bound
            return True
        if time.monotonic() < self._others_are_full_until:
            return False
        others = [other for other in self._bytes if other != RUNS_ID and not self.known.is_own(other)]
        for other in others:
            self._count_again(other, self._entries(other))
        if sum(self._bytes.get(other, 0) for other in others) + num_bytes <= MAX_OTHERS_BYTES:
            return True
        self._others_are_full_until = time.monotonic() + COUNT_AGAIN_SECONDS
        return False

    def _count_again(self, key: DHTID, entries: DictionaryDHTValue | None) -> None:
        if entries is None:
            self._bytes.pop(key, None)
        elif time.monotonic() > self._counted_at.get(key, 0.0) + COUNT_AGAIN_SECONDS:
            self._bytes[key], self._counted_at[key] = _count(entries), time.monotonic()

    def _make_room(self, key: DHTID, subkey: bytes, num_bytes: int, num_records: int) -> bool:
        """Remove strangers' records until there is room; return whether there is. This peer's own record always has."""
        while self._is_full(key, num_bytes, num_records):
            if not self._push_out_a_stranger(key, subkey):
                return subkey == self.known.records.local_public_key
        return True

    def _push_out_a_stranger(self, key: DHTID, for_subkey: bytes) -> bool:
        """Remove the stranger's record that came last; return False if there is none.

        An honest newcomer's record was there before those of a flood.
        """
        entries = self._entries(key)
        for subkey in reversed(entries.data if entries is not None else {}):
            if subkey != for_subkey and not self.known.comes_first(subkey):
                self._bytes[key] -= len(subkey) + len(entries.data[subkey].value) + ENTRY_BYTES
                del entries[subkey]
                return True
        return False

    def _note_manifest(self, value: bytes, expiration_time: float) -> None:
        try:
            manifest = plain(self.known.records.strip_value(DHTRecord(RUNS_ID.to_bytes(), b"", value, expiration_time)))
        except Exception:  # a stranger's bytes
            return
        self.known.note_manifest(manifest, expiration_time)


def _count(entries: DictionaryDHTValue) -> int:
    """Bytes that all entries count for."""
    return sum(len(subkey) + len(entry.value) + ENTRY_BYTES for subkey, entry in entries.items())


def _forget_ghosts(storage: TimedStorage) -> None:
    """Rebuild the heap of expiration times if outdated entries fill it: Hivemind leaves one there at each renewal."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 64:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)


async def store_requested(
    protocol: DHTProtocol, request: dht_pb2.StoreRequest, allowance: Allowance = UNLIMITED
) -> list[bool]:
    """Store the records of a caller's request, as far as they are valid and there is room.

    Args:
        protocol: of this node
        request: the caller's
        allowance: records that this node still looks at for the caller

    Returns:
        for each record or dictionary of records, whether it was stored

    Raises:
        ValueError: the request's fields have different lengths
    """
    sizes = {len(request.keys), len(request.subkeys), len(request.values), len(request.expiration_time)}
    if sizes != {len(request.in_cache)}:
        raise ValueError("a request whose fields do not match")
    stored = [False] * len(request.keys)
    # Manifests come first: they make runs known, and so the keys under which the other records may be stored.
    manifests_first = sorted(range(len(stored)), key=lambda number: request.keys[number] != RUNS_ID.to_bytes())
    turns = Turns()
    for number in manifests_first:
        if not allowance.is_left():
            break
        allowance.spend(1)
        key, tag, value = request.keys[number], request.subkeys[number], request.values[number]
        if request.in_cache[number] or len(key) != DHTID.HASH_NBYTES:
            continue  # the cache would answer in place of the storage, and a longer key would mean a usual one
        if tag == protocol.IS_DICTIONARY:
            stored[number] = await _store_dictionary(protocol, key, value, allowance, turns)
        else:
            stored[number] = _store_one(protocol, key, tag, value, request.expiration_time[number], allowance)
        await turns.after(len(tag) + len(value))
    return stored


async def _store_dictionary(
    protocol: DHTProtocol, key: bytes, value: bytes, allowance: Allowance, turns: Turns
) -> bool:
    """Store records of many owners at once, which a node hands over to a new one; return whether all were stored."""
    if not protocol.storage.known.knows(DHTID.from_bytes(key)):
        return False  # without decoding it
    try:
        entries = protocol.serializer.loads(value)
    except ValueError:  # a stranger's bytes
        entries = None
    if not isinstance(entries, DictionaryDHTValue):
        allowance.spend(max(VAIN_CHECK_RECORDS, len(value) // RECORD_BYTES))
        return False
    allowance.spend(max(0, len(entries) - MAX_RECORDS, len(value) // RECORD_BYTES - len(entries)))
    results = []
    for subkey, entry in list(entries.items())[:MAX_RECORDS]:
        if not allowance.is_left():
            return False
        allowance.spend(1)
        encoded = protocol.serializer.dumps(subkey)
        results.append(_store_one(protocol, key, encoded, entry.value, entry.expiration_time, allowance))
        await turns.after(len(encoded) + len(entry.value))
    return all(results)


def _store_one(
    protocol: DHTProtocol, key: bytes, tag: bytes, value: Any, expiration_time: Any, allowance: Allowance
) -> bool:
    """Store one record, if it is valid and there is room. The cheap checks come first, the signature last."""
    if len(tag) > MAX_SUBKEY_BYTES:
        return False
    try:
        subkey, key_id = plain(tag), DHTID.from_bytes(key)
    except Exception:  # a stranger's bytes
        return False
    if not isinstance(value, bytes) or not isinstance(expiration_time, float):
        return False
    record, records = DHTRecord(key, tag, value, expiration_time), records_of(protocol)
    storage = protocol.storage
    # A list is checked even where there is no room: the check makes it count on this node.
    is_list = records is not None and records.kind_of_list(key) is not None
    if not is_list and not storage.may_store(key_id, subkey, len(value), expiration_time):
        return False
    if not _is_valid(protocol, record, allowance):
        return False
    return storage.store_subkey(key_id, subkey, value, expiration_time)


def _is_valid(protocol: DHTProtocol, record: DHTRecord, allowance: Allowance) -> bool:
    """Whether a record is valid. A wrong signature counts as `VAIN_CHECK_RECORDS` in the caller's limit.

    Otherwise a stranger could send wrong signatures in the names of known peers, whose records are always checked.
    """
    records = records_of(protocol)
    before = 0 if records is None else records.vain_checks
    is_valid = protocol.record_validator.validate(record)
    if records is not None:
        allowance.spend(VAIN_CHECK_RECORDS * (records.vain_checks - before))
    return is_valid
