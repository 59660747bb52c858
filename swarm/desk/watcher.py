"""Looks into a run's DHT again and again, and finds back to it if the peers are gone through which it came in."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from hivemind import DHT
from hivemind.utils import get_dht_time

from swarm.membership.announcer import CallLost, addresses_in
from swarm.membership.progress_record import PeerProgress
from swarm.membership.progress_store import progress_records
from swarm.membership.run_manifest import RunManifest
from swarm.network.known_peers import MAX_REMEMBERED
from swarm.network.signed_records import ADDRESSES
from swarm.protocol.admission import Admission
from swarm.protocol.certificates import Certificate

CONTACT_SECONDS = 10.0
"""Time between two looks at the addresses of peers."""
ANSWER_SECONDS = 5.0
LATE = 0.75
"""Part of a certificate's time after which it is late: its owner has tried to renew it since half of the time."""


class Watcher:
    """Reads the records of a run's peers, without taking part.

    Args:
        dht: a running DHT, from `start_dht`
        manifest: of the run
        given: addresses of peers that a person gave
        remembered: addresses of peers that an earlier desk knew
    """

    def __init__(self, dht: DHT, manifest: RunManifest, given: Sequence[str], remembered: Sequence[str] = ()):
        self._dht, self._manifest = dht, manifest
        self._admission = Admission(manifest.authority)
        self._given = list(given)
        self._addresses = list(dict.fromkeys([*given, *remembered]))[:MAX_REMEMBERED]
        self._called_at = -math.inf
        self.ending: list[Certificate] = []
        """Certificates of peers that are there which should have been renewed by now and end soon."""

    def look(self) -> dict[str, PeerProgress] | None:
        """The records of all peers that train, by peer id; None if the swarm does not answer."""
        try:
            records = progress_records(self._dht, self._manifest, self._admission, ANSWER_SECONDS)
        except (TimeoutError, OSError):  # no peer answers, or the DHT process is busy or has ended
            return None
        shown, now = map(self._admission.member, records), get_dht_time()
        self.ending = [certificate for certificate in shown if certificate and certificate.is_to_be_renewed(now, LATE)]
        return {peer_id.to_base58(): record for peer_id, record in records.items()}

    def keep_contact(self) -> list[str]:
        """Call peers that the DHT has lost, every 10 s at most. Returns the addresses of peers that can be called."""
        if time.monotonic() - self._called_at >= CONTACT_SECONDS:
            self._called_at = time.monotonic()
            try:
                self._call()
            except (TimeoutError, OSError):
                pass  # the next look finds that the swarm does not answer
        return self._addresses

    def _call(self) -> None:
        key = f"{self._manifest.key_prefix}.{ADDRESSES}"
        found = self._dht.get(key, latest=True, return_future=True).result(ANSWER_SECONDS)
        others = addresses_in(found, self._dht.peer_id, self._dht.acquaintances, self._admission)
        self._addresses = list(dict.fromkeys([*self._given, *others, *self._addresses]))[:MAX_REMEMBERED]
        self._dht.run_coroutine(CallLost(self._addresses), return_future=True).result(2 * ANSWER_SECONDS)
