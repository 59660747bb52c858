"""The process of Hivemind's DHT, as a peer of ours runs it."""

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
"""Many processes write to the pipe of the DHT process, where only small messages stay in one piece."""


class SwarmDHT(hivemind.DHT):
    """Hivemind's DHT, except that its process and p2pd end with the trainer, however that one ends.

    The kernel tells the process when the *thread* that made it dies, so only the main thread may start one.
    """

    records: OwnedRecords
    """Signs this peer's records and checks those of others."""
    processes: tuple[psutil.Process, ...] = ()
    """Everything below the DHT process (p2pd), noted when it was up."""
    opened: OpenPorts | None = None
    """What the home router has opened for this peer."""

    def __init__(self, *args, **kwargs):
        self.sockets = make_socket_folder()
        """Of those by which its processes talk to p2pd."""
        self.acquaintances = Acquaintances()
        """Whose records come first, in this process and in the DHT's."""
        super().__init__(*args, **kwargs)

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start the DHT on the main thread: its process dies with the thread that made it")
        use_whole_pipes(self)
        super().start()

    def meet(self, peers: Iterable[PeerID]) -> None:
        """These are no strangers: their records are read and kept first."""
        new = self.acquaintances.add(peers)
        with contextlib.suppress(OSError):  # who notices that the process has died starts this peer again
            for begin in range(0, len(new), MEET_AT_ONCE):
                self.run_coroutine(Meet(new[begin : begin + MEET_AT_ONCE]), return_future=True)

    @property
    def owner(self) -> bytes:
        """Subkey of this peer's own records."""
        return self.records.local_public_key

    @property
    def key(self) -> RSAPrivateKey:
        """This peer's own, of which its id is the hash."""
        return self.records.key

    def take_part(self, prefix: str, authority: Authority, certificate: bytes, timeout_seconds: float = 30) -> None:
        """This peer is a member of this run, or shows another certificate there.

        Args:
            prefix: of the run's keys

        Raises:
            InputError: the DHT process did not answer
        """
        try:
            self.run_coroutine(TakePart(prefix, authority, certificate), return_future=True).result(timeout_seconds)
        except TimeoutError:
            said = f"The DHT process did not answer within {timeout_seconds:g} s"
            raise InputError(f"{said}: the machine is too busy, so end other programs and try again.") from None

    def list_number(self, kind: str) -> int:
        """Of the newest list of this kind that the DHT process has heard of; 0 if there is none."""
        return self.records.list_numbers[kind].value

    def newest_list(self, kind: str, timeout_seconds: float = 30) -> bytes:
        """That list, as it was signed.

        Raises:
            concurrent.futures.TimeoutError: the DHT process did not answer
        """
        return self.run_coroutine(NewestList(kind), return_future=True).result(timeout_seconds)

    def run(self) -> None:
        """The life of the DHT process."""
        os.environ.setdefault("GOMAXPROCS", "1")  # p2pd needs a hundredth of a core, not of each
        # If two peers call each other at the same moment, each from the port that the other calls, TCP makes one
        # connection of it, libp2p's handshake fails for want of one who was called, and neither tries again for 5 s.
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
        """The trainer knows the error by now: no need for asyncio to print the tracebacks of abandoned pings."""
        return failed_to_start(self)


def _end_at_once(signal_number: int, _frame) -> None:
    kill(descendants(os.getpid()))
    release_future_lock()  # all of the trainer's children share it: see _launch
    os._exit(128 + signal_number)
