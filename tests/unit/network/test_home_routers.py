"""Routers that open ports, and those that answer badly: real servers on loopback, which speak UPnP and NAT-PMP."""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest

from swarm.network.dht_options import NetworkOptions
from swarm.network.home import open_ports
from swarm.network.home.nat_pmp import NatPmpRouter
from swarm.network.home.open_ports import LEASE_SECONDS, OpenPorts
from swarm.network.home.router import PortTaken, RouterRefuses
from swarm.network.home.search import default_gateway
from swarm.network.home.upnp import ANSWER_SECONDS, SEARCH_SECONDS, UpnpRouter
from swarm.network.reachability import Reachability
from swarm.peer import role
from tests.helpers.strangers.home_routers import DEVICE, OUTSIDE, Gateway
from tests.helpers.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.timeout(30)
HOST, PORT = "127.0.0.1", 31337


@contextlib.asynccontextmanager
async def answering(answer: Callable[[bytes], list[bytes]]) -> AsyncIterator[int]:
    """A UDP port where each datagram is answered."""

    class Answering(asyncio.DatagramProtocol):
        def connection_made(self, transport):
            self.transport = transport

        def datagram_received(self, data, sender):
            for one in answer(data):
                self.transport.sendto(one, sender)

    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Answering, local_addr=(HOST, 0))
    try:
        yield transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


