"""While a member trains: it hears who was removed, tells its other processes, and renews its certificate in time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

from hivemind.utils import get_dht_time

from recipe.errors import InputError
from swarm.network.dht_process import SwarmDHT
from swarm.network.record_push import push_removals
from swarm.network.signed_records import REMOVED
from swarm.protocol.admission import Admission
from swarm.protocol.certificates import NotSigned

LOOK_SECONDS = 0.1
"""A look reads a number in shared memory: a removed member is out before a fast swarm has made many updates."""
SEARCH_SECONDS = 15.0
"""How often a peer asks others for the newest list; who is known to train is told at once."""
PASS_ON_SECONDS = 600.0
"""How often a member stores the list again, which is forgotten after an hour."""
RENEW_SHARE = 0.5
"""Of a certificate's life, after which it is renewed."""
RENEW_AGAIN_SECONDS = 60.0
SAY_AGAIN_SECONDS = 3600.0
ANSWER_SECONDS = 10.0

logger = logging.getLogger(__name__)


class MemberWatch(threading.Thread):
    """Of the trainer.

    Args:
        dht: of this peer, which takes part in the run
        admission: of the trainer
        prefix: of the run's keys
        tell: called with the certificate and the list of the removed, both as they were signed, when one is new, until
            it returns True
        renew: asks the organiser for a new certificate in place of this one; raises InputError if that fails
        on_end: called once with a sentence when this peer may not take part any more
    """

    def __init__(
        self,
        dht: SwarmDHT,
        admission: Admission,
        prefix: str,
        tell: Callable[[bytes, bytes], bool],
        renew: Callable[[bytes], bytes],
        on_end: Callable[[str], None],
    ):
        super().__init__(name="member", daemon=True)
        self._dht, self._admission, self._prefix = dht, admission, prefix
        self._tell, self._renew, self._on_end = tell, renew, on_end
        self._stopped = threading.Event()
        self._told = False
        """Whether the averaging process knows the newest; it is started after this thread."""
        now = time.monotonic()
        self._search_at, self._pass_on_at, self._renew_at, self._say_at = now, now, now, now

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
        self._take_removals()
        if not self._told:
            self._told = self._tell(self._admission.certificate, self._admission.signed_removals)
        self._end_if_over()
        if now >= self._search_at and not self._stopped.is_set():
            self._search_at = now + SEARCH_SECONDS
            self._search()
        if self._admission.signed_removals and now >= self._pass_on_at:
            self._pass_on()
        if self._is_to_be_renewed() and now >= self._renew_at:
            self._renew_at = now + RENEW_AGAIN_SECONDS
            self._take_certificate()

    # ---- who was removed --------------------------------------------------------------------------------------------

    def _search(self) -> None:
        """What is found goes through the DHT process, which notes a newer list: nobody waits for an answer."""
        self._dht.get(f"{self._prefix}.{REMOVED}", latest=True, return_future=True)

    def _take_removals(self) -> None:
        if self._dht.removals_number <= self._admission.removals.number:
            return
        try:
            is_newer = self._admission.take_removals(self._dht.newest_removals(ANSWER_SECONDS))
        except NotSigned as error:  # this machine's clock has been set back
            logger.warning("The list of removed members %s", error)
            return
        if is_newer:
            self._told, self._pass_on_at = False, 0.0

    def _pass_on(self) -> None:
        self._pass_on_at = time.monotonic() + PASS_ON_SECONDS
        push_removals(self._dht, self._prefix, self._admission.signed_removals, self._dht.acquaintances.peers)

    # ---- this peer's certificate ------------------------------------------------------------------------------------

    def _is_to_be_renewed(self) -> bool:
        own = self._admission.own
        return own is not None and get_dht_time() > own.begin + RENEW_SHARE * (own.end - own.begin)

    def _take_certificate(self) -> None:
        try:
            certificate = self._renew(self._admission.certificate)
        except InputError as error:
            if time.monotonic() >= self._say_at:
                self._say_at = time.monotonic() + SAY_AGAIN_SECONDS
                end = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self._admission.own.end))
                logger.warning("This peer's certificate, which ends on %s, could not be renewed: %s", end, error)
            return
        self._admission.certificate = certificate
        self._dht.take_part(self._prefix, self._admission.authority, certificate)
        self._told = False

    def _end_if_over(self) -> None:
        why = self._admission.why_this_peer_was_removed
        own = self._admission.own
        if why is not None:
            self._end(f"The organiser has removed this peer from the run: {why}.")
        elif own is not None and get_dht_time() > own.end:
            self._end(
                "This peer's certificate has ended and could not be renewed: ask the organiser whether her peer or "
                "`swarm enrol` runs, and join again with a join line."
            )

    def _end(self, sentence: str) -> None:
        self._stopped.set()
        self._on_end(sentence)
