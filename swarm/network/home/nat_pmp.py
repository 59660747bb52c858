"""NAT-PMP (RFC 6886): a question and an answer of a dozen bytes each. Routers that speak PCP mostly know it, too."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct

from hivemind.utils import get_logger

from swarm.network.home.router import RouterRefuses

logger = get_logger(__name__)

PORT = 5351
_EXTERNAL_ADDRESS, _MAP_TCP, _ANSWER = 0, 2, 128
_WAIT_SECONDS = (0.25, 0.5)
"""How long to wait for an answer, and again after the question is repeated: the first two times of section 3.1."""
_REASONS = {2: "its owner has switched that off", 3: "it has no connection", 4: "it has no port left"}
"""Reasons by result code (section 3.5)."""


class NatPmpRouter:
    """A router that speaks NAT-PMP.

    Args:
        gateway: its IPv4 address in the local network
        external_host: IPv4 address that it says it has on the internet
        udp_port: port on which it listens
    """

    def __init__(self, gateway: str, external_host: str, udp_port: int = PORT):
        self.external_host = external_host
        self._gateway, self._udp_port = gateway, udp_port

    @classmethod
    async def find(cls, gateway: str, _own_host: str, udp_port: int = PORT) -> NatPmpRouter | None:
        """The gateway, if it speaks NAT-PMP and is connected to the internet. Never raises."""
        router = cls(gateway, "", udp_port)
        try:
            answer = await router._ask(_EXTERNAL_ADDRESS, b"", 4)
        except RouterRefuses as why:
            logger.debug(f"no NAT-PMP at {gateway}: {why}")
            return None
        return cls(gateway, str(ipaddress.IPv4Address(answer)), udp_port)

    async def open(self, port: int, external_port: int, lease_seconds: int) -> tuple[int, int]:
        """As `Router.open`; the router may choose another port than the wanted one."""
        return lease_in(await self._map(port, external_port, lease_seconds), port)

    async def close(self, port: int, external_port: int) -> None:
        """As `Router.close`."""
        await self._map(port, 0, 0)  # section 3.4: zeros mean to remove it

    async def _map(self, port: int, external_port: int, lease_seconds: int) -> bytes:
        return await self._ask(_MAP_TCP, struct.pack("!HHHI", 0, port, external_port, lease_seconds), 8)

    async def _ask(self, operation: int, arguments: bytes, num_bytes: int) -> bytes:
        """Ask the router; return what follows the head of its answer, `num_bytes` long.

        Raises:
            RouterRefuses: it says no, or does not answer
        """
        question = struct.pack("!BB", 0, operation) + arguments
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            try:
                line.connect((self._gateway, self._udp_port))  # only datagrams of the gateway arrive
                for seconds in _WAIT_SECONDS:
                    await asyncio.get_running_loop().sock_sendall(line, question)
                    try:
                        async with asyncio.timeout(seconds):
                            return await _answer(line, operation, num_bytes)
                    except TimeoutError:
                        continue
            except OSError as error:
                raise RouterRefuses(error.strerror or str(error)) from None
        raise RouterRefuses("it does not answer")


async def _answer(line: socket.socket, operation: int, num_bytes: int) -> bytes:
    """Wait for the answer to this operation; other datagrams are ignored.

    Raises:
        RouterRefuses: the router says no
    """
    while True:
        data = await asyncio.get_running_loop().sock_recv(line, 64)
        if (answer := answer_in(data, operation, num_bytes)) is not None:
            return answer


def answer_in(data: bytes, operation: int, num_bytes: int) -> bytes | None:
    """What follows the head of a datagram, `num_bytes` long; None if it is not an answer to this operation.

    Raises:
        RouterRefuses: the router says no
    """
    if len(data) < 4 or data[0] != 0 or data[1] != _ANSWER + operation:
        return None
    if result := int.from_bytes(data[2:4]):
        raise RouterRefuses(_REASONS.get(result, f"it says error {result}"))
    return data[8:] if len(data) == 8 + num_bytes else None  # bytes 4 to 7: the time since the router's start


def lease_in(answer: bytes, port: int) -> tuple[int, int]:
    """The router's port and the seconds of the lease.

    Args:
        answer: 8 bytes
        port: port of this machine that was asked for

    Raises:
        RouterRefuses: the answer makes no sense
    """
    inside, outside, seconds = struct.unpack("!HHI", answer)
    if inside != port or not outside or not seconds:
        raise RouterRefuses("its answer makes no sense")
    return outside, seconds
