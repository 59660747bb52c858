"""The organiser's pages: to log a browser in, and to give orders. Browsers keep no copy of them."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from recipe.errors import InputError
from swarm.desk.guard import REFUSAL, address_of, household_of
from swarm.desk.organiser.controls import COMMANDS, Command, SwarmControls
from swarm.desk.organiser.door import SESSION_SECONDS, Door, Refused, Session
from swarm.desk.organiser.login import LOGIN_SECONDS, MAX_LOGIN_BYTES
from swarm.desk.page import Snapshot, render
from swarm.runtime.token_bucket import TokenBucket, TokenBuckets

HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
TRIES_AT_ONCE, TRIES_A_SECOND = 20, 0.5
"""Tries to log in that one address has at once, and then per second. All together have ten times as many."""
MAX_FORM_BYTES, MAX_FIELDS, MAX_VALUE_LETTERS, MAX_STEP_LETTERS = 2**12, 16, 20, 12
VISIT, SESSION = "visit", "session"
"""Kinds of cookies: of a browser that waits to be logged in, and of one that is logged in."""

T = TypeVar("T")


def _say(sentence: str) -> None:
    """Print a sentence with the time: which browser is let in, and what is ordered."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}", flush=True)


class OrganisersPages:
    """The pages with which the organiser logs in and gives orders.

    Args:
        newest: returns the newest snapshot
        door: says which browsers may give orders
        controls: pass on orders to the run; None if it has no organiser
    """

    def __init__(self, newest: Callable[[], Snapshot], door: Door, controls: SwarmControls | None = None):
        self._newest, self._door, self._controls = newest, door, controls
        self._one_at_a_time = asyncio.Lock()
        self._of_address = TokenBuckets(TRIES_AT_ONCE, TRIES_A_SECOND)
        self._of_all = TokenBucket(10 * TRIES_AT_ONCE, 10 * TRIES_A_SECOND)
        # a part of cookies' names: browsers send the cookies of a host to all its ports, where other desks may be
        self._run = hashlib.sha256(newest().card.key.encode()).hexdigest()[:8]

    def add_to(self, app: FastAPI) -> None:
        """Serve these pages in this application."""
        for path, method, answer in (
            ("/login", "GET", self._show_challenge),
            ("/login-state", "GET", self._tell_state),
            ("/login/{challenge}", "GET", self._tell_who_waits),
            ("/login/{challenge}", "POST", self._let_in),
            ("/organiser", "GET", self._show),
            ("/order", "GET", self._ask_again),
            ("/order", "POST", self._order),
            ("/logout", "POST", self._log_out),
        ):
            app.add_api_route(path, self._answering(answer), methods=[method], include_in_schema=False)

    # ---- logging in -------------------------------------------------------------------------------------------------

    async def _show_challenge(self, request: Request) -> Response:
        address = self._address(request)
        if self._session_of(request) is not None:
            return _elsewhere("organiser")
        secret = self._cookie(request, VISIT)
        if (entered := self._door.enter(secret)) is not None:
            response = _elsewhere("organiser")
            self._set_cookie(response, request, SESSION, entered[0], SESSION_SECONDS)
            self._set_cookie(response, request, VISIT, "", 0)
            return response
        if self._door.state_of(secret) == "over" and not self._may_try(request):
            return _too_often()
        secret, visit = self._door.knock(secret, address, _host(request))
        response = self._page("login.html.jinja", visit=visit)
        self._set_cookie(response, request, VISIT, secret, LOGIN_SECONDS)
        return response

    async def _tell_state(self, request: Request) -> Response:
        return Response(self._door.state_of(self._cookie(request, VISIT)), media_type=TEXT)

    async def _tell_who_waits(self, request: Request) -> Response:
        self._address(request)
        if not self._may_try(request):
            return _too_often()
        return Response(self._door.waiting(request.path_params["challenge"]).host, media_type=TEXT)

    async def _let_in(self, request: Request) -> Response:
        self._address(request)
        if not self._may_try(request):
            return _too_often()
        data = await _body(request, MAX_LOGIN_BYTES)
        visit = self._door.let_in(request.path_params["challenge"], data, self._revoked)
        _say(f"The organiser has let in the browser at {visit.host}, which may give orders now.")
        return Response(f"The browser at {visit.host} may give orders now.", media_type=TEXT)

    # ---- logged in --------------------------------------------------------------------------------------------------

    async def _show(self, request: Request) -> Response:
        self._address(request)
        session = self._session_of(request)
        if session is None:
            return _elsewhere("login")
        orders, step = self._newest().orders, self._newest().swarm.step or 0
        return self._page(
            "organiser.html.jinja",
            session=session,
            commands=COMMANDS,
            can_order=self._controls is not None and self._controls.can_order,
            given=[(order, order.at_step <= step) for order in reversed(orders.given)],
            factor=orders.learning_rate_factor(step),
        )

    async def _ask_again(self, request: Request) -> Response:
        """The page that asks once more: what would be ordered, and from which update on it would count."""
        self._address(request)
        session = self._session_of(request)
        if session is None:
            return _elsewhere("login")
        controls, command, value = self._meant(request.query_params)
        order = await self._in_turn(lambda: controls.plan(command.what, value))
        return self._page("order.html.jinja", session=session, command=command, order=order)

    async def _order(self, request: Request) -> Response:
        _, fields = await self._form(request)
        controls, command, value = self._meant(fields)
        step = fields.get("step", "")
        if not (step.isdecimal() and len(step) <= MAX_STEP_LETTERS):
            raise Refused("The update from which the order counts is not a number: load the organiser's page again.")
        order = await self._in_turn(lambda: controls.give(command.what, value, int(step)))
        _say(f"Ordered from the browser at {_host(request)}: {order}.")
        return _elsewhere("organiser")

    def _meant(self, given: Mapping[str, str]) -> tuple[SwarmControls, Command, float]:
        """The controls, the kind of order and its value, as the fields of a form name them.

        Raises:
            Refused: there is no such order, or this desk can give none
        """
        if self._controls is None or not self._controls.can_order:
            raise Refused(
                "This desk has no valid key to sign orders with (none was given, it has ended, or it was revoked): "
                "start the desk with --deputy FILE."
            )
        command = next((command for command in COMMANDS if command.what == given.get("what")), None)
        if command is None:
            raise Refused("There is no such order: load the organiser's page again.")
        if not command.label:
            return self._controls, command, 0.0
        try:
            value = float(given.get("value", "")[:MAX_VALUE_LETTERS])
        except ValueError:
            value = math.nan
        if not command.least <= value <= command.most or (command.is_whole and value != int(value)):
            number = "a whole number" if command.is_whole else "a number"
            raise Refused(f"{command.label}: give {number} from {command.least:,g} to {command.most:,}.")
        return self._controls, command, value

    async def _in_turn(self, call: Callable[[], T]) -> T:
        """Call this in another thread, one call at a time, and return its result.

        It may take seconds, in which other visitors get their answers.

        Raises:
            Refused: the call raised an `InputError`
        """
        try:
            async with self._one_at_a_time:
                return await run_in_threadpool(call)
        except InputError as error:
            raise Refused(str(error)) from None

    async def _log_out(self, request: Request) -> Response:
        secret, _ = await self._form(request)
        self._door.leave(secret)
        response = _elsewhere("./")
        self._set_cookie(response, request, SESSION, "", 0)
        return response

    async def _form(self, request: Request) -> tuple[str, dict[str, str]]:
        """Secret of the browser's session, and fields of the form that it sent from the organiser's page.

        Raises:
            Refused: the browser is not logged in, or the form is from another page
        """
        secret = self._cookie(request, SESSION)
        session = self._door.session(secret, self._revoked)
        fields = _fields(await _body(request, MAX_FORM_BYTES))
        self._door.check_form(session, fields.get("token", ""))
        return secret, fields

    # ---- all of them ------------------------------------------------------------------------------------------------

    def _answering(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The same answer, but a refusal becomes a page or a line of text, and no copy of any answer is kept."""

        async def answered(request: Request) -> Response:
            try:
                response = await answer(request)
            except Refused as refused:
                response = self._refusal(request, str(refused))
            response.headers["cache-control"] = "no-store"
            return response

        return answered

    def _refusal(self, request: Request, sentence: str) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return self._page("refused.html.jinja", 403, sentence=sentence)
        return Response(f"{sentence}\n", 403, media_type=TEXT)

    def _page(self, template: str, status: int = 200, **more: object) -> Response:
        return Response(render(template, self._newest(), **more), status, media_type=HTML)

    def _address(self, request: Request) -> str:
        return self._door.address_at(request.headers.get("host", ""))

    def _session_of(self, request: Request) -> Session | None:
        try:
            return self._door.session(self._cookie(request, SESSION), self._revoked)
        except Refused:
            return None

    @property
    def _revoked(self) -> frozenset[bytes]:
        """Public keys of deputies that were revoked."""
        return self._newest().orders.revoked

    def _may_try(self, request: Request) -> bool:
        return self._of_address.take(household_of(request.scope)) and self._of_all.take()

    def _cookie(self, request: Request, kind: str) -> str:
        """The secret that a browser brings; empty if it brings none."""
        return request.cookies.get(self._name_of_cookie(request, kind), "")

    def _set_cookie(self, response: Response, request: Request, kind: str, secret: str, seconds: float) -> None:
        """Set a cookie for this many seconds; 0: take it away."""
        name, is_secure = self._name_of_cookie(request, kind), self._is_secure(request)
        response.set_cookie(name, secret, int(seconds), secure=is_secure, httponly=True, samesite="strict")

    def _name_of_cookie(self, request: Request, kind: str) -> str:
        """Name of a cookie; over https with the prefix `__Host-`.

        Browsers accept a cookie with this prefix only over https, and only from this very host.
        """
        return f"{'__Host-' * self._is_secure(request)}swarm-{kind}-{self._run}"

    def _is_secure(self, request: Request) -> bool:
        return self._address(request).startswith("https://")


def _elsewhere(place: str) -> Response:
    return Response(status_code=303, headers={"location": place})


def _too_often() -> Response:
    return Response(REFUSAL, 429, {"retry-after": "2"}, TEXT)


def _host(request: Request) -> str:
    return address_of(request.scope) or "an unknown place"


async def _body(request: Request, most_bytes: int) -> bytes:
    """The body of a request.

    Raises:
        Refused: it is too long, or ends too early
    """
    body = b""
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > most_bytes:
                raise Refused("The request is too long.")
    except ClientDisconnect:
        raise Refused("The request is not complete.") from None
    return body


def _fields(body: bytes) -> dict[str, str]:
    """The fields of a form, with their last values; empty if the body is no form."""
    try:
        found = parse_qs(body.decode(), max_num_fields=MAX_FIELDS, keep_blank_values=True)
    except ValueError:
        return {}
    return {name: values[-1] for name, values in found.items()}
