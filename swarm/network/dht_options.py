"""Starts and ends the DHT process of a peer, and explains why it cannot start."""

# ruff: noqa: E402 (the version is checked first: no other version of Hivemind is imported or repaired)

from swarm.runtime.hivemind_version import check_hivemind_version

check_hivemind_version()

import contextlib
import ipaddress
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import hivemind
from hivemind.p2p import PeerID

from recipe.errors import InputError
from swarm.network.addresses import (
    NobodyAnswers,
    check_port_free,
    check_reachable,
    farthest_first,
    parse_own_address,
)
from swarm.network.dht_process import SwarmDHT
from swarm.network.hivemind_internals import has_answered
from swarm.network.hivemind_patches import repair_hivemind
from swarm.network.home.interfaces import every_host, free_port, has_ipv6, own_addresses
from swarm.network.home.open_ports import OpenPorts
from swarm.network.known_peers import peer_of_address
from swarm.network.reachability import offer_call_backs
from swarm.network.signed_records import OwnedRecords, prepare_identity, read_key
from swarm.network.startup_errors import explained, is_busy, was_too_slow
from swarm.runtime.processes import (
    allow_many_files,
    descendants,
    keep_signal_handlers,
    kill,
    use_fork,
)

BUSY_SECONDS = 1.0
"""Pause before a peer that was too busy to answer is asked again."""

repair_hivemind()


@dataclass(frozen=True)
class NetworkOptions:
    """How this peer connects to other peers.

    Raises:
        InputError: `public_ip` is no IP address, or there is no fixed port to announce with it.
    """

    initial_peers: tuple[str, ...] = ()
    """Multiaddresses of running peers. Without any, a new swarm is started."""
    port: int = 0
    """TCP port to listen on; 0 takes any free one."""
    host_maddrs: tuple[str, ...] = ()
    """Multiaddresses to listen on instead of `/ip4/0.0.0.0/tcp/PORT`, and `/ip6/::/tcp/PORT` on machines with IPv6."""
    announce_maddrs: tuple[str, ...] = ()
    """Multiaddresses that other peers are told instead of those that p2pd finds out by itself."""
    public_ip: str | None = None
    """Address of the router that forwards `port` to this machine. It is announced beside the other addresses."""
    opened: OpenPorts | None = None
    """Ports that this router has opened for this peer. They are closed when the DHT stops, or does not start."""
    identity_path: Path | None = None
    """Private key that fixes the peer id; made on first use. None takes a new identity every time."""
    client_mode: bool = False
    """Whether this peer only calls other peers and cannot be called. Nothing listens then."""
    check_identity: bool = True
    """Whether the swarm is asked first if the identity is in use, which takes about a second."""
    startup_timeout_seconds: float = 60
    """How long p2pd may take to start. A busy machine needs far more than Hivemind's 15 s."""
    patience_seconds: float = 30
    """How long peers that are there, but do not answer in time, are asked again. Some of them may be ending."""

    def __post_init__(self):
        if self.public_ip is None:
            return
        try:
            ipaddress.ip_address(self.public_ip)
        except ValueError:
            raise InputError(f"--public-ip {self.public_ip} is not an IP address like 203.0.113.5.") from None
        if not self._fixed_port():
            raise InputError(
                "--public-ip needs a fixed --port, or one in --host-maddrs: the one that your router forwards."
            )

    def listen_addresses(self) -> list[str]:
        """Multiaddresses that p2pd listens on."""
        return list(self.host_maddrs) or [multiaddress(host, self.port) for host in every_host()]

    def announced_addresses(self) -> list[str] | None:
        """Multiaddresses that p2pd tells other peers; None lets it find them out.

        They replace what p2pd finds out. So with a public address come those of this machine's network cards, through
        which peers on the local network still join.
        """
        announced = list(self.announce_maddrs)
        if self.public_ip is not None:
            port = self._fixed_port()
            if not announced and not self.host_maddrs:
                announced = [multiaddress(ip, port) for ip in own_addresses() if ip != "::1"]
            outside = port if self.opened is None else self.opened.ports.get(port, port)
            announced.insert(0, multiaddress(self.public_ip, outside))
        return list(dict.fromkeys(announced)) or None

    def check(self) -> None:
        """Check the addresses, ports and identity of these options; make the identity if there is none.

        Raises:
            InputError: an own address is malformed, a port is taken, the identity cannot be read or made
        """
        for address in self.listen_addresses():
            endpoint = parse_own_address(address, "--host-maddrs" if self.host_maddrs else "--port")
            if endpoint.transport == "tcp" and endpoint.family in ("ip4", "ip6"):
                check_port_free(endpoint.port, endpoint.host)
        for address in self.announced_addresses() or []:
            if parse_own_address(address, "--announce-maddrs").port == 0:
                raise InputError(f"--announce-maddrs: `{address}` needs the port itself: no peer can call port 0.")
        if self.identity_path is not None:
            prepare_identity(self.identity_path.expanduser())

    def _fixed_port(self) -> int:
        """The TCP port that this peer listens on; 0 if it is not fixed."""
        if not self.host_maddrs:
            return self.port
        ports = (parse_own_address(address, "--host-maddrs").port for address in self.host_maddrs if "/tcp/" in address)
        return next((port for port in ports if port), 0)


