"""What strangers see on the page, and how often they may ask."""

import asyncio
import contextlib
import json
import re
import socket
import time
from dataclasses import replace
from typing import get_args
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from swarm.desk.app import FORMS_AT_ONCE, build_app
from swarm.desk.chart import chart, levels
from swarm.desk.desk import open_socket, served
from swarm.desk.guard import MAX_CONNECTIONS, PER_ADDRESS, Guard, household_of
from swarm.desk.health import Kind, Level
from swarm.desk.history import MAX_POINTS
from swarm.desk.metrics import MAX_PEERS
from swarm.desk.organiser.door import Door
from swarm.desk.page import MAX_ROWS, SAID, SAID_OF
from swarm.desk.peer_table import PAGE_ROWS, PeerQuery
from swarm.desk.report import MAX_STRIPS
from swarm.runtime.token_bucket import TokenBucket
from tests.helpers.desk.pages import MARKUP, names_on, text_of
from tests.helpers.desk.seen_run import CARD
from tests.helpers.paths import ROOT

PAGES = ("/", "/live", "/peers")
FILES = ("/desk.css", "/desk.js", "/icon.svg", "/join.svg", "/badge.svg")
API = ("/api/v1/swarm", "/api/v1/peers", "/api/v1/history", "/api/v1/timeline")


def test_the_page_says_how_the_run_is(seen):
    seen.train("ada", "ben", steps=range(1, 20), loss=0.25, accuracy=0.9)
    text = text_of(seen.web.get("/").text)
    for words in (
        "letters",
        "All is well: 2 peers train, with an update every 2 s.",
        "Update 19 of 10,000 about 5 h 32 min left",
        "Training loss 0.250",
        "Accuracy 90.0 %",
        "Samples per second 20",
        "Updates per minute 30",
        "ada ada training server-mode reachable – 19 10 50.0 % 0.250 – now",
        "The desk began to watch. ada and ben were there.",
        "Claimed, not audited",
        "swarm join /ip4/203.0.113.5/tcp/31337",
        "What this page shows of a peer is that peer's own statement.",
    ):
        assert words in text, words


def test_a_visitor_that_wants_to_join_reads_where_the_program_is(another):
    """An open event sends strangers to the page, and they have nothing else."""
    silent = another().web.get("/").text
    assert "the program: ask the person who sent you here. Then paste: swarm join" in text_of(silent)
    told = another("told", card=replace(CARD, project_url="https://example.org/a&b/swarm-vit")).web.get("/").text
    assert '<a href="https://example.org/a&amp;b/swarm-vit">the program</a>' in told
    assert "git clone &#39;https://example.org/a&amp;b/swarm-vit&#39; swarm-vit &amp;&amp; cd swarm-vit" in told


@pytest.mark.slow
def test_a_screen_reader_is_interrupted_only_when_something_has_happened(seen, monkeypatch):
    """The sentence has changing numbers, and a browser fetches the page every second."""
    monkeypatch.setattr("swarm.desk.guard.PER_ADDRESS", 500)  # here all requests come within a second or two
    statuses, sentences, web = [], set(), seen.web

    def note() -> None:
        page = web.get("/live").text
        (status,) = re.findall(r'<p id="status" class="unseen" role="status" data-live>(.*?)</p>', page)
        assert page.count('role="status"') == 1
        statuses.extend([status] if status not in statuses[-1:] else [])
        sentences.add(re.search(r'id="sentence"[^>]*>(.*?)</p>', page)[1])

    for step in range(40):
        seen.look(seen.record("ada", step), seen.record("ben", step), after=2 + step / 10)
        note()
    for _ in range(450):
        seen.look(seen.record("ada", 39), seen.record("ben", 39))
        note()
    seen.look(seen.record("ada", 40), seen.record("ben", 40, client_mode=True))
    note()
    assert len(sentences) > 5
    assert statuses == [
        "The run is well.",
        "The run is not well. Reason: no update is made.",
        "Look at the run. Reason: too few peers can be called.",
    ]


def test_a_screen_reader_has_words_for_every_level_and_kind():
    assert (SAID.keys(), SAID_OF.keys()) == (set(get_args(Level)), set(get_args(Kind)))


