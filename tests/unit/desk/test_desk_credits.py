"""The peers that have given most by the run's ledger, which the desk fetches and adds up by itself."""

import json
import os
import re
import shutil
from html.parser import HTMLParser

import pytest

from recipe.errors import InputError
from swarm.desk.desk import Desk
from swarm.desk.ledger import bookkeeper
from swarm.desk.ledger.bookkeeper import Bookkeeper
from swarm.desk.ledger.credits import Credits
from swarm.ledger.collector import Collected
from tests.helpers.ledgers.ledger_run import NAMES, RUN, SAMPLES, LedgerRun, owner, where

CONFIRMED = [
    {"peer": "QmBen", "name": "ben", "samples": 900, "updates": 9},
    {"peer": "QmAda", "name": "a<b>da", "samples": 5000},
]


def write(path, run: str = "letters.abc", peers: list[dict] = CONFIRMED, **more) -> None:
    before = path.stat().st_mtime_ns if path.exists() else 10**18
    path.write_text(json.dumps({"run": run, "peers": peers} | more))
    os.utime(path, ns=(before + 10**9, before + 10**9))


@pytest.fixture
def credits(tmp_path) -> Credits:
    return Credits(tmp_path / "credits.json", "letters.abc")


@pytest.fixture
def shown(seen, credits):
    """A function that looks again. It returns the top peers with their samples, and the text of their table."""
    desk = Desk(seen.desk.newest.card, seen.path, seen.alerts, 10, credits, lambda: seen.now)

    def look() -> tuple[list[str], str]:
        seen.desk = desk
        seen.train("zoe", steps=range(3))
        page = seen.web.get("/live").text
        table = page[page.index("leaders-title") :]
        return re.findall(r"<bdi>(.*?)</bdi>.*?number\">(.*?)<", table, re.DOTALL), table

    return look


def test_the_top_peers_are_from_the_ledger_as_soon_as_there_is_one(shown, tmp_path):
    leaders, said = shown()
    assert [name for name, _ in leaders] == ["zoe"]
    assert "Claimed, not audited" in said
    write(tmp_path / "credits.json", peers=[])
    leaders, said = shown()
    assert [name for name, _ in leaders] == ["zoe"], "the ledger of a run that has just begun is empty"
    assert "Claimed, not audited" in said
    write(tmp_path / "credits.json")
    leaders, said = shown()
    assert leaders == [("a&lt;b&gt;da", "5,000"), ("ben", "900")]
    assert "Confirmed samples" in said
    assert "From the ledger of" in said
    assert "were changed" not in said


class WhatStays(HTMLParser):
    """The parts of a page that its script does not fetch again: all but `data-live` elements and the title's sign."""

    def __init__(self, page: str):
        super().__init__()
        self.parts: list[tuple] = []
        self._left_out: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        given = dict(attributes)
        if self._left_out:
            self._left_out += [tag] if tag == self._left_out[0] else []
            return
        if given.keys() & {"data-class", "data-live"}:
            given.pop("class", None)
        if "data-live" in given or tag == "title":
            self._left_out = [tag]
        self.parts.append((tag, given))

    def handle_endtag(self, tag: str) -> None:
        if self._left_out and tag == self._left_out[0]:
            self._left_out.pop()

    def handle_data(self, data: str) -> None:
        if not self._left_out and data.strip():
            self.parts.append((data.split(),))


def test_a_page_that_stays_open_says_where_its_numbers_are_from(shown, seen, credits, tmp_path):
    shown()
    before = WhatStays(seen.web.get("/").text)
    assert any("Join" in part[0] for part in before.parts)
    write(tmp_path / "credits.json", findings=[{"kind": "CHANGED"}])
    credits.trouble = "Its folder is full."
    shown()
    page = seen.web.get("/").text
    assert "From the ledger of" in page
    assert WhatStays(page).parts == before.parts
    live = seen.web.get("/live").text
    for element in re.findall(r'id="([^"]+)"[^>]*data-(?:live|class)', page):
        assert f'id="{element}"' in live, "what is fetched again has it"


def test_changed_lines_and_what_is_missing_are_said(shown, credits, tmp_path):
    write(tmp_path / "credits.json", findings=[{"kind": "CHANGED"}] * 3, more_findings=2)
    credits.trouble = "Its folder is full."
    _, said = shown()
    assert "5 lines of it were changed" in said
    assert "The ledger is not up to date. Its folder is full." in said


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"run": "letters.abc", "peers": [{}]}'])
def test_a_file_that_cannot_be_read_changes_nothing(shown, tmp_path, content):
    path = tmp_path / "credits.json"
    write(path)
    before, _ = shown()
    path.write_bytes(content)
    os.utime(path, ns=(2 * 10**18, 2 * 10**18))
    assert shown()[0] == before


