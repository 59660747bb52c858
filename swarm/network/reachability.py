"""Measures whether other peers can call this machine: running peers open a fresh connection to it.

libp2p would answer over the existing connection, so this is plain TCP. The newcomer listens on the port that its p2pd
will use, and sends a nonce to every caller. The asked peer connects only to *the address that the question came from*,
and only reads. So it cannot be used to scan other machines. Of the asker's own ports it tells only whether the nonce
was there.

A router that opens a port for the newcomer may give it another number, and the newcomer names that number. What the
router says of itself plays no part: the port is open if the nonce was heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import hivemind
import msgspec
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError, P2PHandlerError
from hivemind.p2p.servicer import ServicerBase
from hivemind.utils import get_logger
from msgspec import Meta

from recipe.errors import InputError
from swarm.network.addresses import household, is_public
from swarm.network.hivemind_internals import connect
from swarm.network.home.interfaces import every_host, own_addresses
from swarm.network.home.open_ports import OpenPorts, open_port
from swarm.network.home.router import RouterRefuses
from swarm.network.known_peers import peer_of_address
from swarm.network.signed_records import identity_in_use, peer_with, read_key
from swarm.protocol.wire import from_wire, to_wire
from swarm.runtime.token_bucket import TokenBucket, TokenBuckets

logger = get_logger(__name__)

NONCE_BYTES = 16
MAX_MESSAGE_BYTES = 128
_CALL_ME = msgspec.msgpack.Decoder(
    tuple[
        Annotated[int, Meta(ge=1, le=65535)],
        Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)],
    ]
)
_CALLED = msgspec.msgpack.Decoder(tuple[str, bool])
CONNECT_SECONDS = 3.0
"""Time limit for the connection of a call back, and again for the nonce."""
ANSWER_SECONDS = 8.0
"""Time limit for the answer of an asked peer, which may run on a busy machine."""
MAX_ASKED = 3
"""Peers that a newcomer asks."""
_IPV6 = ("/ip6/", "/dns6/")
CALLS_PER_MINUTE, CALLS_OF_A_PEER, CALLS_OF_A_HOST = 60, 5, 20
"""Calls back that a peer makes per minute: for all askers, for one peer id, and for one IP address. Many machines may
share an address."""


@dataclass(frozen=True)
class Reachability:
    """How this peer takes part, and why.

    Args:
        mode: a server-mode peer can be called; a client-mode peer only calls
        reason: the end of a sentence
        host: the IP address at which most asked peers see this machine, or None if there is none
        router: a sentence about what the home router did; empty if it was not asked
        opened: ports that the router keeps open for this peer
    """

    mode: Literal["server-mode", "client-mode"]
    reason: str
    host: str | None = None
    router: str = ""
    opened: OpenPorts | None = None

    def __str__(self) -> str:
        return f"Reachability: {self.mode} peer, {self.reason}. {self.router}".rstrip()


# ---- messages: Hivemind takes any class with these two methods of protobuf ------------------------------------------


@dataclass(frozen=True)
class CallMe:
    """The question whether the asked peer can call the asker.

    Args:
        port: TCP port on which the asker can be called
        nonce: random bytes that the asker sends to callers on that port
    """

    port: int
    nonce: bytes

    def SerializeToString(self) -> bytes:  # noqa: N802 (protobuf's name)
        return to_wire(self.port, self.nonce)

    @classmethod
    def FromString(cls, data: bytes) -> CallMe:  # noqa: N802
        """Raises ValueError: whatever is wrong with it; the sender is not trusted"""
        port, nonce = from_wire(_CALL_ME, data, MAX_MESSAGE_BYTES)
        return cls(port, nonce)


@dataclass(frozen=True)
class Called:
    """The answer to it.

    Args:
        host: IP address that the question came from; empty if it is not known, or if the asker has asked too often
        reached: whether the nonce was heard there
    """

    host: str
    reached: bool

    def SerializeToString(self) -> bytes:  # noqa: N802
        return to_wire(self.host, self.reached)

    @classmethod
    def FromString(cls, data: bytes) -> Called:  # noqa: N802
        """Raises ValueError: whatever is wrong with it; the sender is not trusted"""
        host, reached = from_wire(_CALLED, data, MAX_MESSAGE_BYTES)
        if host:
            _family(host)
        return cls(host, reached)


def _family(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)
    except OSError as error:
        raise ValueError(f"{host!r} is no IP address") from error
    return family


# ---- the asked peer -------------------------------------------------------------------------------------------------


class ReachabilityService(ServicerBase):
    """Calls newcomers back. Its class name and method names are part of the wire protocol.

    Args:
        p2p: the DHT's connection to p2pd, which knows where a question came from
    """

    def __init__(self, p2p: P2P):
        self._p2p = p2p
        self._calls = TokenBucket(CALLS_PER_MINUTE, CALLS_PER_MINUTE / 60)
        self._of_peers = TokenBuckets(CALLS_OF_A_PEER, CALLS_OF_A_PEER / 60)
        self._of_hosts = TokenBuckets(CALLS_OF_A_HOST, CALLS_OF_A_HOST / 60)

    async def rpc_call_back(self, request: CallMe, context: P2PContext) -> Called:
        """Connect to the asker's own address, at the port that it names, and say whether the nonce was there."""
        if not self.may_ask(context.remote_id):  # first, since listing all connections takes a while
            return Called("", False)
        host = await self._host_of(context.remote_id)
        if host is None or not self.may_call(host):
            return Called("", False)
        return Called(host, await _says(host, request.port, request.nonce))

    def may_ask(self, peer_id: PeerID) -> bool:
        """Whether this peer id has not asked too often; counts this question."""
        return self._of_peers.take(peer_id)

    def may_call(self, host: str) -> bool:
        """Whether one more call to this IP address is within the limits; counts it.

        Names cost nothing and addresses do. So a stranger with many names cannot use up the calls for all askers.
        """
        is_here = ipaddress.ip_address(host).is_loopback  # a whole swarm may start on one machine
        if not is_here and not self._of_hosts.take(household(host)):
            return False
        return self._calls.take()

    async def _host_of(self, peer_id: PeerID) -> str | None:
        """The IP address of a peer that is connected directly, not over a relay, as p2pd sees it; None if it is not."""
        for peer in await self._p2p.list_peers():
            for address in peer.addrs if peer.peer_id == peer_id else ():
                parts = str(address).split("/")
                if parts[1] in ("ip4", "ip6") and "p2p-circuit" not in parts:
                    return parts[2]
        return None


