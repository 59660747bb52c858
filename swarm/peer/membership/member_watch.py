"""While a member trains: takes what the organiser signs, tells the member's processes, and renews its certificate."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError

from hivemind.utils import get_dht_time

from recipe.errors import InputError
from swarm.enrolment.removed import Removed
from swarm.network.dht_process import SwarmDHT
from swarm.network.record_push import push_list
from swarm.network.signed_records import LISTS
from swarm.protocol.admission import Admission
from swarm.protocol.certificates import NotSigned, shown_date
from swarm.protocol.signed_lists import REMOVED
from swarm.runtime.once import Once

LOOK_SECONDS = 0.1
"""Pause between two looks. A look only reads numbers in shared memory, so it can be short: a removed member is out
before a fast swarm has made many updates."""
SEARCH_SECONDS = 15.0
"""How often a peer asks other peers for the newest lists. Peers that are known to train are told of a list at once."""
PASS_ON_SECONDS = 600.0
"""How often a member stores the lists again. The DHT forgets them after an hour."""
RENEW_AGAIN_SECONDS = 60.0
MERGE_AGAIN_SECONDS = 15.0
SAY_AGAIN_SECONDS = 3600.0
ENDED_SECONDS = 600.0
"""How long a peer tries to renew a certificate that has ended: a laptop that wakes up has no network for a while."""
ANSWER_SECONDS = 10.0

logger = logging.getLogger(__name__)


class MemberWatch(threading.Thread):
    """Watches a member in its trainer process, as a thread.

    Args:
        dht: of this peer, which takes part in the run
        admission: of the trainer
        prefix: of the run's keys
        tell: called with the certificate and the organiser's lists by kind, all as they were signed, when one of them
            is new, until it returns True
        renew: asks the organiser for a certificate in place of the given one; raises InputError if that fails
        on_end: called once when this peer may not take part any more, with the reason
        merge: at the organiser's own peer: brings a list of removed members together with the organiser's books, and
            returns the newest list; may raise InputError, and is called again some seconds later
    """

    def __init__(
        self,
        dht: SwarmDHT,
        admission: Admission,
        prefix: str,
        tell: Callable[[bytes, Mapping[str, bytes]], bool],
        renew: Callable[[bytes], bytes],
        on_end: Callable[[InputError], None],
        merge: Callable[[bytes], bytes] | None = None,
    ):
        super().__init__(name="member", daemon=True)
        self._dht, self._admission, self._prefix = dht, admission, prefix
        self._tell, self._renew, self._on_end, self._merge = tell, renew, on_end, merge
        self._stopped = threading.Event()
        self._told: tuple[bytes, Mapping[str, bytes]] | None = None
        """Certificate and lists that the averaging process has; None at first, since it starts after this thread."""
        self._shown = admission.certificate
        """Certificate that the DHT process has."""
        self._passed_on: Mapping[str, bytes] = {}
        self._looked_at: dict[str, int] = {}
        """By kind: number of the DHT process's list at the last look, whether this process could take it or not."""
        self._merged, self._not_merged = b"", Once()
        """The last list that was brought together with the books, and numbers of those that could not be at once."""
        now = time.monotonic()
        self._search_at, self._pass_on_at, self._renew_at, self._say_at, self._merge_at = (now,) * 5
        self._ended_at: float | None = None
        """When this peer found that its certificate had ended, on the monotonic clock; None while it counts."""

    def stop(self) -> None:
        """Stop watching; waits at most a second."""
        self._stopped.set()
        if self.is_alive():
            self.join(1)

    def run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                self.look()
            except (TimeoutError, CancelledError, OSError, RuntimeError, InputError) as error:
                logger.debug("the DHT process does not answer: %r", error)  # if it is dead, the supervisor finds that

    def look(self) -> None:
        """Look once. What this peer knows already comes first; then the steps that wait for other peers."""
        now = time.monotonic()
        for kind in LISTS:
            self._take(kind)
        self._bring_together(now)
        news = self._admission.certificate, self._admission.lists.all_signed
        if news != self._told and self._tell(*news):
            self._told = news
        if (why := self._admission.why_this_peer_was_removed) is not None:
            self._end(Removed(f"The organiser has removed this peer from the run: {why}."))
        if now >= self._search_at and not self._stopped.is_set():
            self._search_at = now + SEARCH_SECONDS
            self._search()
        if news[1] and (now >= self._pass_on_at or news[1] != self._passed_on):
            self._pass_on(news[1])
        if news[0] != self._shown:
            self._dht.take_part(self._prefix, self._admission.authority, news[0])
            self._shown = news[0]
        if self._stopped.is_set():
            return
        if self._is_to_be_renewed() and now >= self._renew_at:
            self._renew_at = now + RENEW_AGAIN_SECONDS
            # A server that does not answer takes seconds. Lists that come meanwhile must not wait for it.
            threading.Thread(target=self._take_certificate, name="renewal", daemon=True).start()
        self._end_if_over(now)

    # ---- what the organiser has signed ------------------------------------------------------------------------------

    def _search(self) -> None:
        """Ask for newer lists without waiting: the DHT process notes what is found, and a later look takes it."""
        for kind in LISTS:
            self._dht.get(f"{self._prefix}.{kind}", latest=True, return_future=True)

    def _take(self, kind: str) -> None:
        number = self._dht.list_number(kind)
        if number == self._looked_at.get(kind, 0):  # a newer list can have a smaller number: `OrderBook`
            return
        try:
            self._admission.lists.take(kind, self._dht.newest_list(kind, ANSWER_SECONDS))
        except NotSigned as error:  # this machine's clock has been set back, for instance
            logger.warning("The organiser's list under %s %s", kind, error)
        self._looked_at[kind] = number

    def _bring_together(self, now: float) -> None:
        """At the organiser's own peer: bring the newest list of removed members together with the books."""
        lists = self._admission.lists
        heard = lists.signed(REMOVED)
        if self._merge is None or heard == self._merged or now < self._merge_at:
            return
        try:
            lists.take(REMOVED, self._merge(heard))
        except NotSigned as error:
            logger.warning("The organiser's list under %s %s", REMOVED, error)
        except InputError as error:  # the books cannot be used now: another process writes, or the disk is full
            self._merge_at = time.monotonic() + MERGE_AGAIN_SECONDS
            if self._not_merged.first(lists.number(REMOVED)):
                logger.warning("The list of removed members may lack some that the organiser has removed: %s", error)
            return
        self._merged = heard

    def _pass_on(self, lists: Mapping[str, bytes]) -> None:
        """Give the lists to other peers. One may have come with a round, so that the DHT process does not know it."""
        self._pass_on_at, self._passed_on = time.monotonic() + PASS_ON_SECONDS, lists
        for kind, signed in lists.items():
            push_list(self._dht, self._prefix, kind, signed, self._dht.acquaintances.peers)

    # ---- this peer's certificate ------------------------------------------------------------------------------------

    def _is_to_be_renewed(self) -> bool:
        own = self._admission.own
        return own is not None and own.is_to_be_renewed(get_dht_time())

    def _take_certificate(self) -> None:
        try:
            certificate = self._renew(self._admission.certificate)
        except InputError as error:
            if time.monotonic() >= self._say_at:
                self._say_at = time.monotonic() + SAY_AGAIN_SECONDS
                end = shown_date(self._admission.own.end)
                logger.warning("This peer's certificate, which ends on %s, could not be renewed: %s", end, error)
            return
        self._admission.certificate = certificate  # the next look tells this peer's processes

    def _end_if_over(self, now: float) -> None:
        """End this peer if its certificate ended `ENDED_SECONDS` ago.

        Until then it may try to renew the certificate: that is no risk, since other peers refuse it meanwhile.
        """
        own = self._admission.own
        if own is None or get_dht_time() <= own.end:
            self._ended_at = None
            return
        if self._ended_at is None:
            self._ended_at = now
        if now - self._ended_at >= ENDED_SECONDS:
            self._end(
                InputError(
                    "This peer's certificate has ended and could not be renewed: ask the organiser to start the "
                    "organiser's peer or `swarm enrol`, and join again with any join line of this run."
                )
            )

    def _end(self, why: InputError) -> None:
        self._stopped.set()
        self._on_end(why)
