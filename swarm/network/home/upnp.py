"""UPnP Internet Gateway Devices, by the library async-upnp-client, which may only talk to the gateway here."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from urllib.parse import urlsplit

import aiohttp
from async_upnp_client.client import UpnpRequester, UpnpService
from async_upnp_client.client_factory import UpnpFactory
from async_upnp_client.const import HttpRequest, HttpResponse
from async_upnp_client.exceptions import UpnpActionError, UpnpCommunicationError
from async_upnp_client.ssdp import SSDP_TARGET_V4, build_ssdp_search_packet, decode_ssdp_packet
from hivemind.utils import get_logger

from swarm.network.home.interfaces import own_host_towards
from swarm.network.home.router import PortTaken, RouterRefuses

logger = get_logger(__name__)

SEARCH_SECONDS, REPEAT_SECONDS = 1.2, 0.4
"""Time limit of a search, and the time after which the question is repeated, since datagrams get lost. A router answers
within the one second that the question allows (MX), or not at all."""
ANSWER_SECONDS = 2.0
"""Time limit for each document."""
MAX_ANSWERS, MAX_DATAGRAM_BYTES = 64, 2048
"""Datagrams that are read before the question is repeated, and bytes of each."""
MAX_DOCUMENT_BYTES, MAX_DOCUMENTS = 2**17, 24
"""Bytes of a document, and documents of a description. miniupnpd's description has seven, of 15 kB at most."""
_GATEWAYS = tuple(f"urn:schemas-upnp-org:device:InternetGatewayDevice:{version}" for version in (1, 2))
_CONNECTIONS = ("urn:schemas-upnp-org:service:WANIPConnection:", "urn:schemas-upnp-org:service:WANPPPConnection:")
_PORT_TAKEN, _ONLY_PERMANENT = 718, 725  # WANIPConnection:1, section 2.4.16
DESCRIPTION = "swarm-vit"
"""Name of the port on the router's own page."""


class GatewayRequester(UpnpRequester):
    """Asks one host only, for a few short documents.

    Args:
        host: IPv4 address of the gateway
    """

    def __init__(self, host: str):
        self.host = host
        self.documents_left = MAX_DOCUMENTS
        """Documents that may still be requested."""

    async def async_http_request(self, http_request: HttpRequest) -> HttpResponse:
        """Make one HTTP request.

        Raises:
            UpnpCommunicationError: it goes to another host, is one too many, fails or takes too long, or the answer is
                too long
        """
        self.documents_left -= 1
        if urlsplit(http_request.url).hostname != self.host or self.documents_left < 0:
            raise UpnpCommunicationError(f"{http_request.url} is not asked for")
        body = b""
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS),
                aiohttp.ClientSession(auto_decompress=False) as session,
                session.request(
                    http_request.method,
                    http_request.url,
                    headers=http_request.headers,
                    data=http_request.body,
                    allow_redirects=False,
                ) as response,
            ):
                async for part in response.content.iter_chunked(4096):
                    body += part
                    if len(body) > MAX_DOCUMENT_BYTES:
                        raise UpnpCommunicationError(f"{http_request.url} is too long")
                return HttpResponse(response.status, response.headers, body.decode(errors="replace"))
        except (TimeoutError, aiohttp.ClientError) as error:
            raise UpnpCommunicationError(repr(error)) from None


