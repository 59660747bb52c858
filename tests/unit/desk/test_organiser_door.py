"""`Door`: which people may log in at a desk and give orders there."""

import asyncio
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fastapi.testclient import TestClient

from recipe.errors import InputError
from swarm.desk.app import build_app
from swarm.desk.desk import is_for_others, open_socket, page_url
from swarm.desk.organiser.controls import SwarmControls
from swarm.desk.organiser.door import MAX_SESSIONS, MAX_VISITS, SESSION_SECONDS, Door
from swarm.desk.organiser.login import LOGIN_SECONDS, Login
from swarm.desk.organiser.web import TRIES_AT_ONCE
from swarm.network.home.interfaces import has_ipv6
from swarm.protocol.certificates import CERTIFICATE, Authority, Right, Signer, warrant
from swarm.protocol.order_book import MAX_DEPUTIES
from swarm.protocol.orders import Order, Orders, What
from swarm.protocol.signed_lists import ORDERS, SignedLists

ORGANISER = Signer(Ed25519PrivateKey.generate())
AUTHORITY = Authority("letters", ORGANISER.public_key)
ADDRESS = "https://desk.example.org"
NOW = int(time.time())


def deputy(rights: Right, begin: int = NOW - 60, end: int = NOW + 10**6) -> Signer:
    key = Ed25519PrivateKey.generate()
    return Signer(key, warrant(ORGANISER, "letters", Signer(key).public_key, rights, begin, end))


class NotedControls:
    """The controls of a run that takes every order."""

    def __init__(self):
        self.can_order, self.orders = True, Orders("letters")

    def plan(self, what: What, value: float) -> Order:
        return Order(7, what, value)

    def give(self, what: What, value: float, at_step: int) -> Order:
        if value == 900:
            raise InputError("The run has 10,000 updates already: extend it to more than that.")
        order = Order(at_step, what, value)
        self.orders = self.orders.with_order(order)
        return order


class House:
    """A desk with a door, and browsers that come to it."""

    def __init__(self, seen, authority=AUTHORITY):
        self.now = float(NOW)
        self.controls = NotedControls()
        self.door = Door(authority, ADDRESS, clock=lambda: self.now)
        card = replace(seen.desk.newest.card, by_invitation=authority is not None)
        self.app = build_app(
            lambda: replace(seen.desk.newest, card=card, orders=self.controls.orders), self.door, self.controls
        )

    def browser(self, address: str = ADDRESS, host: str = "203.0.113.5") -> TestClient:
        return TestClient(self.app, base_url=address, client=(host, 1), headers={"accept": "text/html"})

    def challenge(self, browser: TestClient) -> str:
        return re.search(r"/login/([0-9a-f]{16}) ", browser.get("/login").text)[1]

    def signed(self, code: str, signer: Signer = ORGANISER, **more) -> bytes:
        fields = {"run_id": "letters", "address": ADDRESS, "challenge": code, "time": int(self.now)} | more
        return Login(**fields).signed_by(signer)

    def send(self, challenge: str, data: bytes, host: str = "198.51.100.1"):
        return TestClient(self.app, base_url=ADDRESS, client=(host, 1)).post(f"/login/{challenge}", content=data)

    def logged_in(self) -> TestClient:
        browser = self.browser()
        challenge = self.challenge(browser)
        assert self.send(challenge, self.signed(challenge), host="192.0.2.1").status_code == 200
        assert "Logged in until" in browser.get("/login").text
        return browser


@pytest.fixture
def house(seen) -> House:
    seen.train("ada", "ben", steps=range(5))
    return House(seen)


def is_in(browser: TestClient) -> bool:
    return "Logged in until" in browser.get("/organiser").text


def token_in(browser: TestClient) -> str:
    return re.search(r'name="token" value="([^"]+)"', browser.get("/organiser").text)[1]