def test_there_is_a_page_before_anything_is_known(seen):
    for path in (*PAGES, *FILES, *API, "/metrics"):
        assert seen.web.get(path).status_code == 200
    assert "Update – of 10,000" in text_of(seen.web.get("/").text)


@pytest.mark.parametrize("path", [*PAGES, "/badge.svg"])
def test_texts_of_strangers_are_shown_as_text(seen, path):
    seen.look((MARKUP, seen.record(MARKUP, 1)), (f"{MARKUP}2", seen.record(MARKUP, 1)))
    seen.look((MARKUP, seen.record(MARKUP, 2)))
    seen.look((MARKUP, seen.record(MARKUP, 3)))
    page = seen.web.get(path).text
    assert "<img src=x" not in page
    assert "</b>" not in page
    if path != "/badge.svg":
        assert "&lt;img src=x onerror=alert(1)&gt;" in page


@pytest.mark.parametrize("path", [*PAGES, *FILES, *API, "/metrics", "/nothing", "/api/v1/openapi.json"])
def test_browsers_are_told_what_not_to_do(seen, path):
    headers = seen.web.get(path).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", PAGES)
def test_nothing_comes_from_elsewhere_and_no_script_stands_in_the_page(seen, path):
    seen.train("ada", steps=range(9))
    page = seen.web.get(path).text
    assert not re.search(r"(src|href|action)=\"(https?:)?//", page)
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=", page)
    assert seen.web.get("/docs").status_code == seen.web.get("/redoc").status_code == 404


def test_an_invitation_is_nowhere_unless_the_organiser_shows_it(another):
    """Only the content of the card is shown. `test_desk_options` tests what comes into the card."""
    run = another(card=replace(another().desk.newest.card, by_invitation=True, join_line="swarm://PUBLIC"))
    assert "This run is by invitation" in run.web.get("/").text
    shown = another("other", card=replace(run.desk.newest.card, has_invitation=True, join_line="swarm://INVITES"))
    assert "This run is by invitation" not in shown.web.get("/").text