async def _says(host: str, port: int, nonce: bytes) -> bool:
    """Whether a fresh connection to a TCP port is greeted with the nonce."""
    writer = None
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_SECONDS)
        return await asyncio.wait_for(reader.readexactly(NONCE_BYTES), CONNECT_SECONDS) == nonce
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return False
    finally:
        if writer is not None:
            writer.close()


async def offer_call_backs(_dht: hivemind.DHT, node: hivemind.dht.DHTNode) -> None:
    """Answer newcomers' questions from now on. It runs in the DHT process of a server-mode peer."""
    await ReachabilityService(node.p2p).add_p2p_handlers(node.p2p)


# ---- the newcomer ---------------------------------------------------------------------------------------------------


def measure_reachability(
    initial_peers: Sequence[str], port: int, identity_path: Path | None = None, ask_router: bool = False
) -> Reachability:
    """Ask up to three peers to call this machine. It is reachable if all that answer could, most at the same address.

    Takes one to two seconds, and starts and ends a p2pd of its own with another identity. Peers are asked over IPv4
    first, and over IPv6 if that does not find this machine reachable.

    Args:
        initial_peers: multiaddresses of running peers
        port: the TCP port to listen on, free
        identity_path: private key of the identity that this peer is going to use
        ask_router: have the home router open the port, if these peers have public addresses

    Raises:
        InputError: a running peer uses that identity already
    """
    return asyncio.run(_measure(initial_peers, port, identity_path, ask_router))


async def _measure(
    initial_peers: Sequence[str], port: int, identity_path: Path | None, ask_router: bool
) -> Reachability:
    nonce = os.urandom(NONCE_BYTES)

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(nonce)
            await writer.drain()
        writer.close()

    try:
        listener = await asyncio.start_server(greet, every_host(), port)
    except OSError as error:
        return Reachability("client-mode", f"because port {port} cannot be listened on ({error.strerror})")
    found: list[Reachability] = []
    try:
        for addresses in _by_family(initial_peers):
            by_router = ask_router and not addresses[0].startswith(_IPV6) and any(map(is_public, addresses))
            found.append(await _measure_by(addresses, CallMe(port, nonce), identity_path, by_router))
            if found[-1].mode == "server-mode":
                return found[-1]
    finally:
        listener.close()
    return next((answer for answer in found if answer.host is not None), found[0])