def multiaddress(host: str, port: int) -> str:
    """The multiaddress of a TCP port at an IP address."""
    return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"


def start_dht(options: NetworkOptions, meanwhile: Callable[[], None] = lambda: None) -> SwarmDHT:
    """Join the swarm of `options.initial_peers`, or start a new one. Main thread only.

    Args:
        options: how this peer connects to other peers
        meanwhile: called while the DHT process connects, for example for further imports

    Raises:
        InputError: with a sentence for a person, and with no process left. Within 30 s: a port is taken, no initial
            peer answers as the peer it should be, the clocks disagree by more than 3 s, or the identity is unusable or
            taken. After `patience_seconds` more: the initial peers are too busy to answer. After two times
            `startup_timeout_seconds`: p2pd could not start.
    """
    try:
        return _start(options, meanwhile)
    except BaseException:
        if options.opened is not None:
            options.opened.close()
        raise


def _start(options: NetworkOptions, meanwhile: Callable[[], None]) -> SwarmDHT:
    use_fork()
    allow_many_files()
    options.check()
    if not options.port and not options.host_maddrs and has_ipv6():  # else IPv4 and IPv6 would take different ports
        options = replace(options, port=free_port())
    peers = check_reachable(options.initial_peers)
    with keep_signal_handlers(), tempfile.TemporaryDirectory() as folder:
        if options.identity_path is None:
            options = replace(options, identity_path=Path(folder) / "identity", check_identity=False)
            prepare_identity(options.identity_path)
        deadline = time.monotonic() + options.patience_seconds
        while True:
            try:
                return _launch_twice(options, peers, meanwhile)
            except Exception as error:
                sentence = explained(error, options, peers)
                if not is_busy(error) or time.monotonic() > deadline:
                    raise sentence from None
            time.sleep(BUSY_SECONDS)
            with contextlib.suppress(NobodyAnswers):  # if that stays so, the next attempt fails and says it
                peers = check_reachable(options.initial_peers)


def _launch_twice(options: NetworkOptions, peers: list[str], meanwhile: Callable[[], None]) -> SwarmDHT:
    """As `_launch`, and a second time if the first one was only too slow."""
    start = time.monotonic()
    try:
        return _launch(options, peers, meanwhile)
    except Exception as error:
        if not was_too_slow(error, time.monotonic() - start):
            raise
        return _launch(options, peers, meanwhile)


def visible_addresses(dht: hivemind.DHT, timeout_seconds: float = 10) -> list[str]:
    """Where other peers can reach this peer, as multiaddresses that end with `/p2p/PEER_ID`; may be empty.

    Public addresses come first, then those of the local network, then those of this machine.

    Raises:
        InputError: the DHT process does not answer in time
    """
    try:
        return farthest_first(dht.run_coroutine(_list_addresses, return_future=True).result(timeout_seconds))
    except TimeoutError:
        said = f"The DHT process did not answer within {timeout_seconds:g} s"
        raise InputError(f"{said}: the machine is too busy, so end other programs and try again.") from None