@pytest.mark.parametrize("signer", [ORGANISER, deputy(Right.CONTROL), deputy(Right.CONTROL | Right.ENROL)])
def test_the_browser_that_shows_the_code_is_let_in_and_no_other(house, signer):
    other, browser = house.browser(), house.browser()
    challenge = house.challenge(browser)
    assert house.challenge(other) != challenge == house.challenge(browser)
    assert browser.get("/login-state").text == "waiting"
    answer = house.send(challenge, house.signed(challenge, signer))
    assert answer.text == "The browser at 203.0.113.5 may give orders now."
    assert browser.get("/login-state").text == "in"
    assert is_in(browser)
    assert not is_in(other)
    assert other.get("/login-state").text == "waiting"
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("made_up", ["\x1b]0;mine\x07\x1b[2J", "your own browser", "192.0.2.1, 10.0.0.1", ""])
def test_a_web_server_in_front_may_pass_on_something_that_is_no_address(house, made_up, capsys):
    browser = house.browser(host=made_up)
    challenge = house.challenge(browser)
    asked = TestClient(house.app, base_url=ADDRESS).get(f"/login/{challenge}")
    assert asked.text == "an unknown place"
    assert house.send(challenge, house.signed(challenge)).status_code == 200
    assert "the browser at an unknown place, which" in capsys.readouterr().out


def test_a_planted_secret_opens_nothing(house):
    """A page on another port of the same host can set cookies of the organiser's browser: cookies ignore ports."""
    attacker, browser = house.browser(), house.browser()
    challenge = house.challenge(attacker)
    browser.cookies.update(attacker.cookies)
    assert house.challenge(browser) == house.challenge(browser) == challenge, "as long as its page is loaded again"
    house.send(challenge, house.signed(challenge))
    assert attacker.get("/login-state").text == "over"
    assert not is_in(attacker)
    assert browser.get("/login-state").text == "in"
    assert is_in(browser)


def test_cookies_are_for_this_site_alone_and_no_script_reads_them(house):
    browser = house.browser()
    challenge = house.challenge(browser)
    house.send(challenge, house.signed(challenge))
    answer = browser.get("/login", follow_redirects=False)
    (cookie,) = [cookie for cookie in answer.headers.get_list("set-cookie") if "session" in cookie]
    for words in ("__Host-swarm", "Path=/", "HttpOnly", "Secure", "SameSite=strict", f"Max-Age={SESSION_SECONDS:.0f}"):
        assert words in cookie
    assert answer.headers["cache-control"] == "no-store"
    here = house.browser("http://127.0.0.1:8080")
    cookie = here.get("/login").headers["set-cookie"]
    assert "Secure" not in cookie
    assert cookie.startswith("swarm-visit-")


@pytest.mark.parametrize(
    ("signer", "more", "words"),
    [
        (Signer(Ed25519PrivateKey.generate()), {}, "was not signed by the organiser of this run"),
        (deputy(Right.ENROL | Right.REMOVE), {}, "a deputy who has no right to"),
        (deputy(Right.CONTROL, end=NOW - 30), {}, "has ended on"),
        (ORGANISER, {"run_id": "digits"}, "is for run &#39;digits&#39;|is for run 'digits'"),
        (ORGANISER, {"address": "https://evil.example"}, "another code or another desk"),
        (ORGANISER, {"challenge": "0" * 16}, "another code or another desk"),
        (ORGANISER, {"time": NOW - 3600}, "are both clocks right"),
        (ORGANISER, {"time": NOW + 3600}, "are both clocks right"),
    ],
)
def test_a_forged_log_in_is_refused_in_one_sentence(house, signer, more, words):
    browser = house.browser()
    challenge = house.challenge(browser)
    answer = house.send(challenge, house.signed(challenge, signer, **more))
    assert answer.status_code == 403
    assert re.search(words, answer.text)
    assert answer.text.count("\n") == 1
    assert browser.get("/login-state").text == "waiting"
    assert not is_in(browser)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc0", b"x" * 2000, ORGANISER.sign(CERTIFICATE, b"")],
    ids=["empty", "nothing", "long", "another kind"],
)
def test_bytes_that_are_no_log_in_are_refused(house, data):
    browser = house.browser()
    challenge = house.challenge(browser)
    assert house.send(challenge, data).status_code == 403
    assert browser.get("/login-state").text == "waiting"


