"""Log-in of browsers that want to give orders: those that wait for a signed log-in, and those that are logged in.

Everything is kept in memory only. Of a browser's secret, only the digest is kept.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from recipe.errors import InputError
from swarm.desk.organiser.login import LOGIN_SECONDS, MAX_ADDRESS_LENGTH, Login, new_challenge
from swarm.protocol.certificates import Authority, NotSigned

SESSION_SECONDS = 12 * 3600.0
MAX_VISITS, MAX_SESSIONS = 256, 16
SECRET_BYTES = 32
HTTPS_PORT = 443
"""Port that browsers leave out of the header `Host`."""
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


class Refused(Exception):  # noqa: N818 (reads as what it says)
    """A browser may not do this. The text is one sentence for the person at the browser."""


@dataclass
class Visit:
    """A browser that waits to be logged in.

    Args:
        challenge: code that it shows
        address: of the desk, as this browser called it
        host: IP address of the browser
        ends_at: time after which the challenge counts for nothing, seconds since 1970
        is_let_in: a signed log-in for it has arrived
        key: public key with which that was signed; empty before
    """

    challenge: str
    address: str
    host: str
    ends_at: float
    is_let_in: bool = False
    key: bytes = b""


@dataclass(frozen=True)
class Session:
    """A browser that is logged in and may give orders.

    Args:
        token: secret that each of its forms has to send along; forms of other sites do not know it
        host: IP address of the browser when it asked to be logged in
        ends_at: when the session ends, seconds since 1970
        key: public key with which its log-in was signed
    """

    token: str
    host: str
    ends_at: float
    key: bytes


class Door:
    """Knows which browsers may give orders at this desk, and lets in those for which there is a signed log-in.

    A browser calls `knock`, and shows its challenge. `let_in` takes the log-in that is signed for this challenge. With
    `enter` the browser gets a session.

    Args:
        authority: the run, with the organiser's public key; None: the run has no organiser
        page_url: address of the page behind a web server with a certificate; None if only this machine has the page
        clock: tells seconds since 1970

    Raises:
        InputError: the URL cannot be used
    """

    def __init__(
        self, authority: Authority | None, page_url: str | None = None, clock: Callable[[], float] = time.time
    ):
        self._authority, self._clock = authority, clock
        self.page_url = None if page_url is None else _checked(page_url)
        self._visits: dict[str, Visit] = {}
        self._sessions: dict[str, Session] = {}

    @property
    def page_host(self) -> str:
        """The host in the page's URL; empty if only this machine has the page."""
        return "" if self.page_url is None else urlsplit(self.page_url).hostname

    def address_at(self, host: str) -> str:
        """Address of the desk for a browser that has called this host, without a slash at its end.

        A stranger can make a browser call the desk by any name. So only the host of the page's URL and the names of
        this machine count.

        Args:
            host: the request's header `Host`

        Raises:
            Refused: no browser can log in at this host, or the run has no organiser
        """
        if self._authority is None:
            raise Refused("This run has no organiser, so it takes no orders.")
        if self.page_url is not None and host.lower().removesuffix(":443") == urlsplit(self.page_url).netloc:
            return self.page_url
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            name = None
        if name in THIS_MACHINE:
            return f"http://{host}"
        there = f"at {self.page_url} or " if self.page_url else ""
        raise Refused(
            f"You can log in {there}on the desk's own machine, as localhost. --page-url names another address."
        )

    def knock(self, secret: str, address: str, host: str) -> tuple[str, Visit]:
        """Begin or continue the log-in of a browser. Returns a new secret, and what the browser has to show.

        The challenge is a new one, unless the browser waits already. Its old secret counts no more: another page on
        this host may have planted it, and the maker of that page knows it.

        Args:
            secret: that the browser was given before; empty if none
            address: of the desk, as this browser called it
            host: IP address of the browser
        """
        now, visit = self._clock(), self._visits.pop(_digest(secret), None)
        self._visits = {digest: visit for digest, visit in self._visits.items() if visit.ends_at > now}
        if visit is None or visit.ends_at <= now or visit.address != address:
            visit = Visit(new_challenge(), address, host, now + LOGIN_SECONDS)
        visit.host = host
        while len(self._visits) >= MAX_VISITS:
            # the one that knocked first, as a dict keeps the order; strangers push out no browser that was let in
            del self._visits[min(self._visits, key=lambda digest: self._visits[digest].is_let_in)]
        secret = secrets.token_urlsafe(SECRET_BYTES)
        self._visits[_digest(secret)] = visit
        return secret, visit

    def waiting(self, challenge: str) -> Visit:
        """The waiting browser that shows this challenge.

        Raises:
            Refused: no browser waits with this challenge, or none does any more
        """
        for visit in self._visits.values():
            if visit.challenge == challenge and not visit.is_let_in and visit.ends_at > self._clock():
                return visit
        raise Refused("No browser waits with this code. A code works once, for two minutes: load the page again.")

    def let_in(self, challenge: str, data: bytes, revoked: Collection[bytes] = ()) -> Visit:
        """Take a signed log-in for the browser that shows this challenge, which may enter from then on.

        Args:
            data: a signed `Login`
            revoked: public keys of deputies that were revoked

        Raises:
            Refused: the log-in does not count, or is for another desk or another browser
        """
        if self._authority is None:
            raise Refused("This run has no organiser, so it takes no orders.")
        try:
            login = Login.read(data, self._authority, self._clock())
        except NotSigned as error:
            raise Refused(f"This log-in does not count: it {error}.") from None
        if login.key in revoked:
            raise Refused("This log-in does not count: the organiser has revoked the deputy who signed it.")
        visit = self.waiting(challenge)
        if (login.challenge, login.address) != (visit.challenge, visit.address):
            raise Refused("This log-in does not count: it is for another code or another desk.")
        visit.is_let_in, visit.key = True, login.key
        return visit

    def state_of(self, secret: str) -> str:
        """State of a browser's log-in: `waiting`, `in`, or `over` if it has no challenge that counts."""
        visit = self._visit(secret)
        return "over" if visit is None else "in" if visit.is_let_in else "waiting"

    def enter(self, secret: str) -> tuple[str, Session] | None:
        """Begin the session of a browser that was let in.

        Args:
            secret: with which it waited

        Returns:
            the secret and the session with which it may give orders; None if it was not let in
        """
        visit = self._visit(secret)
        if visit is None or not visit.is_let_in:
            return None
        del self._visits[_digest(secret)]
        now = self._clock()
        self._sessions = {digest: session for digest, session in self._sessions.items() if session.ends_at > now}
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        secret = secrets.token_urlsafe(SECRET_BYTES)
        session = Session(secrets.token_urlsafe(SECRET_BYTES), visit.host, now + SESSION_SECONDS, visit.key)
        self._sessions[_digest(secret)] = session
        return secret, session

    def session(self, secret: str, revoked: Collection[bytes] = ()) -> Session:
        """The session of a browser that may give orders.

        Args:
            secret: of the session
            revoked: public keys of deputies that were revoked; browsers that they have let in may order nothing either

        Raises:
            Refused: the browser may not give orders, or not any more
        """
        session = self._sessions.get(_digest(secret))
        if session is None or session.ends_at <= self._clock():
            raise Refused("Only the organiser can do this: log in first.")
        if session.key in revoked:
            raise Refused("The organiser has revoked the deputy who let this browser in: log in with another key.")
        return session

    def check_form(self, session: Session, token: str) -> None:
        """Raises Refused: the form is not from a page of this session"""
        if not secrets.compare_digest(session.token.encode(), token.encode()):
            raise Refused("This form is not from this page: load the organiser's page again.")

    def leave(self, secret: str) -> None:
        """End the session of a browser."""
        self._sessions.pop(_digest(secret), None)

    def _visit(self, secret: str) -> Visit | None:
        visit = self._visits.get(_digest(secret))
        return visit if visit is not None and visit.ends_at > self._clock() else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _checked(page_url: str) -> str:
    """The page's URL as browsers write it: in small letters, without port 443, and without a slash at its end.

    Raises:
        InputError: the URL cannot be used
    """
    try:
        parts = urlsplit(page_url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        has_port, parts = False, urlsplit("")
    plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if not (has_port and plain and parts.scheme == "https" and parts.hostname) or len(page_url) > MAX_ADDRESS_LENGTH:
        raise InputError(
            "--page-url has to be like https://desk.example.org: without https, others on the network could read the "
            "log-in."
        )
    host = parts.netloc.lower()
    if parts.port in (None, HTTPS_PORT):
        host = re.sub(r":\d*$", "", host)
    return f"https://{host}{parts.path.rstrip('/')}"