class UpnpRouter:
    """A router whose connection to the internet can be configured by UPnP.

    Args:
        service: the service that configures that connection
        own_host: this machine's address, as the router sees it
        external_host: IPv4 address that the router says it has on the internet
        requester: what the service sends its requests with
    """

    def __init__(self, service: UpnpService, own_host: str, external_host: str, requester: GatewayRequester):
        self.external_host = external_host
        self._service, self._own_host, self._requester = service, own_host, requester

    @classmethod
    async def find(cls, gateway: str, own_host: str, target: tuple[str, int] = SSDP_TARGET_V4) -> UpnpRouter | None:
        """The gateway, if it is such a router and connected to the internet. Never raises."""
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                location = await _description(gateway, own_host, target)
        except (TimeoutError, OSError):
            return None
        return await cls.at(location, own_host, GatewayRequester(gateway))

    @classmethod
    async def at(cls, location: str, own_host: str, requester: GatewayRequester) -> UpnpRouter | None:
        """The router that a description is of, if it is connected to the internet; else None. Never raises.

        Args:
            location: URL of the description
            own_host: this machine's address, as the router sees it
            requester: what requests are sent with
        """
        try:
            device = await UpnpFactory(requester, non_strict=True).async_create_device(location)
            services = [one for one in device.all_services if one.service_type.startswith(_CONNECTIONS)]
        except Exception as error:  # the library raises errors of any type for descriptions that make no sense
            logger.debug(f"the description at {location} cannot be used: {error!r}")
            return None
        for service in services:
            router = cls(service, own_host, "", requester)
            with contextlib.suppress(RouterRefuses, ValueError, KeyError):  # not connected through this service
                answer = await router._call("GetExternalIPAddress")
                router.external_host = str(ipaddress.IPv4Address(answer["NewExternalIPAddress"]))
                return router
        return None

    async def open(self, port: int, external_port: int, lease_seconds: int) -> tuple[int, int]:
        """As `Router.open`; raises PortTaken as well.

        The port leads to the address that this machine has now, which may have changed since the last call.
        """
        self._own_host = own_host_towards(self._requester.host) or self._own_host
        await self._call(
            "AddPortMapping",
            NewRemoteHost="",
            NewExternalPort=external_port,
            NewProtocol="TCP",
            NewInternalPort=port,
            NewInternalClient=self._own_host,
            NewEnabled=True,
            NewPortMappingDescription=DESCRIPTION,
            NewLeaseDuration=lease_seconds,
        )
        return external_port, lease_seconds

    async def close(self, _port: int, external_port: int) -> None:
        """As `Router.close`."""
        await self._call("DeletePortMapping", NewRemoteHost="", NewExternalPort=external_port, NewProtocol="TCP")

    async def _call(self, action: str, **arguments: object) -> dict:
        self._requester.documents_left = 1
        try:
            return dict(await self._service.action(action).async_call(**arguments))
        except UpnpActionError as error:
            if error.error_code == _PORT_TAKEN:
                raise PortTaken("the port is taken there") from None
            if error.error_code == _ONLY_PERMANENT:
                raise RouterRefuses("it opens ports for good only") from None
            raise RouterRefuses(f"it says error {error.error_code}") from None
        except Exception as error:  # the library's, of any type
            logger.debug(f"{action} failed: {error!r}")
            raise RouterRefuses("it does not answer as it should") from None


async def _description(gateway: str, own_host: str, target: tuple[str, int]) -> str:
    """URL of the gateway's description of itself. Answers of other devices are ignored. Searches without end."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
        line.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own_host))
        line.bind((own_host, 0))
        while True:
            for kind in _GATEWAYS:
                await loop.sock_sendto(line, build_ssdp_search_packet(target, 1, kind), target)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPEAT_SECONDS):
                    for _ in range(MAX_ANSWERS):
                        data, (host, port) = await loop.sock_recvfrom(line, MAX_DATAGRAM_BYTES)
                        if host == gateway and (location := location_in(data, (host, port))) is not None:
                            return location


def location_in(data: bytes, sender: tuple[str, int]) -> str | None:
    """The URL in an answer to the search, if it is an http URL of the sender itself; else None."""
    try:
        _, headers = decode_ssdp_packet(data, None, sender)
        location = headers.get("location", "")
        parts = urlsplit(location)
        is_own = parts.scheme == "http" and parts.hostname == sender[0] and parts.port != 0
    except Exception as error:  # the datagram may hold anything
        logger.debug(f"the answer of {sender[0]} cannot be read: {error!r}")
        return None
    return location if is_own else None
