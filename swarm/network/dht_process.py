"""The process of Hivemind's DHT, as a peer of this program runs it."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterable

import hivemind
import psutil
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey

from recipe.errors import InputError
from swarm.network.acquaintances import Acquaintances
from swarm.network.hivemind_internals import failed_to_start, release_future_lock, use_socket_folder, use_whole_pipes
from swarm.network.home.open_ports import OpenPorts
from swarm.network.signed_records import Meet, NewestList, OwnedRecords, TakePart
from swarm.protocol.certificates import Authority
from swarm.runtime.processes import descendants, die_with_parent, kill, leave_terminal, stay_small
from swarm.runtime.sockets import make_socket_folder

MEET_AT_ONCE = 32
"""Peers in one message to the DHT process. Many processes write to its pipe, where only small messages stay whole."""


class SwarmDHT(hivemind.DHT):
    """Hivemind's DHT, except that its process and p2pd end with the trainer, however the trainer ends.

    The kernel tells the process when the *thread* that made it dies, so only the main thread may start one.
    """

    records: OwnedRecords
    """Signs this peer's records and checks the records of other peers."""
    processes: tuple[psutil.Process, ...] = ()
    """The descendants of the DHT process (p2pd), noted when they were up."""
    opened: OpenPorts | None = None
    """The ports that the home router has opened for this peer."""

    def __init__(self, *args, **kwargs):
        self.sockets = make_socket_folder()
        """Folder of the sockets through which this peer's processes talk to p2pd."""
        self.acquaintances = Acquaintances()
        """Peers whose records are kept first, as this process knows them; `meet` tells the DHT process as well."""
        super().__init__(*args, **kwargs)

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start the DHT on the main thread: its process dies with the thread that made it")
        use_whole_pipes(self)
        super().start()

    def meet(self, peers: Iterable[PeerID]) -> None:
        """Note that these peers are no strangers: their records are read and kept first."""
        new = self.acquaintances.add(peers)
        with contextlib.suppress(OSError):  # the DHT process has died: that is noticed elsewhere, and the peer restarts
            for begin in range(0, len(new), MEET_AT_ONCE):
                self.run_coroutine(Meet(new[begin : begin + MEET_AT_ONCE]), return_future=True)

    @property
    def owner(self) -> bytes:
        """Subkey of this peer's own records."""
        return self.records.local_public_key

    @property
    def key(self) -> RSAPrivateKey:
        """This peer's private key. Its peer id is the hash of the public key."""
        return self.records.key

    def take_part(self, prefix: str, authority: Authority, certificate: bytes, timeout_seconds: float = 30) -> None:
        """Tell the DHT process that this peer is a member of a run, or shows a new certificate there.

        Args:
            prefix: start of the run's keys
            authority: the organiser of the run
            certificate: this peer's certificate
            timeout_seconds: how long the DHT process may take to answer

        Raises:
            InputError: the DHT process did not answer
        """
        try:
            self.run_coroutine(TakePart(prefix, authority, certificate), return_future=True).result(timeout_seconds)
        except TimeoutError:
            said = f"The DHT process did not answer within {timeout_seconds:g} s"
            raise InputError(f"{said}: the machine is too busy, so end other programs and try again.") from None

    def list_number(self, kind: str) -> int:
        """Number of the newest list of this kind that the DHT process has heard of; 0 if there is none."""
        return self.records.list_numbers[kind].value

    def newest_list(self, kind: str, timeout_seconds: float = 30) -> bytes:
        """The newest list of this kind that the DHT process has heard of, as it was signed; empty if there is none.

        Raises:
            concurrent.futures.TimeoutError: the DHT process did not answer
        """
        return self.run_coroutine(NewestList(kind), return_future=True).result(timeout_seconds)

    def run(self) -> None:
        """Run the DHT process, from its start to its end."""
        os.environ.setdefault("GOMAXPROCS", "1")  # p2pd needs a hundredth of a core, not of each
        # If two peers call each other at the same moment, each from the port that the other calls, TCP makes one
        # connection of it. libp2p's handshake then fails, since both sides are callers, and neither retries for 5 s.
        os.environ.setdefault("LIBP2P_TCP_REUSEPORT", "false")
        signal.signal(signal.SIGTERM, _end_at_once)
        leave_terminal()
        use_socket_folder(self.sockets)
        die_with_parent(signal.SIGTERM)
        stay_small()
        logging.getLogger("asyncio").addFilter(lambda _: not self._failed())
        try:
            super().run()
        finally:
            kill(descendants(os.getpid()))

    def _failed(self) -> bool:
        """Whether the start has failed. The trainer knows the error by then, so asyncio prints no abandoned pings."""
        return failed_to_start(self)


def _end_at_once(signal_number: int, _frame) -> None:
    kill(descendants(os.getpid()))
    release_future_lock()  # all of the trainer's children share it: see dht_options._launch
    os._exit(128 + signal_number)