def test_a_code_counts_for_two_minutes(house):
    browser = house.browser()
    challenge = house.challenge(browser)
    house.now += LOGIN_SECONDS + 1
    assert browser.get("/login-state").text == "over"
    assert "works once, for two minutes" in house.send(challenge, house.signed(challenge)).text
    assert house.challenge(browser) != challenge


def test_a_log_in_counts_once(house):
    challenge = house.challenge(browser := house.browser())
    data = house.signed(challenge)
    assert house.send(challenge, data).status_code == 200
    assert "works once, for two minutes" in house.send(challenge, data).text
    thief = house.browser()
    thief.get("/login")
    assert house.send(house.challenge(thief), data).status_code == 403
    assert not is_in(thief)
    assert "Logged in" in browser.get("/login").text
    assert house.send(challenge, data).status_code == 403


def test_a_desk_that_is_called_by_another_name_lets_no_browser_in(house):
    for address in ("https://evil.example", "http://203.0.113.9:8080", "http://desk.example.org.evil.example"):
        answer = house.browser(address).get("/login")
        assert answer.status_code == 403
        assert "You can log in at https://desk.example.org or on the desk" in answer.text
    for address in ("http://localhost:9000", "http://127.0.0.1", "http://[::1]:8080"):
        assert f"swarm login {address}/login/" in house.browser(address).get("/login").text


def test_a_run_without_an_organiser_has_no_log_in(seen):
    house = House(seen, authority=None)
    for answer in (house.browser().get("/login"), house.send("0" * 16, house.signed("0" * 16))):
        assert answer.status_code == 403
        assert "This run has no organiser" in answer.text
    assert 'href="login"' not in house.browser().get("/").text


def test_a_session_ends_after_twelve_hours_or_with_the_log_out(house):
    browser = house.logged_in()
    house.now += SESSION_SECONDS + 1
    assert not is_in(browser)
    browser = house.logged_in()
    stolen = dict(browser.cookies)
    browser.post("/logout", data={"token": token_in(browser)})
    assert not is_in(browser)
    browser.cookies.update(stolen)
    assert not is_in(browser)


def test_a_revoked_deputy_lets_no_browser_in_and_browsers_that_it_let_in_are_out(house):
    ben, browser = deputy(Right.CONTROL), house.browser()
    challenge = house.challenge(browser)
    house.send(challenge, house.signed(challenge, ben))
    assert is_in(browser)
    token = token_in(browser)
    house.controls.orders = replace(house.controls.orders, revoked=frozenset([ben.public_key]))
    assert not is_in(browser)
    answer = browser.post("/order", data={"token": token, "what": "pause", "step": "7", "value": "0"})
    assert (answer.status_code, house.controls.orders.given) == (403, ())
    assert "The organiser has revoked the deputy who let this browser in" in answer.text
    other = house.browser()
    challenge = house.challenge(other)
    answer = house.send(challenge, house.signed(challenge, ben))
    assert (answer.status_code, "has revoked the deputy who signed it" in answer.text) == (403, True)
    assert is_in(house.logged_in()), "the organiser"


def test_a_screen_reader_is_not_interrupted_by_numbers(house):
    page = house.logged_in().get("/organiser").text
    found = re.findall(r'<p id="(\w+)"[^>]* role="status"[^>]*>(.*?)</p>', page)
    assert found == [("status", "The run is well."), ("away", "")]


def test_an_order_is_asked_for_twice_and_given(house):
    browser = house.logged_in()
    asked = browser.get("/order?what=learning-rate&value=0.5").text
    assert "From step 7 on the learning rate is 0.5 × the recipe&#39;s." in asked
    assert house.controls.orders.given == ()
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', asked))
    page = browser.post("/order", data=fields).text
    assert house.controls.orders.given == (Order(7, What.LEARNING_RATE, 0.5),)
    assert "From step 7 on the learning rate is 0.5 × the recipe&#39;s" in page
    assert "… not yet in effect" in page


