"""Who has given most by the run's ledger."""

import json
import os
import re

import pytest

from recipe.errors import InputError
from swarm.desk.credits import Credits
from swarm.desk.desk import Desk

CONFIRMED = [
    {"peer": "QmBen", "name": "ben", "samples": 900, "updates": 9},
    {"peer": "QmAda", "name": "a<b>da", "samples": 5000},
]


def write(path, run: str = "letters.abc", peers: list[dict] = CONFIRMED, **more) -> None:
    before = path.stat().st_mtime_ns if path.exists() else 10**18
    path.write_text(json.dumps({"run": run, "peers": peers} | more))
    os.utime(path, ns=(before + 10**9, before + 10**9))


@pytest.fixture
def shown(seen, tmp_path):
    """The names and samples of those who have given most, after another look; and all that is said of them."""
    credits = Credits(tmp_path / "credits.json", "letters.abc")
    desk = Desk(seen.desk.newest.card, seen.path, seen.alerts, 10, credits, lambda: seen.now)

    def look() -> tuple[list[str], str]:
        seen.desk = desk
        seen.train("zoe", steps=range(3))
        page = seen.web.get("/live").text
        table = page[page.index("leaders-title") :]
        return re.findall(r"<bdi>(.*?)</bdi>.*?number\">(.*?)<", table, re.DOTALL), table

    return look


def test_who_has_given_most_is_from_the_ledger_as_soon_as_there_is_one(shown, tmp_path):
    leaders, said = shown()
    assert [name for name, _ in leaders] == ["zoe"]
    assert "Claimed, not audited" in said
    write(tmp_path / "credits.json")
    leaders, said = shown()
    assert leaders == [("a&lt;b&gt;da", "5,000"), ("ben", "900")]
    assert "Confirmed samples" in said
    assert "From the ledger of" in said


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"run": "letters.abc", "peers": [{}]}'])
def test_a_file_that_cannot_be_read_changes_nothing_while_the_desk_runs(shown, tmp_path, content):
    path = tmp_path / "credits.json"
    write(path)
    before, _ = shown()
    path.write_bytes(content)
    os.utime(path, ns=(2 * 10**18, 2 * 10**18))
    assert shown()[0] == before
    with pytest.raises(InputError, match="cannot be used"):
        Credits(path, "letters.abc")


def test_the_ledger_of_another_run_counts_for_nothing(shown, tmp_path):
    write(tmp_path / "credits.json", run="digits.abc")
    assert [name for name, _ in shown()[0]] == ["zoe"]
    with pytest.raises(InputError, match="it is of another run"):
        Credits(tmp_path / "credits.json", "letters.abc")