def test_the_ledger_of_another_run_counts_for_nothing(shown, tmp_path):
    write(tmp_path / "credits.json", run="digits.abc")
    assert [name for name, _ in shown()[0]] == ["zoe"]


# ---- the bookkeeper --------------------------------------------------------------------------------------------------


class Swarm:
    """A swarm that hands over the ledgers of a run without a network. It raises `problem` instead, if there is one."""

    def __init__(self, folder):
        self.run, self.folder = LedgerRun(folder / "letters"), folder / "ledger" / RUN
        self.problem: Exception | None = None
        self.is_full = self.is_peer_full = False

    def train(self) -> None:
        self.run.start(*NAMES)
        self.run.update()
        self.run.close()

    def hand_over(self) -> Collected:
        if self.problem is not None:
            raise self.problem
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self.run.ledgers:
            shutil.copy(self.run.path(name), self.folder / f"{owner(name).own}-0.jsonl")
        return Collected(1, tuple(self.run.ledgers), {}, self.is_full, self.is_peer_full)


@pytest.fixture
def swarm(tmp_path) -> Swarm:
    return Swarm(tmp_path)


@pytest.fixture
def books(swarm, monkeypatch) -> Bookkeeper:
    monkeypatch.setattr(bookkeeper, "NICE", 0)  # beside other tests it would yield to all of them
    return Bookkeeper(swarm.hand_over, swarm.folder, Credits(swarm.folder.with_name(f"{RUN}.credits.json"), RUN))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_signed_updates_are_added_up_and_a_changed_line_costs_only_its_own_peer(swarm, books):
    books.turn()
    assert not books.credits.trouble, "no peer has a ledger yet"
    half = swarm.folder.with_name(f".{RUN}.credits.json.7.tmp")
    half.parent.mkdir(parents=True, exist_ok=True)
    half.write_bytes(b"of a desk that was killed")
    os.utime(half, (1, 1))
    of_another = half.with_name(f".{RUN}.credits.json.8.tmp")
    of_another.write_bytes(b"of a desk that writes it now")
    swarm.train()
    swarm.hand_over()
    lines = swarm.run.lines("ben")
    (update,) = where(lines)
    lines[update] = lines[update].replace(b'",64,', b'",99,')
    swarm.run.write("ben", lines)
    swarm.is_full = True
    books.turn()
    books.credits.look()
    assert books.credits.num_findings
    assert {peer.name: peer.samples for peer in books.credits.peers} == SAMPLES, "two of three confirm it"
    assert "--ledger-mib" in books.credits.trouble
    assert not half.exists()
    assert of_another.exists()


def test_a_peer_that_has_used_up_its_part_of_the_folder_is_said(swarm, books):
    """Its credit stands still while the ledger's time is fresh."""
    swarm.is_peer_full = True
    books.turn()
    assert books.credits.trouble.startswith("A peer has more lines than its part of the folder")


def test_a_swarm_that_does_not_answer_is_said(swarm, books):
    swarm.problem = TimeoutError()
    books.turn()
    assert books.credits.trouble == "No peer handed it over the last time."


def test_a_folder_into_which_another_program_fetches_is_said(swarm, books):
    swarm.problem = InputError("A desk keeps its ledgers there.")
    books.turn()
    assert books.credits.trouble == "A desk keeps its ledgers there."


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_ledger_of_another_run_in_the_folder_is_said_and_changes_nothing(swarm, books):
    swarm.train()
    swarm.hand_over()
    other = LedgerRun(swarm.folder, run="digits-0123abcd")
    other.start("anna")
    other.update({"anna": 96})
    other.close()
    books.turn()
    assert books.credits.trouble.startswith("The desk could not add it up: see why with swarm ledger verify")
    books.credits.look()
    assert books.credits.time is None


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_ledger_that_names_too_many_peers_is_said_and_changes_nothing(swarm, books, monkeypatch):
    monkeypatch.setattr(bookkeeper, "MAX_FILE_BYTES", 10)
    swarm.train()
    books.turn()
    assert books.credits.trouble.startswith("It names more peers than this page can show")
    books.credits.look()
    assert books.credits.time is None


def test_a_desk_that_ends_waits_for_no_adding_up(swarm, books):
    swarm.train()
    books.stop()
    books.start()
    books.stop()
    assert not books.is_alive()
    assert books.credits.time is None