@contextlib.asynccontextmanager
async def speaking_http(respond: Callable[[str, str, asyncio.StreamWriter], object]) -> AsyncIterator[int]:
    """A TCP port where `respond(path, request, writer)` answers each request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b""
            await respond(head.split()[1], head + body.decode(), writer)
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextlib.asynccontextmanager
async def upnp_at(respond, *locations: str) -> AsyncIterator[tuple[str, int]]:
    """Run a router whose description is at these URLs. Yields the address to which a search for it has to be sent."""
    async with speaking_http(respond) as http_port:
        urls = locations or (f"http://{HOST}:{http_port}/root.xml",)
        answers = [
            b"nonsense",
            b"\xff\n\xff",
            *(f"HTTP/1.1 200 OK\r\nLOCATION: {url}\r\n\r\n".encode() for url in urls),
        ]
        async with answering(lambda _: answers) as udp_port:
            yield HOST, udp_port


def responding(gateway: Gateway):
    async def respond(path: str, request: str, writer: asyncio.StreamWriter) -> None:
        status, body = gateway.answer(path, request)
        writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()

    return respond


async def upnp_router(target: tuple[str, int]) -> UpnpRouter | None:
    return await UpnpRouter.find(HOST, HOST, target)


# ---- routers that do what they should --------------------------------------------------------------------------------


def test_a_router_opens_and_closes_a_port():
    async def use(gateway: Gateway) -> dict:
        async with upnp_at(responding(gateway)) as target:
            router = await upnp_router(target)
            assert router.external_host == OUTSIDE
            opened = OpenPorts(router)
            assert await opened.open(PORT) == PORT
            while_open = dict(gateway.opened)
            await opened.close_all()
            return while_open

    gateway = Gateway()
    assert asyncio.run(use(gateway)) == {PORT: (HOST, PORT, LEASE_SECONDS)}
    assert gateway.opened == {}


def test_where_the_port_is_taken_another_one_is_opened_unless_it_has_to_be_that_one():
    async def use(gateway: Gateway) -> int:
        async with upnp_at(responding(gateway)) as target:
            opened = OpenPorts(await upnp_router(target))
            with pytest.raises(RouterRefuses, match="port 31337 is taken there"):
                await opened.open(PORT, may_differ=False)
            with pytest.raises(PortTaken):
                await (await upnp_router(target)).open(PORT, PORT, 60)
            return await opened.open(PORT)

    gateway = Gateway(taken=(PORT,))
    outside = asyncio.run(use(gateway))
    assert outside != PORT
    assert gateway.opened == {outside: (HOST, PORT, LEASE_SECONDS)}


def test_a_router_that_knows_no_leases_is_not_used():
    async def use(gateway: Gateway) -> None:
        async with upnp_at(responding(gateway)) as target:
            with pytest.raises(RouterRefuses, match="opens ports for good only"):
                await OpenPorts(await upnp_router(target)).open(PORT)

    gateway = Gateway(only_for_good=True)
    asyncio.run(use(gateway))
    assert gateway.opened == {}


def test_a_lease_is_renewed_as_long_as_the_peer_runs():
    asked, enough = [], asyncio.Event()

    def answer(question: bytes) -> list[bytes]:
        asked.append(struct.unpack("!HHHHI", question)[2:])
        if len(asked) == 3:
            enough.set()
        return [nat_pmp(2, struct.pack("!HHI", PORT, 40000, 1))]

    async def use() -> None:
        async with answering(answer) as udp_port:
            opened = OpenPorts(NatPmpRouter(HOST, OUTSIDE, udp_port), shortest_pause_seconds=0.01)
            assert await opened.open(PORT) == 40000
            opened.keep()
            await enough.wait()
            await asyncio.to_thread(opened.close)

    asyncio.run(use())
    again, last = (PORT, 40000, LEASE_SECONDS), (PORT, 0, 0)
    assert asked[0] == (PORT, PORT, LEASE_SECONDS)
    assert set(asked[1:-1]) == {again}
    assert asked[-1] == last


class Obeys:
    """A router that opens what it is asked for."""

    external_host = OUTSIDE

    def __init__(self):
        self.renewed, self._times_asked = threading.Event(), 0

    async def open(self, port: int, external_port: int, lease_seconds: int) -> tuple[int, int]:
        self._times_asked += 1
        if self._times_asked > 1:
            self.renewed.set()
        return external_port, lease_seconds

    async def close(self, port: int, external_port: int) -> None:
        pass


def test_a_lease_is_renewed_after_the_machine_has_slept(monkeypatch):
    """A wait does not count the time of the sleep, and the router has closed the port meanwhile."""
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(open_ports, "seconds_since_boot", lambda: clock.seconds)
    monkeypatch.setattr(open_ports, "LOOK_SECONDS", 0.01)
    router = Obeys()
    opened = OpenPorts(router)
    asyncio.run(opened.open(PORT))
    opened.keep()
    assert not router.renewed.wait(0.2)
    clock.seconds += 2 * LEASE_SECONDS
    assert router.renewed.wait(20)
    opened.close()


def test_a_port_leads_to_the_address_that_this_machine_has_now(monkeypatch):
    async def use(gateway: Gateway) -> None:
        async with upnp_at(responding(gateway)) as target:
            opened = OpenPorts(await upnp_router(target))
            await opened.open(PORT)
            monkeypatch.setattr("swarm.network.home.upnp.own_host_towards", lambda gateway: "127.0.0.2")
            await opened.open(PORT)

    gateway = Gateway()
    asyncio.run(use(gateway))
    assert gateway.opened[PORT][0] == "127.0.0.2"


def test_a_peer_that_was_called_only_within_its_home_is_found_where_its_router_says(monkeypatch):
    opened = OpenPorts(SimpleNamespace(external_host="8.8.8.8"))
    found = Reachability(
        "server-mode", "because 1 peer could call this machine", "127.0.0.1", "Your router opened it.", opened
    )
    monkeypatch.setattr(role, "measure_reachability", lambda *_: found)
    asked = NetworkOptions(("/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",))
    said, network = role.measured(asked, ask_router=True)
    assert network.public_ip == "8.8.8.8"
    assert "at 8.8.8.8 was not measured" in said.router


def test_the_loss_of_one_port_is_said_once_even_beside_one_that_stays_open(monkeypatch):
    said, renewals, enough = [], [], threading.Event()

    class LosesOne:
        external_host = OUTSIDE

        async def open(self, port: int, external_port: int, lease_seconds: int) -> tuple[int, int]:
            renewals.append(port)
            if len(renewals) > 2 and port == PORT:
                raise RouterRefuses("it has no port left")
            if len(renewals) > 10:
                enough.set()
            return external_port, 1

        async def close(self, port: int, external_port: int) -> None:
            pass

    async def use() -> OpenPorts:
        opened = OpenPorts(LosesOne(), shortest_pause_seconds=0.01)
        await opened.open(PORT)
        await opened.open(PORT + 1)
        return opened

    monkeypatch.setattr(open_ports.logger, "warning", said.append)
    opened = asyncio.run(use())
    opened.keep()
    assert enough.wait(20)
    opened.close()
    assert said == [f"The router no longer opens port {PORT} for this peer (it has no port left)."]


def test_no_port_is_opened_again_once_closing_has_begun(monkeypatch):
    """The router does not answer the first renewal, and the second one would come after the end."""
    monkeypatch.setattr(open_ports, "CALL_SECONDS", 0.2)
    opened_at, renewals, renewing = [], [], threading.Event()

    class HangsAtRenewals(Obeys):
        async def open(self, port: int, external_port: int, lease_seconds: int) -> tuple[int, int]:
            if len(opened_at) < 2:
                opened_at.append(port)
                return external_port, 1
            renewals.append(port)
            renewing.set()
            return await asyncio.get_running_loop().create_future()

    opened = OpenPorts(HangsAtRenewals(), shortest_pause_seconds=0.01)
    for port in (PORT, PORT + 1):
        asyncio.run(opened.open(port))
    opened.keep()
    assert renewing.wait(20)
    opened.close()
    for keeper in [thread for thread in threading.enumerate() if thread.name == "open-ports"]:
        keeper.join(20)
    assert renewals == [PORT]


def test_ports_are_closed_where_an_event_loop_runs():
    """As in a notebook."""
    closed = []

    class Notes(Obeys):
        async def close(self, port: int, external_port: int) -> None:
            closed.append(port)

    async def use() -> None:
        opened = OpenPorts(Notes())
        await opened.open(PORT)
        opened.close()

    asyncio.run(use())
    assert closed == [PORT]


# ---- UPnP: answers that make no sense --------------------------------------------------------------------------------


MEBIBYTES = 64
HEARD_OUT: list[str] = []
"""Answers that were read to their ends."""


async def huge(_path, _request, writer):
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(MEBIBYTES):
        writer.write(bytes(2**20))
        await writer.drain()
    HEARD_OUT.append("huge")


async def slow(_path, _request, writer):
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"<")
        await writer.drain()
        await asyncio.sleep(0.1)


def saying(body: bytes, status: str = "200 OK", header: str = "X: y"):
    async def respond(_path, _request, writer):
        writer.write(f"HTTP/1.1 {status}\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    return respond


BILLION_LAUGHS = b"""<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]><a>&b;</a>"""


@pytest.mark.parametrize(
    "respond",
    [
        pytest.param(huge, id="huge"),
        pytest.param(slow, id="slow"),
        pytest.param(saying(b""), id="empty"),
        pytest.param(saying(b"<root><device>"), id="malformed"),
        pytest.param(saying(b"\xff\xfe\x00"), id="no text"),
        pytest.param(saying(b"<root/>"), id="no device"),
        pytest.param(saying(BILLION_LAUGHS), id="entities"),
        pytest.param(saying(b"", "500 Oops"), id="error"),
        pytest.param(saying(b"", "302 Found", "Location: http://192.0.2.1/"), id="sends elsewhere"),
        pytest.param(saying(b"\x1f\x8b" + bytes(100), header="Content-Encoding: gzip"), id="compressed"),
        pytest.param(saying(DEVICE.replace("/scpd.xml", "http://192.0.2.1/scpd.xml").encode()), id="foreign service"),
        pytest.param(saying(DEVICE.encode()), id="a service like a device"),
        pytest.param(responding(Gateway("")), id="not connected"),
        pytest.param(responding(Gateway("2001:db8::1")), id="no IPv4 address"),
        pytest.param(responding(Gateway("<b>" * 1000)), id="nonsense for an address"),
    ],
)
def test_a_description_that_makes_no_sense_is_no_router(respond, monkeypatch):
    async def search() -> None:
        async with upnp_at(respond) as target:
            began = time.monotonic()
            assert await upnp_router(target) is None
            assert time.monotonic() - began < ANSWER_SECONDS + SEARCH_SECONDS

    run_in_virtual_time(search, monkeypatch)
    assert not HEARD_OUT


def test_a_description_elsewhere_is_not_asked_for():
    elsewhere = [
        "http://192.0.2.1:80/",
        "file:///etc/passwd",
        "https://127.0.0.1/",
        "",
        "http://[",
        f"http://{HOST}:99999/",
    ]
    asked = []

    async def respond(path, _request, _writer):
        asked.append(path)

    async def search() -> UpnpRouter | None:
        async with upnp_at(respond, *elsewhere) as target:
            return await upnp_router(target)

    assert asyncio.run(search()) is None
    assert asked == []


def test_a_router_that_falls_silent_is_not_waited_for():
    async def use(gateway: Gateway) -> None:
        async with upnp_at(responding(gateway)) as target:
            router = await upnp_router(target)
        with pytest.raises(RouterRefuses):
            await OpenPorts(router).open(PORT)

    asyncio.run(use(Gateway()))


# ---- NAT-PMP ---------------------------------------------------------------------------------------------------------


def nat_pmp(operation: int, rest: bytes, result: int = 0, version: int = 0) -> bytes:
    return struct.pack("!BBHI", version, 128 + operation, result, 7) + rest


NONSENSE = [
    nat_pmp(2, bytes(7)),
    nat_pmp(1, struct.pack("!HHI", PORT, PORT, 120)),
    nat_pmp(2, bytes(8), version=2),
    bytes(1000),
    b"",
]
ADDRESS = nat_pmp(0, bytes([203, 0, 113, 5]))


@pytest.mark.parametrize(
    ("mapping", "outcome"),
    [
        (nat_pmp(2, struct.pack("!HHI", PORT, 40000, 120)), (40000, 120)),
        (nat_pmp(2, struct.pack("!HHI", PORT + 1, PORT, 120)), "its answer makes no sense"),
        (nat_pmp(2, struct.pack("!HHI", PORT, 0, 0)), "its answer makes no sense"),
        (nat_pmp(2, bytes(8), result=2), "its owner has switched that off"),
        (nat_pmp(2, bytes(8), result=99), "it says error 99"),
    ],
)
def test_answers_to_nat_pmp(mapping, outcome):
    async def use():
        async with answering(lambda question: [ADDRESS] if question == b"\0\0" else [*NONSENSE, mapping]) as udp_port:
            router = await NatPmpRouter.find(HOST, HOST, udp_port)
            assert router.external_host == OUTSIDE
            return await router.open(PORT, PORT, LEASE_SECONDS)

    if isinstance(outcome, tuple):
        assert asyncio.run(use()) == outcome
    else:
        with pytest.raises(RouterRefuses, match=outcome):
            asyncio.run(use())


def test_no_router_is_found_where_none_speaks_nat_pmp():
    async def search(answer) -> NatPmpRouter | None:
        async with answering(answer) as udp_port:
            return await NatPmpRouter.find(HOST, HOST, udp_port)

    assert asyncio.run(search(lambda _: [])) is None
    assert asyncio.run(search(lambda _: [ADDRESS[:-1], *NONSENSE])) is None
    assert asyncio.run(NatPmpRouter.find(HOST, HOST, 9)) is None, "the port is closed"


# ---- the way out -----------------------------------------------------------------------------------------------------


def test_the_gateway_is_that_of_the_best_route(tmp_path):
    routes = tmp_path / "route"
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    local = "eth0 0000A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n"
    slow, fast = (
        f"{card} 00000000 {gateway} 0003 0 0 {metric} 00000000 0 0 0\n"
        for card, gateway, metric in [("wlan0", "0101A8C0", 600), ("eth0", "0100A8C0", 100)]
    )
    routes.write_text(head + local + slow + fast)
    assert default_gateway(routes) == "192.168.0.1"
    routes.write_text(head + local)
    assert default_gateway(routes) is None
    assert default_gateway(tmp_path / "none") is None
