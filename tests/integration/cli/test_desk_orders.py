"""Orders from the desk's page, in a real browser and a real DHT: they need the key, and the members hear of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from recipe.errors import InputError
from swarm.cli.desk import run_card
from swarm.cli.organiser import deputy, login
from swarm.desk.alerts import Alerts
from swarm.desk.desk import Desk, open_socket, page_url, served
from swarm.desk.organiser.controls import SwarmControls
from swarm.desk.organiser.door import Door
from swarm.desk.watcher import Watcher
from swarm.enrolment.organiser_key import read_key
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht
from swarm.protocol.orders import Order, What

CHROMIUM = shutil.which("chromium")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]


@pytest.fixture
def desk_key(folder, members) -> Path:
    """File of a deputy's key that may give orders and nothing else."""
    path = folder.path / "desk.key"
    assert deputy.main([str(path), "--rights", "control", "--output-dir", str(folder.path.parent.parent)]) == 0
    return path


@pytest.fixture
def looking(folder, members, tmp_path, desk_key) -> Iterator[tuple[str, Callable[[], None], SwarmControls]]:
    """The address of a desk, its next look, and its controls."""
    ada, _ = members
    dht = start_dht(NetworkOptions(initial_peers=ada.addresses, client_mode=True))
    try:
        controls = SwarmControls(dht, ada.manifest, read_key(desk_key))
        watcher = Watcher(dht, ada.manifest, ada.addresses)
        card = run_card(ada.manifest, ada.addresses, None, None)
        desk, listener = Desk(card, tmp_path / "desk.json", Alerts([]), 10), open_socket("127.0.0.1", 0)
        with served(lambda: desk.newest, listener, Door(ada.manifest.authority), controls):
            yield page_url(listener), lambda: desk.turn(watcher.look(), controls.look()), controls
    finally:
        stop_dht(dht)


def test_who_is_logged_in_gives_orders_and_the_members_hear_of_them(folder, members, looking):
    url, look, controls = looking
    for member in members:
        member.train(step=10, rate=member.manifest.recipe.target_batch_size / 10)
    look()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page, stranger = browser.new_page(), browser.new_page()
        refused = stranger.request.post(f"{url}/order", form={"what": "pause", "step": "12", "token": ""})
        assert (refused.status, "log in first" in refused.text()) == (403, True)
        page.goto(f"{url}/login")
        shown = page.locator("#copy-text").inner_text().removeprefix("swarm login ")
        assert login.main([shown, "--yes", "--output-dir", str(folder.path.parent.parent)]) == 0
        page.get_by_role("button", name="Pause").click(timeout=10_000)
        expect(page.locator("main strong")).to_have_text("Pause at step 16.")  # in about 30 s
        assert controls.look().given == ()
        page.get_by_label("From update").fill("1")  # as soon as all can know of it
        page.get_by_role("button", name="Yes, pause").click()
        expect(page.get_by_role("heading", name="What counts now")).to_be_visible()
        for member in members:
            assert member.ordered().given == (Order(12, What.PAUSE),)
        look()
        page.reload()
        expect(page.locator("#orders")).to_contain_text("Pause at step 12")
        page.get_by_label("Updates in all").fill("20")
        page.get_by_role("button", name="Extend").click()
        expect(page.get_by_role("alert")).to_contain_text("extend it to more than that")
        page.goto(url)
        expect(page.locator("#events")).to_contain_text("The organiser ordered: pause at step 12.")
        browser.close()


def test_a_desk_without_a_key_gives_no_orders(members, looking):
    _, _, controls = looking
    ada, _ = members
    ada.train(step=10)
    with pytest.raises(InputError, match="start it with --deputy FILE"):
        SwarmControls(ada.dht, ada.manifest).give(What.PAUSE, 0.0, 20)
    assert controls.look().given == ()