def test_a_run_that_is_paused_goes_on_where_it_stands(house):
    """No update comes, so the run could not go on at a later one."""
    house.controls.orders = house.controls.orders.with_order(Order(5, What.PAUSE))
    browser = house.logged_in()
    asked = browser.get("/order?what=resume").text
    assert re.search(r'<input type="hidden" name="step" value="\d+">', asked)
    assert "From update" not in asked
    assert "From update" in browser.get("/order?what=end").text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"what": "sabotage"}, "There is no such order"),
        ({"what": "learning-rate", "value": "1e9"}, "give a number from 0.01 to 100"),
        ({"what": "learning-rate", "value": "nan"}, "give a number from 0.01 to 100"),
        ({"what": "target-batch-size", "value": "2.5"}, "give a whole number"),
        ({"what": "pause", "step": "-1"}, "is not a number"),
        ({"what": "extend", "value": "900"}, "extend it to more than that"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_in_one_sentence(house, fields, words):
    browser = house.logged_in()
    answer = browser.post("/order", data={"token": token_in(browser), "step": "7"} | fields)
    assert answer.status_code == 403
    assert words in answer.text
    assert house.controls.orders.given == ()


def test_a_request_without_a_session_and_the_token_of_its_page_gives_no_order(house):
    browser = house.logged_in()
    stranger = house.browser()
    order = {"what": "pause", "step": "7", "value": "0"}
    assert stranger.post("/order", data=order | {"token": token_in(browser)}).status_code == 403
    assert "login" in str(stranger.get("/order?what=pause").url)
    for token in ({}, {"token": "guessed"}, {"token": "é"}):
        answer = browser.post("/order", data=order | token)
        assert (answer.status_code, "not from this page" in answer.text) == (403, True)
    assert browser.post("/logout", data={"token": "guessed"}).status_code == 403
    assert is_in(browser)
    assert house.controls.orders.given == ()


def test_a_desk_without_a_key_shows_what_to_type(house):
    house.controls.can_order = False
    browser = house.logged_in()
    assert "swarm control pause --run-id letters" in browser.get("/organiser").text
    assert browser.post("/order", data={"token": token_in(browser), "what": "pause", "step": "7"}).status_code == 403


def test_the_organisers_page_claims_no_more_than_its_health(house):
    """The sign is the title's first word, which the page's script renews.

    The page tells which peers may train, not which do.
    """
    page = house.logged_in().get("/organiser").text
    sign = re.search(r'id="sign"[^>]*>([^<]+)<', page)[1]
    assert f"<title>{sign} Organiser of letters · swarm desk</title>" in page
    assert "<dt>State</dt><dd>not paused</dd>" in page


def test_a_deputy_whose_time_is_over_cannot_order(monkeypatch):
    """The time of its warrant ends while the desk runs."""
    dht = SimpleNamespace(take_part=lambda *_: None)
    manifest = SimpleNamespace(run_id="letters", key_prefix="run", authority=AUTHORITY)
    controls = SwarmControls(dht, manifest, deputy(Right.CONTROL, end=NOW + 3600))
    assert controls.can_order
    assert SwarmControls(dht, manifest, ORGANISER).can_order
    monkeypatch.setattr("swarm.desk.organiser.controls.time.time", lambda: NOW + 3601.0)
    assert not controls.can_order
    assert not SwarmControls(dht, manifest).can_order


def test_a_new_list_of_orders_with_a_smaller_number_is_shown(monkeypatch):
    """As where a ninth deputy, with an earlier warrant, takes the place of one that has given more orders."""
    monkeypatch.setattr("swarm.desk.organiser.controls.LOOK_SECONDS", 0.0)
    told = SignedLists(AUTHORITY)
    dht = SimpleNamespace(
        take_part=lambda *_: None,
        get=lambda *_, **__: SimpleNamespace(result=lambda timeout: None),
        newest_list=lambda kind, timeout: told.signed(kind),
    )
    controls = SwarmControls(dht, SimpleNamespace(key_prefix="run", authority=AUTHORITY))
    some = Orders(AUTHORITY.run).with_order(Order(7, What.PAUSE))
    many = some.with_order(Order(8, What.RESUME)).with_order(Order(9, What.PAUSE))
    for number in range(MAX_DEPUTIES):
        orders = many if number == MAX_DEPUTIES - 1 else some
        told.take(ORDERS, orders.signed_by(deputy(Right.CONTROL, begin=NOW - 60 + number)))
    assert (before := controls.look()) == told.orders
    told.take(ORDERS, some.signed_by(deputy(Right.CONTROL, begin=NOW - 600)))
    assert told.orders.number < before.number
    assert controls.look() == told.orders


def test_a_visitor_that_tries_again_and_again_has_to_wait(house):
    found = {house.send("0" * 16, b"nonsense").status_code for _ in range(2 * TRIES_AT_ONCE)}
    assert found == {403, 429}
    assert house.send("0" * 16, b"nonsense", host="198.51.100.2").status_code == 403
    greedy = [house.browser(host="198.51.100.3").get("/login").status_code for _ in range(2 * TRIES_AT_ONCE)]
    assert set(greedy) == {200, 429}
    house.logged_in()


def test_a_visitor_that_sends_half_a_form_and_goes_leaves_no_traceback(house):
    path, sent = f"/login/{'0' * 16}", []
    headers = [(b"host", b"desk.example.org"), (b"content-length", b"100")]
    scope = {"type": "http", "method": "POST", "scheme": "https", "path": path, "query_string": b"", "headers": headers}

    async def gone():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asyncio.run(house.app(scope | {"client": ("203.0.113.5", 1)}, gone, send))
    assert sent[0]["status"] == 403


def test_the_memory_for_visits_and_sessions_of_strangers_is_bounded():
    door = Door(AUTHORITY, ADDRESS)
    visits = [door.knock("", ADDRESS, "203.0.113.5") for _ in range(MAX_VISITS + 9)]
    states = [door.state_of(secret) for secret, _ in visits]
    assert states == 9 * ["over"] + MAX_VISITS * ["waiting"]
    secret, visit = visits[9]
    door.let_in(visit.challenge, Login("letters", ADDRESS, visit.challenge, int(time.time())).signed_by(ORGANISER))
    visits += [door.knock("", ADDRESS, "203.0.113.5") for _ in range(MAX_VISITS + 9)]
    assert door.state_of(secret) == "in", "strangers do not push out a browser that was let in"
    assert [door.state_of(secret) for secret, _ in visits].count("waiting") == MAX_VISITS - 1
    entered = []
    for secret, visit in visits[-MAX_SESSIONS - 1 :]:
        login = Login("letters", ADDRESS, visit.challenge, int(time.time()))
        door.let_in(visit.challenge, login.signed_by(ORGANISER))
        entered.append(door.enter(secret)[0])
    for secret in entered[1:]:
        door.session(secret)
    with pytest.raises(Exception, match="log in first"):
        door.session(entered[0])


@pytest.mark.parametrize(
    "url", ["http://desk.example.org", "https://", "desk", "https://desk.example.org:x", "https://a@b", "https://a/?b"]
)
def test_an_unsafe_address_is_refused(url):
    with pytest.raises(InputError, match="--page-url has to be like"):
        Door(AUTHORITY, url)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://desk.example.org:443", "desk.example.org"),
        ("https://Desk.Example.org:/", "desk.example.org"),
        ("https://[2001:db8::443]:443/desk", "[2001:db8::443]"),
        ("https://[2001:db8::443]", "[2001:db8::443]"),
        ("https://desk.example.org:8443", "desk.example.org:8443"),
    ],
)
def test_a_browser_is_known_by_the_host_that_it_calls(url, host):
    """Browsers leave out the usual port."""
    door = Door(AUTHORITY, url)
    assert door.address_at(host) == door.page_url == f"https://{host}{'/desk' * url.endswith('/desk')}"


@pytest.mark.parametrize(
    ("host", "shown", "for_others"),
    [
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", False),
        pytest.param("::", "[::1]", True, marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
    ],
)
def test_the_address_that_the_desk_prints_is_one_where_the_organiser_can_log_in(host, shown, for_others):
    with open_socket(host, 0) as listener:
        url = page_url(listener)
        assert url == f"http://{shown}:{listener.getsockname()[1]}"
        assert is_for_others(listener) == for_others
    assert Door(AUTHORITY).address_at(url.removeprefix("http://")) == url
