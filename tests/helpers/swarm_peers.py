"""Peers for tests: each runs a function in a process of its own, and none of their processes outlives the test.

    with Peers(timeout_seconds=60) as peers:
        peers.start("a", train, 20)        # calls train("a", initial_peers, line, 20) in a new process
        peers.start("b", train, 20)        # the same, with the address that "a" announced
        weights = peers.results()          # {"a": …, "b": …}: what they returned

Importing torch, hivemind and Lightning takes many seconds, so one helper process (multiprocessing's fork server) does
it once and all peers are forked from it. It has no threads and no tensors, which pytest's own process may have.
Functions are named by module, so they have to be at the top level of theirs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch

from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht, visible_addresses
from swarm.runtime.processes import descendants, kill
from tests.helpers.programs.fork_server import FORK_SERVER, have_own_locks

_helper_runs: list[bool] = []


class PeerFailed(Exception):  # noqa: N818
    """A peer raised (its traceback is the message), ended without a result, or left processes behind."""


class Line:
    """A peer's connection to its test. It copies what is sent: no shared memory that could vanish with its sender."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def __reduce__(self):
        raise TypeError("a line stays with its peer: in the test's process it would close a file that is not its own")

    def put(self, message: Any) -> None:
        """Send a message to the test; it turns up in `Peer.messages`."""
        self.send("message", message)

    def announce(self, address: str) -> None:
        """Tell the test where later peers can reach this one."""
        self.send("address", address)

    def get(self) -> Any:
        """Wait for a message that the test sends with `Peer.tell`."""
        return pickle.loads(self._connection.recv_bytes())

    def has_message(self) -> bool:
        """Whether the test has sent a message that this peer has not got yet."""
        return self._connection.poll()

    def send(self, kind: str, value: Any) -> None:
        self._connection.send_bytes(pickle.dumps((kind, value)))


@contextlib.contextmanager
def running_dht(initial_peers: tuple[str, ...], line: Line, **options) -> Iterator:
    """Run a DHT on loopback for a peer, and announce its address."""
    options = {"host_maddrs": ("/ip4/127.0.0.1/tcp/0",), **options}
    dht = start_dht(NetworkOptions(initial_peers=initial_peers, **options))
    try:
        if not dht.client_mode:
            line.announce(visible_addresses(dht)[0])
        yield dht
    finally:
        stop_dht(dht)


class Peer:
    """One peer, as the test sees it."""

    def __init__(self, name: str, process, connection: Connection):
        self.name, self._process, self.connection = name, process, connection
        self.messages: list[Any] = []
        self.address: str | None = None
        self.result: Any = None
        self.finished = False
        self.killed = False
        self._seen: dict[int, psutil.Process] = {}

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    @property
    def is_alive(self) -> bool:
        """Whether the peer's own process lives."""
        return self._process.is_alive()

    def tell(self, message: Any) -> None:
        """Answer a `Line.get` of this peer."""
        self.connection.send_bytes(pickle.dumps(message))

    def processes(self) -> list[psutil.Process]:
        """This peer's process and all that it started, as far as they live; orphans included."""
        for process in descendants(self._process.pid) + list(_session(self._process.pid)):
            self._seen[process.pid] = process
        return [p for p in self._seen.values() if p.is_running() and _status(p) != psutil.STATUS_ZOMBIE]

    def kill(self) -> None:
        """Kill the peer's own process (kill -9), as the kernel does when memory runs out; it cleans nothing up."""
        self.processes()
        self.killed = True
        self._process.kill()

    def reap(self, patience_seconds: float) -> list[psutil.Process]:
        """Wait for all processes of the peer, then kill the rest. Returns those that had to be killed."""
        self._process.join(patience_seconds)
        _, left = psutil.wait_procs(self.processes(), timeout=patience_seconds)
        left = [process for process in left if _status(process) != psutil.STATUS_ZOMBIE]
        kill(left)
        self._process.join(5)
        self.connection.close()
        return left


