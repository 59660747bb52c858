"""Reads, checks and prints libp2p multiaddresses: where peers can be called.

Nothing here needs hivemind, so a wrong `--initial-peers` is refused before the slow imports.
"""

import errno
import ipaddress
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from recipe.errors import InputError

EXAMPLE = "/ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

VARIABLE = "INITIAL_PEERS"
"""Environment variable with the addresses of peers, for commands without `--initial-peers`."""

_FAMILIES = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6, "dns": 0, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_LABEL = r"(?!-)(?!..--)[A-Za-z0-9-]{1,63}(?<!-)"
"""A label of a host name. Labels of other alphabets (xn--…) are excluded: Hivemind cannot read them back."""
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d+")


@dataclass(frozen=True)
class Endpoint:
    """The part of a multiaddress that a socket understands."""

    family: str
    """ip4, ip6, dns, dns4 or dns6."""
    host: str
    transport: str
    """tcp or udp."""
    port: int


def parse_initial_peers(values: Sequence[str] | None, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The known addresses of a swarm, from `--initial-peers` or else from the variable INITIAL_PEERS.

    Both may separate addresses by spaces or commas. Duplicates are dropped, the order stays, `/ipfs/` becomes `/p2p/`.
    The list is empty if neither of the two is given: the person asks for a new swarm. An option or variable that is
    given and empty is an error. Mostly it comes from a script's variable that was never set, and the person wants to
    join.

    Args:
        values: values of `--initial-peers`; None where it was not given
        environment: where to look for the variable

    Raises:
        InputError: an address is malformed, or the option or the variable is given without any.
    """
    text = environment.get(VARIABLE) if values is None else " ".join(values)
    if text is None:
        return []
    words = [word.strip("'\"[]") for word in re.split(r"[\s,]+", text)]
    peers = list(dict.fromkeys(word.replace("/ipfs/", "/p2p/") for word in words if word))
    if not peers:
        raise InputError(
            f"{VARIABLE if values is None else 'The address'} is empty: give the address of a running peer, or a join "
            "line. `swarm start` begins a new swarm."
        )
    for peer in peers:
        try:
            _parse(peer, own=False)
        except ValueError as error:
            source = f"{VARIABLE}: " if values is None else ""
            raise InputError(f"{source}`{peer}` cannot be used, {error}; an address looks like {EXAMPLE}.") from None
    return peers


def environment_without_peers() -> dict[str, str]:
    """A copy of the environment for peers that this program starts, so that they join no other swarm."""
    return {name: value for name, value in os.environ.items() if name != VARIABLE}


def parse_own_address(value: str, option: str) -> Endpoint:
    """Read an address that this peer listens on or announces. It needs no `/p2p/…`, and port 0 means any.

    Args:
        value: the multiaddress
        option: the option that it was given with

    Raises:
        InputError: it is malformed; the sentence names `option`.
    """
    try:
        return _parse(value.rstrip("/"), own=True)
    except ValueError as error:
        raise InputError(
            f"{option}: `{value}` cannot be used, {error}; write it like /ip4/0.0.0.0/tcp/31337."
        ) from None


def reachable(address: str, timeout_seconds: float, is_greeted: bool = False) -> str | None:
    """Why a TCP address does not answer, or None if it does. For UDP it is None as well, since UDP tells nothing.

    Args:
        address: multiaddress of a peer
        timeout_seconds: time limit
        is_greeted: whether the other side has to send something first, as a peer does. The system of a frozen peer
            still takes connections
    """
    endpoint = _parse(address, own=False)
    return None if endpoint.transport == "udp" else _trouble(endpoint, timeout_seconds, is_greeted)


def connects(host: str, port: int, timeout_seconds: float) -> str | None:
    """Why a TCP port of a host does not answer, or None if it does."""
    return _trouble(Endpoint("dns", host, "tcp", port), timeout_seconds)


def _trouble(endpoint: Endpoint, timeout_seconds: float, is_greeted: bool = False) -> str | None:
    try:
        _connect(endpoint, timeout_seconds, is_greeted)
    except socket.gaierror:
        return "name not found"
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


class NobodyAnswers(InputError):  # noqa: N818
    """No peer answers at the given addresses. That may pass: the peers may be starting, too."""


class OthersAnswer(InputError):  # noqa: N818
    """Something listens at the addresses, but not the expected peers."""


def check_reachable(addresses: Sequence[str], timeout_seconds: float = 5, is_greeted: bool = False) -> list[str]:
    """The addresses behind which something listens, all tried in parallel, in the given order.

    Args:
        addresses: multiaddresses of peers
        timeout_seconds: time limit, for all together
        is_greeted: as in `reachable`

    Raises:
        NobodyAnswers: there is none.
    """
    answers: queue.Queue[tuple[str, str | None]] = queue.Queue()
    for address in addresses:
        # Looking up a name has no timeout. A daemon thread can be left behind.
        probe = threading.Thread(
            target=lambda a=address: answers.put((a, reachable(a, timeout_seconds, is_greeted))),
            name="reachable",
            daemon=True,
        )
        probe.start()
    reasons: dict[str, str | None] = dict.fromkeys(addresses, "timed out")
    deadline = time.monotonic() + timeout_seconds + 0.5
    for _ in reasons:
        try:
            address, reason = answers.get(timeout=max(0, deadline - time.monotonic()))
        except queue.Empty:
            break
        reasons[address] = reason
    alive = [address for address in addresses if reasons[address] is None]
    if addresses and not alive:
        found = ", ".join(f"{_short(address)} ({reason})" for address, reason in reasons.items())
        raise NobodyAnswers(
            f"None of these peers can be reached: {found}; check that the peer still runs, that you took the "
            "address for your kind of network (same machine, local network, internet), and that its port is open."
        )
    return alive


def classify(address: str) -> Literal["loopback", "private", "public"]:
    """From where an address can be reached. Link-local, carrier-grade NAT and documentation ranges are private.

    Raises:
        ValueError: it cannot be read
    """
    _, family, host, *_ = address.split("/")
    if family.startswith("dns"):
        if host.rstrip(".") == "localhost":
            return "loopback"
        return "private" if "." not in host or host.endswith((".local", ".lan", ".internal")) else "public"
    ip = ipaddress.ip_address(host)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_loopback:
        return "loopback"
    return "public" if ip.is_global else "private"


def farthest_first(addresses: Iterable[str]) -> list[str]:
    """The addresses in this order: public, then of the local network, then of this machine. Else the order stays.

    Lists of addresses are cut, and a machine with containers or a VPN has many that no other machine can call.
    """
    return sorted(addresses, key=lambda address: ("public", "private", "loopback").index(classify(address)))


def host_and_port(host: str, port: int) -> str:
    """HOST:PORT, as people and URLs write it: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def household(host: str) -> str:
    """The name under which the addresses of one customer share a limit.

    That is an IPv4 address itself, and for IPv6 the network of 64 bits: one customer has all its addresses.

    Args:
        host: an IP address; any other text is returned as it is
    """
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


def is_loopback(address: str) -> bool:
    """Whether only this machine can call there. False for an address that cannot be read; it is refused elsewhere."""
    return _is(address, "loopback")


def is_public(address: str) -> bool:
    """Whether the address is public. False for an address that cannot be read; it is refused elsewhere."""
    return _is(address, "public")


def _is(address: str, kind: str) -> bool:
    try:
        return classify(address) == kind
    except ValueError:
        return False


def join_commands(visible: Sequence[str], program: str = "swarm join", public_ip: str | None = None) -> str:
    """Commands to paste on other machines, one for each kind of network.

    Args:
        visible: multiaddresses at which this peer can be reached
        program: start of each command
        public_ip: address that counts as public because the person says so, whatever its range
    """
    groups: dict[str, list[str]] = {"loopback": [], "private": [], "public": []}
    for address in visible:
        groups["public" if address.split("/")[2] == public_ip else classify(address)].append(address)
    titles = {"loopback": "on this machine", "private": "on the local network", "public": "over the internet"}
    lines = []
    for kind, members in groups.items():
        if members:
            lines += [f"# {titles[kind]}", f"{program} {' '.join(members)}"]
    return "\n".join(lines)


def closed_ports(visible: Sequence[str], public_ip: str | None = None, enrolment_port: int = 0) -> str:
    """What to do if no peer on the internet can call this one; empty if peers can.

    Args:
        visible: multiaddresses at which this peer can be reached
        public_ip: this machine's public address, as the person says
        enrolment_port: a further port that has to be open; 0 for none
    """
    public = [address for address in visible if address.split("/")[2] == public_ip or classify(address) == "public"]
    if not visible or any(not address.startswith("/ip6/") or public_ip in address.split("/") for address in public):
        return ""
    endpoint = _parse(visible[0], own=True)
    ports = f"{endpoint.transport.upper()} port {endpoint.port}"
    also, option = "", ""
    if enrolment_port:
        also, option = f" and TCP port {enrolment_port}", f" --enrolment-port {enrolment_port}"
    who = "No peer on the internet can join"
    if public:
        who = "Only peers with IPv6 can join, if your router lets them in (not measured)"
    return (
        f"{who}: forward {ports}{also} of your router to this machine and start your peer with "
        f"--public-ip YOUR.PUBLIC.IP --port {endpoint.port}{option}."
    )


def check_port_free(port: int, host: str = "0.0.0.0") -> None:
    """Check that this machine can listen on a TCP port; port 0 means any.

    Two p2pd processes share a port without an error (SO_REUSEPORT) and then lose each other's connections.

    Raises:
        InputError: the port is taken, needs more rights, or does not exist; or `host` is not this machine's.
    """
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port} does not exist: take one from 1024 to 65535, or 0 for any free one.")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed peer's TIME_WAIT is no obstacle
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(_bind_sentence(error, host, port)) from None


