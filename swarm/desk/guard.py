"""Protects the page from strangers: limits on requests and connections, and headers that forbid things to browsers."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarm.network.addresses import household
from swarm.runtime.token_bucket import TokenBucket, TokenBuckets

PER_ADDRESS, PER_ADDRESS_A_SECOND = 200, 50
"""Answers that one address gets at once, and then per second. A class of students may share an address."""
IN_ALL, IN_ALL_A_SECOND = 1000, 500
"""Answers that all addresses together get at once, and then per second."""
MAX_CONNECTIONS = 256
"""When there are so many connections, one is closed for each new one. Those of a web server in front are never closed:
if there are no others, requests are refused."""
PER_ADDRESS_CONNECTIONS = MAX_CONNECTIONS // 4
"""Connections that one address may have."""
QUESTION_SECONDS = 10.0
"""Time in which a visitor has to send a whole request, and to take the answer."""
IN_FRONT = ("127.0.0.1", "::1")
"""Addresses of a web server in front, through which all visitors come."""
HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
]
REFUSAL = b"Too many questions: ask again in a second.\n"
ELSEWHERE = (
    b"This desk is shown on its own machine only: start it with --page-url, or with --host, to show it by this name.\n"
)


class Connection(H11Protocol):
    """A visitor's connection. It is closed at once if its address has too many, and later if no request is answered.

    A look every 10 s finds all ways to keep a connection open without end: to send nothing; to send half a request,
    even after whole ones; or not to read the answer.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._has_answered, self._next_look = False, None
        self._since = self.loop.time()
        self._household: str | None = None
        """Address or network that counts as one visitor; None for a web server in front, and for an unknown address."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._look_later()
        if self.client is not None and self.client[0] not in IN_FRONT:
            self._household = household(self.client[0])
            if sum(other._household == self._household for other in self.connections) > PER_ADDRESS_CONNECTIONS:
                return self._close()
        if len(self.connections) >= MAX_CONNECTIONS:
            self._make_place()

    def _make_place(self) -> None:
        """Close one connection of the address that has most: the oldest that waits for no answer, or else the oldest.

        So a few addresses cannot keep other visitors out by taking all places.
        """
        others = [other for other in self.connections if other._household is not None and other is not self]
        if others:
            of = Counter(other._household for other in others)
            max(others, key=lambda other: (of[other._household], not other._is_answering, -other._since))._close()

    def _close(self) -> None:
        self.connections.discard(self)  # its place is free at once
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._has_answered = True
        super().on_response_complete()

    def _look_later(self) -> None:
        self._has_answered = False
        self._next_look = self.loop.call_later(QUESTION_SECONDS, self._look)

    def _look(self) -> None:
        if self._has_answered or self._is_answering:
            self._look_later()
        else:
            self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        """Whether the visitor waits for this desk, which has the whole request and has not sent all of the answer.

        If the visitor does not read (writing is paused), the desk waits for the visitor.
        """
        cycle = self.cycle
        is_asked = cycle is not None and not cycle.more_body and not cycle.response_complete
        return is_asked and not self.flow.write_paused


class Guard:
    """Lets a limited number of requests through to the application, and adds headers to its answers.

    Args:
        app: ASGI application
        of_all: limit for all addresses together
        only_host: the one name by which browsers may call the desk, beside `localhost` and numbers; None: any name
    """

    def __init__(self, app: ASGIApp, of_all: TokenBucket | None = None, only_host: str | None = None):
        self._app, self._only_host = app, only_host
        self._of_address = TokenBuckets(PER_ADDRESS, PER_ADDRESS_A_SECOND)
        self._of_all = of_all or TokenBucket(IN_ALL, IN_ALL_A_SECOND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if not self._of_address.take(household_of(scope)) or not self._of_all.take():
            return await _refuse(send, 429, REFUSAL, (b"retry-after", b"1"))
        if self._only_host is not None and not _is_here(scope, self._only_host):
            return await _refuse(send, 421, ELSEWHERE)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        return await self._app(scope, receive, send_with_headers)


async def _refuse(send: Send, status: int, sentence: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", b"text/plain"), *more, *HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": sentence})


def _is_here(scope: Scope, only_host: str) -> bool:
    """Whether a request was sent to a name of this machine, and not to a name of another site that points here.

    With such a name (DNS rebinding), a site could read what the desk shows only to its own machine. With a number for
    the host, or without one, it cannot.
    """
    given = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
    try:
        host = urlsplit(f"//{given}").hostname or ""
        if host in ("", "localhost", only_host):
            return True
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def address_of(scope: Scope) -> str | None:
    """IP address of the visitor; None if it is not known.

    A web server in front may pass on a text that a visitor has made up, which is no address.
    """
    client = scope.get("client")
    try:
        return str(ipaddress.ip_address(client[0])) if client else None
    except ValueError:
        return None


def household_of(scope: Scope) -> str | None:
    """The address or network that counts as one visitor. All visitors with an unknown address share one (None)."""
    address = address_of(scope)
    return None if address is None else household(address)
