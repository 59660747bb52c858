"""docs/developer/walks.md: each stop is the name of something that exists, and a walk is short."""

import importlib
import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "developer" / "walks.md").read_text()
MOST_STOPS = 7
STOP = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)
MENTION = re.compile(r"`([\w.]+)`\s+in\s+`([\w/]+\.py)`")
WALKS = {
    section.splitlines()[0]: [(int(number), file, name) for number, file, name in STOP.findall(section)]
    for section in PAGE.split("\n## ")[1:]
}
NAMED = [(file, name) for stops in WALKS.values() for _, file, name in stops]
NAMED += [(file, name) for name, file in MENTION.findall(PAGE)]


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_a_walk_names_is_there(file, name):
    found = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    assert Path(found.__file__) == ROOT / file
    for part in name.split("."):
        is_field = part in getattr(found, "__dataclass_fields__", {})  # without a default it is no attribute of a class
        assert is_field or hasattr(found, part), f"{file} has no {name}"
        found = getattr(found, part, None)


@pytest.mark.parametrize("value", ["`--initial-peers`", "`target_batch_size`"])
def test_each_walk_has_at_most_seven_stops(value):
    (stops,) = (stops for title, stops in WALKS.items() if value in title)
    assert [number for number, *_ in stops] == list(range(1, len(stops) + 1))
    assert 1 < len(stops) <= MOST_STOPS


def test_every_row_of_the_tables_is_read():
    assert len(re.findall(r"^\| \d", PAGE, re.MULTILINE)) == sum(map(len, WALKS.values()))