def _bind_sentence(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is in use on this machine: choose another --port, 0 for any, or stop what listens there."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Port {port} needs administrator rights: choose a --port from 1024 to 65535."
    return f"This machine cannot listen on {host} ({error.strerror}): use one of its own addresses, or 0.0.0.0."


def _parse(address: str, own: bool) -> Endpoint:
    """Read one multiaddress.

    Args:
        address: the multiaddress
        own: whether it is one that this peer listens on or announces: it needs no peer id, may have port 0, and may be
            an unspecified address such as 0.0.0.0

    Raises:
        ValueError: with the reason, as the end of a sentence.
    """
    _refuse_foreign_notation(address)
    parts = address[1:].split("/")
    family, host, transport, port = (parts + [""] * 4)[:4]
    rest = parts[4:]
    if family not in _FAMILIES:
        raise ValueError(f"/{family} is not one of /ip4, /ip6, /dns, /dns4 and /dns6")
    _check_host(family, host, own)
    if transport not in ("tcp", "udp"):
        raise ValueError(f"/tcp/PORT is missing after the host {host}")
    if not re.fullmatch(r"[0-9]{1,6}", port) or not (0 if own else 1) <= int(port) <= 65535:
        raise ValueError(f"the port {port or '(none)'} is not a number from 1 to 65535")
    if transport == "udp":
        if rest[:1] == ["quic"]:
            raise ValueError("/quic is outdated, write /quic-v1")
        if rest[:1] != ["quic-v1"]:
            raise ValueError("/quic-v1 has to follow the UDP port")
        rest = rest[1:]
    _check_peer(rest, own)
    return Endpoint(family, host, transport, int(port))


def _refuse_foreign_notation(address: str) -> None:
    if "://" in address:
        raise ValueError("it is a web address")
    if address.startswith("-"):
        raise ValueError("it is an option")
    if _HOST_AND_PORT.fullmatch(address):
        raise ValueError("it is host:port, which lacks the peer id: paste the whole line the peer printed")
    if _is_peer_id(address):
        raise ValueError("it is a peer id without the host and the port before it")
    if not address.startswith("/"):
        raise ValueError("it does not start with /ip4, /ip6 or /dns")


def _check_host(family: str, host: str, own: bool) -> None:
    if family.startswith("dns"):
        if not _HOST_NAME.fullmatch(host):
            raise ValueError(f"`{host}` is not a host name that a peer can call (take its IP address)")
        return
    version = ipaddress.IPv4Address if family == "ip4" else ipaddress.IPv6Address
    try:
        ip = version(host.replace("%", "/"))  # multiaddresses know no %zone
    except ValueError:
        raise ValueError(f"`{host}` is not an IPv{family[-1]} address") from None
    if ip.is_unspecified and not own:
        raise ValueError(f"{host} only says where a peer listens, take an address it is reached at")


def _check_peer(parts: list[str], own: bool) -> None:
    """Accept `p2p/ID` and `p2p/RELAY/p2p-circuit/p2p/ID`; an own address may have neither.

    Raises:
        ValueError: with the reason, as the end of a sentence.
    """
    if own and not parts:
        return
    if parts[:1] not in (["p2p"], ["ipfs"]):
        raise ValueError(f"/{parts[0]} is not understood" if parts else "/p2p/PEER_ID is missing at its end")
    if len(parts) < 2 or not _is_peer_id(parts[1]):
        raise ValueError(f"`{''.join(parts[1:2])}` is not a whole peer id")
    circuit = parts[2:]
    if circuit and circuit[0] != "p2p-circuit":
        raise ValueError(f"/{circuit[0]} is not understood after the peer id")
    if circuit:
        _check_peer(circuit[1:], own)


def _is_peer_id(text: str) -> bool:
    """Whether this is a base58 multihash: sha2-256 of an RSA key (`Qm…`), or a short key (`12D3KooW…`, `16Uiu2H…`)."""
    if not 40 <= len(text) <= 60 or any(letter not in _BASE58 for letter in text):
        return False
    number = 0
    for letter in text:
        number = number * 58 + _BASE58.index(letter)
    zeros = len(text) - len(text.lstrip("1"))  # each leading 1 is a zero byte
    body = bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
    if zeros:  # the "identity" hash: length, then a protobuf of the key
        return body[2:3] == b"\x08" and len(body) == 2 + body[1]
    return len(body) == 34 and body[:2] == b"\x12\x20"


def _connect(endpoint: Endpoint, timeout_seconds: float, is_greeted: bool) -> None:
    """Open and close a TCP connection to the first address of the host that answers. The timeout is for all of them.

    Raises:
        OSError: none answers
    """
    deadline = time.monotonic() + timeout_seconds
    error: OSError = TimeoutError()
    for family, kind, protocol, _, target in socket.getaddrinfo(
        endpoint.host, endpoint.port, _FAMILIES[endpoint.family], socket.SOCK_STREAM
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                probe.connect(target)
                if is_greeted and not probe.recv(1):
                    raise ConnectionResetError(errno.ECONNRESET, "hung up")
                return
            except OSError as failure:
                error = failure
    raise error


def _short(address: str) -> str:
    """HOST:PORT of a multiaddress."""
    endpoint = _parse(address, own=False)
    return host_and_port(endpoint.host, endpoint.port)
