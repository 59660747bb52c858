"""What stands before the page: how often strangers may ask, and what browsers are told not to do."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarm.network.addresses import household
from swarm.runtime.token_bucket import TokenBucket, TokenBuckets

PER_ADDRESS, PER_ADDRESS_A_SECOND = 200, 50
"""Answers at once, and then a second: a class of students may share an address."""
IN_ALL, IN_ALL_A_SECOND = 1000, 500
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


class Guard:
    """Lets so many questions through to the application, and adds headers to its answers.

    Args:
        app: ASGI application
        of_all: what all together may ask
    """

    def __init__(self, app: ASGIApp, of_all: TokenBucket | None = None):
        self._app = app
        self._of_address = TokenBuckets(PER_ADDRESS, PER_ADDRESS_A_SECOND)
        self._of_all = of_all or TokenBucket(IN_ALL, IN_ALL_A_SECOND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if not self._of_address.take(household_of(scope)) or not self._of_all.take():
            refused = [(b"content-type", b"text/plain"), (b"retry-after", b"1"), *HEADERS]
            await send({"type": "http.response.start", "status": 429, "headers": refused})
            return await send({"type": "http.response.body", "body": REFUSAL})

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        return await self._app(scope, receive, send_with_headers)


def household_of(scope: Scope) -> str | None:
    """Of who asks; None if the server does not know."""
    client = scope.get("client")
    return household(client[0]) if client else None
