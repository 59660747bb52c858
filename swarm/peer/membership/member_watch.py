"""While a member trains: it hears what the organiser signs, tells its other processes, and renews its certificate."""

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

LOOK_SECONDS = 0.1
"""A look reads a number in shared memory: a removed member is out before a fast swarm has made many updates."""
SEARCH_SECONDS = 15.0
"""How often a peer asks others for the newest lists; who is known to train is told at once."""
PASS_ON_SECONDS = 600.0
"""How often a member stores the lists again, which are forgotten after an hour."""
RENEW_AGAIN_SECONDS = 60.0
SAY_AGAIN_SECONDS = 3600.0
ENDED_SECONDS = 600.0
"""How long a peer tries to renew a certificate that has ended: a laptop that wakes up has no network for a while."""
ANSWER_SECONDS = 10.0

logger = logging.getLogger(__name__)


class MemberWatch(threading.Thread):
    """Of the trainer.

    Args:
        dht: of this peer, which takes part in the run
        admission: of the trainer
        prefix: of the run's keys
        tell: called with the certificate and the organiser's lists by kind, all as they were signed, when one is new,
            until it returns True
        renew: asks the organiser for a new certificate in place of this one; raises InputError if that fails
        on_end: called once when this peer may not take part any more, with what says why
    """

    def __init__(
        self,
        dht: SwarmDHT,
        admission: Admission,
        prefix: str,
        tell: Callable[[bytes, Mapping[str, bytes]], bool],
        renew: Callable[[bytes], bytes],
        on_end: Callable[[InputError], None],
    ):
        super().__init__(name="member", daemon=True)
        self._dht, self._admission, self._prefix = dht, admission, prefix
        self._tell, self._renew, self._on_end = tell, renew, on_end
        self._stopped = threading.Event()
        self._told: tuple[bytes, Mapping[str, bytes]] | None = None
        """What the averaging process knows; it is started after this thread."""
        self._passed_on: Mapping[str, bytes] = {}
        self._looked_at: dict[str, int] = {}
        """By kind: number of the DHT process's list at the last look, whether this process could take it or not."""
        now = time.monotonic()
        self._search_at, self._pass_on_at, self._renew_at, self._say_at = now, now, now, now
        self._ended_at: float | None = None
        """On the monotonic clock: when this peer found that its certificate had ended."""

    def stop(self) -> None:
        """Watch no more; waits at most a second."""
        self._stopped.set()
        if self.is_alive():
            self.join(1)

    def run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                self.look()
            except (TimeoutError, CancelledError, OSError, RuntimeError, InputError) as error:
                logger.debug("the DHT process does not answer: %r", error)  # it may be ending; the supervisor knows

    def look(self) -> None:
        """Once. What is known already comes before whatever waits for others."""
        now = time.monotonic()
        for kind in LISTS:
            self._take(kind)
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
        if self._is_to_be_renewed() and now >= self._renew_at:
            self._renew_at = now + RENEW_AGAIN_SECONDS
            self._take_certificate()
        if not self._stopped.is_set():
            self._end_if_over(now)

    # ---- what the organiser has signed ------------------------------------------------------------------------------

    def _search(self) -> None:
        """What is found goes through the DHT process, which notes a newer list: nobody waits for an answer."""
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

    def _pass_on(self, lists: Mapping[str, bytes]) -> None:
        """Also what has come with a round, which the DHT process has not heard of."""
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
        self._admission.certificate = certificate
        self._dht.take_part(self._prefix, self._admission.authority, certificate)

    def _end_if_over(self, now: float) -> None:
        """Others refuse this peer while its certificate has ended, so nothing is risked while it tries to renew it."""
        own = self._admission.own
        if own is None or get_dht_time() <= own.end:
            self._ended_at = None
            return
        if self._ended_at is None:
            self._ended_at = now
        if now - self._ended_at >= ENDED_SECONDS:
            self._end(
                InputError(
                    "This peer's certificate has ended and could not be renewed: ask the organiser whether her peer or "
                    "`swarm enrol` runs, and join again with a join line."
                )
            )

    def _end(self, why: InputError) -> None:
        self._stopped.set()
        self._on_end(why)