def stop_dht(dht: SwarmDHT, timeout_seconds: float = 3) -> None:
    """End a DHT process and its p2pd, after `timeout_seconds` by force. Never raises."""
    if dht.opened is not None:
        dht.opened.close()
    below = [*dht.processes, *(descendants(dht.pid) if dht.pid else [])]
    dht.shutdown_timeout = timeout_seconds
    with contextlib.suppress(Exception):
        dht.shutdown()
    _end_process(dht)
    kill(below)
    shutil.rmtree(dht.sockets, ignore_errors=True)


def _launch(options: NetworkOptions, peers: list[str], meanwhile: Callable[[], None]) -> SwarmDHT:
    identity = options.identity_path.expanduser()
    records = OwnedRecords(read_key(identity))
    dht = SwarmDHT(
        initial_peers=peers or None,
        start=False,
        record_validators=[records],
        no_listen=options.client_mode,
        host_maddrs=None if options.client_mode else options.listen_addresses(),
        announce_maddrs=options.announced_addresses(),
        identity_path=str(identity),
        client_mode=options.client_mode,
        startup_timeout=options.startup_timeout_seconds,
        check_if_identity_free=options.check_identity,
        # Nothing that a search has found is kept or passed on: with a false end it would be answered in place of newer
        # records, and other nodes of this program refuse it.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
    )
    dht.records = records
    try:
        dht.run_in_background(await_ready=False)
        meanwhile()
        _wait_until_ready(dht, options.startup_timeout_seconds + 30)
        dht.meet(PeerID.from_base58(peer_of_address(address)) for address in options.initial_peers)
        if not options.client_mode:
            _finish(dht.run_coroutine(offer_call_backs, return_future=True), options.startup_timeout_seconds)
        dht.processes = tuple(descendants(dht.pid))
        if options.opened is not None:
            options.opened.keep()
            dht.opened = options.opened
    except BaseException:  # Ctrl-C as well
        if has_answered(dht):
            # A process that could not start ends by itself. If it were killed right after its answer, it might still
            # hold MPFuture's lock. All processes share that lock, so no later DHT could ever answer.
            dht.join(3)
        _end_process(dht)
        shutil.rmtree(dht.sockets, ignore_errors=True)
        raise
    return dht


def _finish(start: Future, timeout_seconds: float) -> None:
    try:
        start.result(timeout_seconds)
    except TimeoutError:
        raise RuntimeError("the DHT process did not answer in time while it started") from None


def _wait_until_ready(dht: SwarmDHT, timeout_seconds: float) -> None:
    """Wait until the DHT process is ready. Hivemind's own function waits for ever if the process is killed meanwhile.

    Raises:
        RuntimeError: the process did not answer in time, or was killed
        Exception: what kept the process from starting
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        alive = dht.is_alive()
        try:
            return dht.wait_until_ready(0.2 if alive else 1)
        except TimeoutError:
            if has_answered(dht):  # just now; or a TimeoutError is its answer
                return dht.wait_until_ready(1)
            if not alive or time.monotonic() > deadline:
                state = "did not answer in time" if alive else "was killed"
                raise RuntimeError(f"the DHT process {state} while it started") from None


def _end_process(dht: hivemind.DHT) -> None:
    """Terminate the DHT process, whose signal handler kills p2pd; after a second, kill it and its descendants."""
    if dht.pid is None:
        return
    below = descendants(dht.pid)
    with contextlib.suppress(Exception):
        dht.terminate()
        dht.join(1)
        dht.kill()
        dht.join(1)
    kill(below)


async def _list_addresses(_dht: hivemind.DHT, node: hivemind.dht.DHTNode) -> list[str]:
    try:
        return [str(address) for address in await node.get_visible_maddrs(latest=True)]
    except ValueError:  # hivemind raises it if there are none
        return []