def test_programs_get_what_the_schema_says(seen):
    seen.train("ada", "ben", steps=range(5), accuracy=0.5)
    schema = seen.web.get("/api/v1/openapi.json").json()
    for path in API:
        content = seen.web.get(path).json()
        described = schema["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        fields = schema["components"]["schemas"][described["$ref"].rsplit("/", 1)[1]]["properties"]
        assert content.keys() == fields.keys()
    assert seen.web.get("/api/v1/swarm").json()["step"] == 4
    assert [peer["name"] for peer in seen.web.get("/api/v1/peers").json()["peers"]] == ["ada", "ben"]


def test_prometheus_reads_the_metrics_and_grafana_shows_them(seen):
    seen.look(*((str(number), seen.record(MARKUP, 3, client_mode=True)) for number in range(MAX_PEERS + 9)))
    families = {family.name: family for family in text_string_to_metric_families(seen.web.get("/metrics").text)}
    assert families["swarm_updates"].samples[0].value == 3
    assert {sample.labels["kind"] for sample in families["swarm_finding"].samples if sample.value} == {"reachable"}
    assert len(families["swarm_peer_samples_per_second"].samples) == MAX_PEERS
    assert families["swarm_peer_samples_per_second"].samples[0].labels["name"] == MARKUP
    dashboard = json.loads((ROOT / "peers" / "grafana" / "swarm.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    names = set(re.findall(r"swarm_\w+", asked))
    assert names
    assert names <= families.keys()


def test_the_badge_is_a_picture(seen):
    seen.train("ada", steps=range(5))
    assert "1 peer · update 4" in "".join(ElementTree.fromstring(seen.web.get("/badge.svg").text).itertext())
    ElementTree.fromstring(seen.web.get("/join.svg").content)


def test_a_page_that_a_browser_already_has_is_not_sent_again(seen):
    web = seen.web
    tag = web.get("/").headers["etag"]
    assert web.get("/", headers={"if-none-match": tag}).status_code == 304
    seen.train("ada", steps=range(3))
    assert web.get("/", headers={"if-none-match": tag}).status_code == 200
    assert web.get("/", headers={"accept-encoding": "identity"}).text == web.get("/").text


def test_a_visitor_that_asks_too_often_has_to_wait_and_the_others_do_not(seen, monkeypatch):
    monkeypatch.setattr("swarm.desk.guard.PER_ADDRESS_A_SECOND", 0.001)  # a slow machine would ask too slowly
    app = build_app(lambda: seen.desk.newest)
    rude, polite = TestClient(app, client=("203.0.113.5", 1)), TestClient(app, client=("203.0.113.6", 1))
    found = [rude.get("/badge.svg") for _ in range(PER_ADDRESS + 5)]
    assert {answer.status_code for answer in found} == {200, 429}
    assert {answer.headers.get("retry-after") for answer in found if answer.status_code == 429} == {"1"}
    assert polite.get("/badge.svg").status_code == 200


def test_all_visitors_together_have_a_limit_as_well(seen):
    guard = Guard(build_app(lambda: seen.desk.newest), TokenBucket(10, 0.001))
    crowd = [TestClient(guard, client=(f"198.51.100.{number}", 1)).get("/badge.svg") for number in range(12)]
    assert [answer.status_code for answer in crowd] == 10 * [200] + 2 * [429]


def asked_at(port: int, address: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 10, source_address=(address, 0)) as visitor:
        visitor.sendall(b"GET /badge.svg HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        try:
            return visitor.recv(12)
        except ConnectionError:
            return b""


QUESTION = b"GET /desk.css HTTP/1.1\r\nhost: localhost\r\n\r\n"
FORM = b"POST /order HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "then"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nhost: ", b""),
        (QUESTION, b"G"),
        (QUESTION, FORM),
        (QUESTION + FORM, b""),
        (FORM, b""),
    ],
    ids=["nothing", "half", "half-after-another", "no-form-after-another", "no-form-behind", "no-form"],
)
def test_a_visitor_that_keeps_connections_open_keeps_no_other_out(seen, monkeypatch, asked, then):
    async def answer_forms(scope, receive, send):
        await Request(scope, receive).body()
        await PlainTextResponse("done")(scope, receive, send)

    monkeypatch.setattr("swarm.desk.guard.QUESTION_SECONDS", 2.0)
    monkeypatch.setattr("swarm.desk.desk.build_app", lambda *arguments, **options: answer_forms)
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with served(lambda: seen.desk.newest, listener), contextlib.ExitStack() as held:
        for _ in range(MAX_CONNECTIONS):
            visitor = socket.create_connection(("127.0.0.1", port), 10, source_address=("127.0.0.2", 0))
            held.enter_context(visitor)
            with contextlib.suppress(ConnectionError):
                visitor.sendall(asked)
                if then:
                    visitor.recv(100_000)
                    visitor.sendall(then)
        assert asked_at(port, "127.0.0.3") == b"HTTP/1.1 200"
        until = time.monotonic() + 20
        while asked_at(port, "127.0.0.2") != b"HTTP/1.1 200":
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.mark.parametrize("num_addresses", [3, 4, 8])
def test_a_few_addresses_that_keep_connections_open_keep_no_visitor_out(seen, num_addresses):
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with served(lambda: seen.desk.newest, listener), contextlib.ExitStack() as held:
        front = held.enter_context(socket.create_connection(("127.0.0.1", port), 10, source_address=("127.0.0.1", 0)))
        for number in range(MAX_CONNECTIONS):
            address = f"127.0.0.{2 + number % num_addresses}"
            held.enter_context(socket.create_connection(("127.0.0.1", port), 10, source_address=(address, 0)))
        for address in ("127.0.0.99", "127.0.0.98", "127.0.0.1"):
            assert asked_at(port, address) == b"HTTP/1.1 200"
        front.sendall(QUESTION)
        assert front.recv(12) == b"HTTP/1.1 200"  # a web server keeps its connections


def test_a_visitor_that_asks_without_end_and_reads_nothing_is_not_waited_for(seen, monkeypatch):
    monkeypatch.setattr("swarm.desk.guard.QUESTION_SECONDS", 1.0)
    monkeypatch.setattr("swarm.desk.guard.PER_ADDRESS", 10_000)
    listener = open_socket("127.0.0.1", 0)
    with served(lambda: seen.desk.newest, listener), socket.socket() as visitor:
        visitor.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        visitor.settimeout(0.5)
        visitor.connect(listener.getsockname())
        sent, until = 0, time.monotonic() + 20
        with contextlib.suppress(ConnectionError):
            while True:
                assert time.monotonic() < until
                with contextlib.suppress(TimeoutError):
                    sent += visitor.send((100 * QUESTION)[sent % len(QUESTION) :])


def test_a_visitor_waits_for_an_answer_as_long_as_it_takes(seen, monkeypatch):
    async def answer_slowly(scope, receive, send):
        await asyncio.sleep(1.0)
        await PlainTextResponse("here")(scope, receive, send)

    monkeypatch.setattr("swarm.desk.guard.QUESTION_SECONDS", 0.2)
    monkeypatch.setattr("swarm.desk.desk.build_app", lambda *arguments, **options: answer_slowly)
    listener = open_socket("127.0.0.1", 0)
    with served(lambda: seen.desk.newest, listener):
        assert asked_at(listener.getsockname()[1], "127.0.0.2") == b"HTTP/1.1 200"


def test_all_made_up_addresses_share_one_limit():
    assert household_of({"client": ("203.0.113.5", 1)}) == "203.0.113.5"
    assert {household_of({"client": (made_up, 1)}) for made_up in ("one", "two", "\x1b[2J")} == {None}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(
            (host, 200)
            for host in ("localhost:8080", "127.0.0.1", "[::1]:8080", "desk.example.org", "DESK.example.org:443")
        ),
        *((host, 421) for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[", "desk.example")),
    ],
)
def test_a_desk_on_this_machine_is_not_read_by_a_site_whose_name_leads_here(seen, host, status):
    """Such a site could read an invitation that the desk shows. A desk that listens everywhere answers to any name."""
    door, everywhere = Door(None, "https://desk.example.org"), TestClient(build_app(lambda: seen.desk.newest))
    here = TestClient(build_app(lambda: seen.desk.newest, door, only_here=True))
    answer = here.get("/join.svg", headers={"host": host})
    assert answer.status_code == status
    if status == 421:
        assert answer.text.startswith("This desk is shown on its own machine only: start it with --page-url")
        assert everywhere.get("/join.svg", headers={"host": host}).status_code == 200


def test_a_thousand_peers(seen):
    """The curves are full. The bounds leave room for a busy machine."""
    names = [f"peer-{number}" for number in range(1000)]
    for step in range(MAX_POINTS):
        seen.now += 2
        seen.history.look({"ada": seen.record("ada", step)}, seen.now)
    seen.train(*names, steps=range(MAX_POINTS, MAX_POINTS + 2))
    web = seen.web
    assert web.get("/live").text.count("<tr") < MAX_ROWS + 2 * MAX_STRIPS
    assert "All 1,001 peers" in text_of(web.get("/").text)
    assert web.get("/peers").text.count('scope="row"') == PAGE_ROWS
    assert "1 to 100 of 1,001" in text_of(web.get("/peers").text)
    seen.train(*names, steps=range(MAX_POINTS + 2, MAX_POINTS + 3))
    for path, seconds in (("/live", 0.2), ("/", 1.0), ("/peers", 0.2)):
        began = time.perf_counter()
        web.get(path)
        assert time.perf_counter() - began < 10 * seconds, path


def test_peers_are_sorted_as_the_visitor_says_and_peers_that_have_gone_come_last(seen):
    ada, ben = seen.record("ada", 1, rate=9.0, loss=0.5), seen.record("Ben", 1, rate=3.0, loss=float("nan"))
    seen.look(ada, ben, seen.record("cy", 1, rate=50.0))
    for _ in range(2):
        seen.look(seen.record("ada", 1, rate=9.0, loss=0.5), seen.record("Ben", 1, rate=3.0, loss=float("nan")))
    assert names_on(seen, "/peers") == ["ada", "Ben", "cy"]
    assert names_on(seen, "/peers?sort=pace&order=rising") == ["Ben", "ada", "cy"]
    assert names_on(seen, "/peers?sort=name") == ["ada", "Ben", "cy"]
    assert names_on(seen, "/peers?sort=name&order=falling") == ["Ben", "ada", "cy"]
    assert names_on(seen, "/peers?sort=loss&order=rising") == ["ada", "Ben", "cy"]
    assert 'aria-sort="descending"' in seen.web.get("/peers?sort=loss").text


def test_peers_are_found_by_name_and_by_peer_id(seen):
    seen.look(*((f"Qm{number:03}", seen.record(f"Peer {number}", 1)) for number in range(250)))
    assert names_on(seen, "/peers?words=peer+17") == ["Peer 17", *(f"Peer {number}" for number in range(170, 180))]
    assert names_on(seen, "/peers?words=Qm031") == ["Peer 31"]
    assert "No peer is found" in seen.web.get("/peers?words=zoe").text
    pages = [names_on(seen, f"/peers?page={page}") for page in (1, 2, 3)]
    assert sorted(name for page in pages for name in page) == sorted(f"Peer {number}" for number in range(250))
    assert names_on(seen, "/peers?page=4") == pages[2]


@pytest.mark.parametrize(
    "given",
    [
        {"page": "-1", "sort": "__class__", "order": "sideways"},
        {"page": "99999999999999999999", "sort": "", "order": ""},
        {"page": "²", "words": "  "},
    ],
)
def test_an_address_that_makes_no_sense_shows_the_first_page(given):
    assert PeerQuery.of(given) == PeerQuery()


def test_a_visitors_search_words_are_shown_as_text(seen):
    seen.look(*((f"{MARKUP}{number}", seen.record(MARKUP, 1)) for number in range(150)))
    page = seen.web.get("/peers", params={"words": MARKUP}).text
    assert "<img" not in page
    assert 'value="&lt;/b&gt;&lt;img src=x onerror=alert(1)&gt;&amp;&#34;&#39;"' in page
    assert page.count('scope="row"') == PAGE_ROWS


def test_a_visitor_that_asks_for_all_forms_of_the_table_has_to_wait_and_one_form_is_made_once(seen):
    seen.train("ada", steps=range(3))
    web = TestClient(build_app(lambda: seen.desk.newest), client=("203.0.113.5", 1))
    found = [web.get(f"/peers?words={number}").status_code for number in range(2 * FORMS_AT_ONCE)]
    assert set(found) == {200, 429}
    assert web.get("/peers?words=0").status_code == 200


@pytest.mark.parametrize(
    ("lowest", "highest", "from_zero", "expected"),
    [
        (0.0, 1.0, False, (0.0, 1.0, 4)),
        (1.03, 1.74, False, (1.0, 1.8, 4)),
        (250, 340, True, (0, 400, 4)),
        (5, 5, False, (4, 8, 2)),
        (0, 0, True, (0, 0.5, 2)),
        (-1e30, 1e30, False, (-1e30, 1e30, 4)),
    ],
)
def test_levels_are_round_numbers_around_the_curve(lowest, highest, from_zero, expected):
    begin, end, steps = levels(lowest, highest, from_zero)
    assert begin <= lowest * (1 - 1e-9) or begin == pytest.approx(lowest)
    assert end >= highest or end == pytest.approx(highest)
    assert 2 <= steps <= 5
    assert (begin, end, steps) == pytest.approx(expected)


def test_a_curve_is_a_path_with_gaps_and_a_sentence():
    drawn = chart("Loss", [(0, 2.0), (1, None), (2, 1.0), (4, 0.0)], "{:.1f}".format, "update {:.0f}".format)
    assert drawn.path == "M0 0M500 150L1000 300"
    assert drawn.levels == ("2.0", "1.5", "1.0", "0.5", "0.0")
    assert drawn.said == "Loss: 2.0 at update 0, 0.0 at update 4; between 0.0 and 2.0."
    assert chart("Loss", [(1, 2.0)], "{:.1f}".format, str).path == ""
