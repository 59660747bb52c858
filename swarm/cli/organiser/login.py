"""Log in at the desk of your run: a browser of yours gets the controls of the run.

    swarm login https://desk.example.org/login/0a1b2c3d4e5f6071 --run-id night-1

The desk's page shows the whole line (choose Organiser, at its end). The command signs the code in the line with your
key, for this desk and for two minutes, and sends the signature to the desk. The key stays where it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Annotated
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import tyro

from recipe.command_line import arg, exit_status, read_options
from recipe.errors import InputError, first_line
from swarm.cli.organiser.organiser_options import OrganiserOptions

ANSWER_SECONDS = 10.0
MAX_ANSWER_BYTES = 500
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class LoginOptions:
    """Log in at the desk of your run: the browser that shows this line gets the controls."""

    url: tyro.conf.Positional[Annotated[str, arg("URL")]]
    """The URL in the line that the desk's page shows, with the code at its end."""
    yes: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Do not ask whether the browser that shows the code is yours."""
    organiser: Annotated[OrganiserOptions, tyro.conf.arg(name="your run")] = field(default_factory=OrganiserOptions)


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect: what was signed is for one address."""

    def redirect_request(self, *_args, **_options) -> None:
        return None


def main(arguments: list[str], say: Callable[[str], None] = print, ask: Callable[[str], str] = input) -> int:
    """Returns the exit status: 0, or 2 for input that cannot work."""

    def run() -> None:
        options = read_options(LoginOptions, arguments, "swarm login")
        address, challenge = _taken_apart(options.url)
        folder = options.organiser.opened()
        from swarm.desk.organiser.login import Login

        browser = _answer(Request(f"{address}/login/{challenge}"))
        if not options.yes and not _is_sure(browser, challenge, folder.run_id, ask):
            raise InputError("Nothing was signed: answer y, or give --yes, if the browser is yours.")
        signed = Login(folder.run_id, address, challenge, int(time.time())).signed_by(folder.signer())
        say(_answer(Request(f"{address}/login/{challenge}", signed, {"content-type": "application/octet-stream"})))

    return exit_status(run)


def _taken_apart(url: str) -> tuple[str, str]:
    """The desk's address and the code, from a URL that ends with /login/CODE.

    Raises:
        InputError: it is no such URL, or the desk has no certificate and is not on this machine
    """
    from swarm.desk.organiser.login import CHALLENGE_LETTERS

    address, found, challenge = url.strip().rpartition("/login/")
    try:
        parts = urlsplit(address)
        host = parts.hostname
    except ValueError:
        host = None
    is_code = len(challenge) == CHALLENGE_LETTERS and set(challenge) <= set("0123456789abcdef")
    if not (found and host and is_code and parts.scheme in ("http", "https")):
        raise InputError(
            "This is no line of a desk's page: open that page, choose Organiser, and copy the line that it shows."
        )
    if parts.scheme == "http" and host not in THIS_MACHINE:
        raise InputError(f"{address} has no certificate, so others could take the log-in over: use https.")
    return address, challenge


def _is_sure(browser: str, challenge: str, run_id: str, ask: Callable[[str], str]) -> bool:
    """Whether the person says that the browser is theirs: a stranger may have made them copy the stranger's line."""
    try:
        answer = ask(f"Let in the browser at {browser} that shows {challenge}? It can pause and end {run_id}. [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


def _answer(request: Request) -> str:
    """What the desk answers, as one line.

    Raises:
        InputError: the desk refuses, or does not answer
    """
    try:
        try:
            answer = build_opener(_NoRedirects).open(request, timeout=ANSWER_SECONDS)
        except HTTPError as error:
            answer = error  # a desk that refuses answers as well, and says why
        with answer:
            said = _line(answer.read(MAX_ANSWER_BYTES).decode(errors="replace"))
    except HTTPException as error:  # another program listens there, such as a peer
        raise InputError(f"No desk answers there ({_line(first_line(error))}): check the address.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise InputError(
            f"{request.host} does not answer ({reason}): check that the desk runs, and that the line is complete."
        ) from None
    if not isinstance(answer, HTTPError):
        return said
    if answer.code in (403, 429) and said:
        raise InputError(said)
    raise InputError(f"No desk answers there ({_line(first_line(answer))}): check the address.")


def _line(said: str) -> str:
    return "".join(letter for letter in said if letter.isprintable()).strip()