class Peers:
    """The peers of one test; a context manager.

    Args:
        timeout_seconds: for everything together, without the start of the helper process
        invite_by_all: give a new peer the addresses of all present peers, not of the first one alone
    """

    def __init__(self, timeout_seconds: float = 120, invite_by_all: bool = False):
        self.peers: dict[str, Peer] = {}
        self._invite_by_all = invite_by_all
        self._deadline = time.monotonic() + timeout_seconds

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *exception) -> None:
        for peer in self.peers.values():
            peer.processes()  # note them all before the first is gone
        for peer in self.peers.values():
            peer.reap(patience_seconds=0)

    def __getitem__(self, name: str) -> Peer:
        return self.peers[name]

    def start(self, name: str, function: Callable, *args) -> Peer:
        """Run `function(name, initial_peers, line, *args)` in a new process.

        `initial_peers` begins with the address that the first peer announces (waited for). The first peer gets none.
        """
        self._deadline += _start_helper()
        first = next(iter(self.peers.values()), None)
        if first is not None:
            self.until(lambda: first.address is not None)
        inviting = [peer for peer in self.peers.values() if peer is first or (self._invite_by_all and peer.address)]
        initial_peers = tuple(peer.address for peer in inviting)
        ours, theirs = FORK_SERVER.Pipe()
        process = FORK_SERVER.Process(target=_run, args=(function, name, initial_peers, theirs, args), name=name)
        process.start()
        theirs.close()
        peer = self.peers[name] = Peer(name, process, ours)
        return peer

    def until(self, condition: Callable[[], Any]) -> Any:
        """Receive what the peers send until the condition is true; returns its value.

        Raises:
            PeerFailed: a peer raised or died meanwhile
            TimeoutError: the test's time is over
        """
        while not (value := condition()):
            open_peers = {peer.connection: peer for peer in self.peers.values() if not (peer.finished or peer.killed)}
            if not open_peers:
                raise PeerFailed("all peers have ended, the condition was never met")
            ready = wait(list(open_peers), timeout=max(0.0, self._deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"after {[(p.name, len(p.messages), p.finished) for p in self.peers.values()]}")
            for connection in ready:
                self._take_in(open_peers[connection])
        return value

    def message(self, name: str) -> Any:
        """Wait for the next message of a peer."""
        peer = self.peers[name]
        self.until(lambda: peer.messages)
        return peer.messages.pop(0)

    def results(self, *names: str) -> dict[str, Any]:
        """Return what the peers (all that were not killed, or the named ones) return.

        Raises:
            PeerFailed: also when one leaves processes behind
        """
        wanted = [self.peers[name] for name in names] or [peer for peer in self.peers.values() if not peer.killed]
        self.until(lambda: all(peer.finished for peer in wanted))
        for peer in wanted:
            if left := peer.reap(patience_seconds=5):
                raise PeerFailed(f"{peer.name} has ended but left {left}")
        return {peer.name: peer.result for peer in wanted}

    def _take_in(self, peer: Peer) -> None:
        try:
            kind, value = pickle.loads(peer.connection.recv_bytes())
        except (EOFError, OSError):
            raise PeerFailed(f"{peer.name} died without a word") from None
        if kind == "error":
            raise PeerFailed(f"{peer.name} raised\n{value}")
        if kind == "message":
            peer.messages.append(value)
        elif kind == "address":
            peer.address = value
        else:
            peer.result, peer.finished = value, True
            peer.processes()


def _start_helper() -> float:
    """Make sure that the helper process has imported everything; returns how long it took, in seconds."""
    started = time.monotonic()
    if not _helper_runs:
        process = FORK_SERVER.Process(target=time.monotonic, daemon=True)
        process.start()
        process.join(180)
        if process.exitcode != 0:
            raise PeerFailed(f"the helper process has not begun: {process.exitcode}")
        _helper_runs.append(True)
    return time.monotonic() - started


def _run(function: Callable, name: str, initial_peers: tuple[str, ...], connection: Connection, args: tuple) -> None:
    """Run a peer's function in its process, and send the result."""
    os.setsid()  # its processes are found by this session even when they are orphans
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    have_own_locks()
    line = Line(connection)
    try:
        result = function(name, initial_peers, line, *args)
    except BaseException:
        line.send("error", traceback.format_exc())
    else:
        line.send("result", result)


def _session(session_id: int) -> Iterator[psutil.Process]:
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(pid) == session_id:
                yield psutil.Process(pid)


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.Error:
        return psutil.STATUS_ZOMBIE
