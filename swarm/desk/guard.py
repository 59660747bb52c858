"""What stands before the page: how often strangers may ask and how long they may wait with it, and what browsers are
told not to do."""

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
"""Answers at once, and then a second: a class of students may share an address."""
IN_ALL, IN_ALL_A_SECOND = 1000, 500
MAX_CONNECTIONS = 256
"""While there are as many, one of them makes place for a new one; those of a web server in front do not, and questions
are refused while there are no others."""
PER_ADDRESS_CONNECTIONS = MAX_CONNECTIONS // 4
QUESTION_SECONDS = 10.0
"""In which a visitor asks something, completely, and takes the answer."""
IN_FRONT = ("127.0.0.1", "::1")
"""Where a web server is through which all visitors come."""
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
    """Of a visitor: closed at once if its address has too many, and later if no question of it is answered.

    A look now and then finds all that keep it open without end: who asks nothing, or half a question, also after others
    that were answered, and who does not read.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._has_answered, self._next_look = False, None
        self._since = self.loop.time()
        self._household: str | None = None
        """None of a web server in front, and of whom nobody knows the address."""

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
        """Close the oldest connection of the address that has most; rather one on which nobody waits for an answer.

        So a few addresses that have all places keep nobody out.
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
        """Whether the visitor waits for this desk, and not the other way round."""
        cycle = self.cycle
        is_asked = cycle is not None and not cycle.more_body and not cycle.response_complete
        return is_asked and not self.flow.write_paused


class Guard:
    """Lets so many questions through to the application, and adds headers to its answers.

    Args:
        app: ASGI application
        of_all: what all together may ask
        only_host: the one name by which the desk is called, beside those of its own machine; None: it may be any
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
    """Whether a browser has not been led here by a name that some other site has pointed at this machine.

    Such a site could read what the desk shows to its own machine. It cannot do so by a number, nor without a name.
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
    """IP address of who asks; None if nobody knows it. A web server in front may pass on what a visitor has made up."""
    client = scope.get("client")
    try:
        return str(ipaddress.ip_address(client[0])) if client else None
    except ValueError:
        return None


def household_of(scope: Scope) -> str | None:
    """Of who asks; all of whom nobody knows the address share one."""
    address = address_of(scope)
    return None if address is None else household(address)
