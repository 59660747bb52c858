"""`swarm login`: the organiser's key lets in the browser that shows a code, at the real page of a desk."""

import os
import re
import shlex
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from swarm.cli.organiser import deputy
from swarm.cli.organiser.login import main
from swarm.desk.alerts import Alerts
from swarm.desk.desk import Desk, open_socket, page_url, served
from swarm.desk.organiser.door import Door
from swarm.desk.report import RunCard


@pytest.fixture
def browser(her_run, tmp_path) -> Iterator[httpx.Client]:
    """A browser at the desk of her run."""
    card = RunCard("key", "digits", "vit", "digits", 100, 64, by_invitation=True, join_line="swarm://LINE")
    desk, listener = Desk(card, tmp_path / "desk.json", Alerts([]), 10), open_socket("127.0.0.1", 0)
    door = Door(her_run.folder.authority)
    with (
        served(lambda: desk.newest, listener, door),
        httpx.Client(base_url=page_url(listener), follow_redirects=True) as browser,
    ):
        yield browser


def shown_url(browser: httpx.Client) -> str:
    return shown_line(browser)[0]


def shown_line(browser: httpx.Client) -> list[str]:
    """The arguments to type after `swarm login`."""
    return shlex.split(re.search(r"swarm login (http[^<]+)<", browser.get("/login").text)[1])


def is_in(browser: httpx.Client) -> bool:
    return "Logged in until" in browser.get("/organiser").text


def test_the_organiser_lets_in_the_browser_that_shows_the_code(her_run, browser):
    url, said, asked = shown_url(browser), [], []

    def yes(question: str) -> str:
        asked.append(question)
        return "y"

    assert main(her_run.options(url), said.append, yes) == 0
    assert said == ["The browser at 127.0.0.1 may give orders now."]
    assert re.fullmatch(r"Let in the browser at 127.0.0.1 that shows [0-9a-f]{16}\? .* end digits\. \[y/N\] ", asked[0])
    assert is_in(browser)


def test_a_deputy_needs_the_right(her_run, browser, refusal, tmp_path):
    key = tmp_path / "ben.key"
    assert deputy.main([str(key), "--rights", "remove", *her_run.options()]) == 0
    url = shown_url(browser)
    assert "no right to" in refusal(main, her_run.options(url, "--yes", "--organiser-key", str(key)))
    assert not is_in(browser)


@pytest.mark.parametrize("answer", ["", "n", "nonsense"])
def test_nothing_is_signed_for_a_browser_that_is_not_the_organisers(her_run, browser, answer, capsys):
    assert main(her_run.options(shown_url(browser)), ask=lambda _question: answer) == 2
    assert "Nothing was signed" in capsys.readouterr().err
    assert not is_in(browser)


def test_the_key_of_another_run_opens_nothing(her_run, browser, refusal, monkeypatch):
    url = shown_url(browser)
    other = her_run.another("letters")
    assert "was not signed by the organiser" in refusal(main, other.options(url, "--yes", "--run-id", "letters"))
    assert not is_in(browser)


def test_the_line_that_is_shown_is_for_the_run_of_the_desk(her_run, browser):
    """Otherwise an organiser of two runs would sign with the key of the one that she has started last."""
    os.utime(her_run.folder.path / "contact.json", (1, 1))
    her_run.another("letters")
    assert main(her_run.options(*shown_line(browser), "--yes"), print) == 0
    assert is_in(browser)


def test_a_code_that_was_used_is_refused(her_run, browser, refusal):
    url = shown_url(browser)
    assert main(her_run.options(url, "--yes"), print) == 0
    assert "works once, for two minutes" in refusal(main, her_run.options(url, "--yes"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://desk.example.org", "This is no line of a desk's page"),
        ("https://desk.example.org/login/0123", "This is no line of a desk's page"),
        ("ftp://desk.example.org/login/0123456789abcdef", "This is no line of a desk's page"),
        ("http://desk.example.org/login/0123456789abcdef", "use https"),
        ("http://127.0.0.1:1/login/0123456789abcdef", "127.0.0.1:1 does not answer"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(her_run, refusal, url, words):
    assert words in refusal(main, her_run.options(url, "--yes"))


@pytest.mark.parametrize(
    "said",
    [
        b"\x13/multistream/1.0.0\n",
        b"HTTP/1.1 404 \x1b[2JNot Found\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno number",
        b"HTTP/1.1 403 Forbidden\r\nTransfer-Encoding: chunked\r\n\r\nno number",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    ],
    ids=["a peer", "a page that is missing", "a broken page", "a broken refusal", "an endless header"],
)
def test_a_program_that_is_no_desk_is_refused_in_one_sentence(her_run, refusal, said):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as other_program:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(said)

        other_program.submit(answer)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/login/0123456789abcdef"
        sentence = refusal(main, her_run.options(url, "--yes"))
    assert "No desk answers there (" in sentence
    assert sentence.isprintable()