def _by_family(addresses: Sequence[str]) -> list[list[str]]:
    """The addresses in lists by family: IPv4 first, for which a router can open a port, then IPv6."""
    ipv6 = [address for address in addresses if address.startswith(_IPV6)]
    return [family for family in ([address for address in addresses if address not in ipv6], ipv6) if family]


async def _measure_by(
    initial_peers: Sequence[str], question: CallMe, identity_path: Path | None, by_router: bool
) -> Reachability:
    opening = asyncio.create_task(_open_port(question.port)) if by_router else None  # while p2pd starts
    found = None
    try:
        found = await _ask_all(initial_peers, question, identity_path, opening)
    except P2PDaemonError as error:
        logger.debug(f"reachability was not measured: {error}")
        found = Reachability("client-mode", "because no peer could be asked to call this machine")
    finally:
        if opening is not None and (found is None or found.mode != "server-mode"):
            opened, _ = await opening
            if opened is not None:
                await opened.close_all()
    return found


async def _open_port(port: int) -> tuple[OpenPorts | None, str]:
    """The ports that the router has opened, and a sentence if it refused; None and no sentence if there is none."""
    try:
        return await open_port(port), ""
    except RouterRefuses as why:
        return None, f"Your router was asked to open a port, but {why}."


async def _ask_all(
    initial_peers: Sequence[str],
    question: CallMe,
    identity_path: Path | None,
    opening: Awaitable[tuple[OpenPorts | None, str]] | None,
) -> Reachability:
    p2p = await P2P.create(
        initial_peers, dht_mode="client", no_listen=True, host_maddrs=None, startup_timeout=60, auto_nat=False
    )
    try:
        await _check_identity(p2p, identity_path)
        opened, router = (None, "") if opening is None else await opening
        if opened is not None:
            question = replace(question, port=opened.ports[question.port])
        peer_ids = dict.fromkeys(PeerID.from_base58(peer_of_address(address)) for address in initial_peers)
        answers = await asyncio.gather(*(_ask(p2p, peer_id, question) for peer_id in [*peer_ids][:MAX_ASKED]))
    finally:
        await p2p.shutdown()
    found = conclusion([answer for answer in answers if answer is not None and answer.host], question.port)
    if opened is not None:
        helped = found.mode == "server-mode"
        ended = "for this peer until it ends" if helped else "but that did not help: it is closed again"
        router = f"Your router opened port {question.port} {ended}."
    return replace(found, router=router, opened=opened if found.mode == "server-mode" else None)


async def _check_identity(p2p: P2P, identity_path: Path | None) -> None:
    """Check that no running peer uses this identity. Hivemind's own check would start another p2pd for it.

    Raises:
        InputError: a running peer uses it
    """
    if identity_path is None or not identity_path.exists():
        return
    try:
        await connect(p2p, peer_with(read_key(identity_path)))
    except P2PDaemonError:
        return
    raise InputError(identity_in_use(identity_path))


async def _ask(p2p: P2P, peer_id: PeerID, question: CallMe) -> Called | None:
    stub = ReachabilityService.get_stub(p2p, peer_id)
    try:
        return await stub.rpc_call_back(question, timeout=ANSWER_SECONDS)
    except (TimeoutError, P2PDaemonError, P2PHandlerError, ValueError, OSError) as error:
        logger.debug(f"{peer_id} did not say whether this machine can be called: {error!r}")
        return None


def conclusion(answers: list[Called], port: int) -> Reachability:
    """What follows from the answers of the asked peers.

    Args:
        answers: those that name an address of this machine
        port: the port that was called
    """
    if not answers:
        return Reachability("client-mode", "because no peer answered whether it can call this machine")
    hosts = [answer.host for answer in answers if answer.reached] or [answer.host for answer in answers]
    # A peer in the same home calls this machine at a local address, where peers outside cannot: prefer a public one.
    hosts = [host for host in hosts if ipaddress.ip_address(host).is_global] or hosts
    host, times = Counter(hosts).most_common(1)[0]
    reached = sum(answer.reached for answer in answers)
    asked = f"{len(answers)} peer{'s' * (len(answers) != 1)}"
    if 2 * times <= len(hosts) and not {*hosts} <= {*own_addresses()}:  # one lies, and other peers would call in vain
        return Reachability("client-mode", f"because {asked} see this machine at different addresses")
    mode = "server-mode" if reached == len(answers) else "client-mode"
    count = asked if mode == "server-mode" else f"{reached} of {asked}"
    return Reachability(mode, f"because {count} could call this machine at {host} port {port}", host)
