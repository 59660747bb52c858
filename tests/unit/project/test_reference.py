"""The reference pages match the code, and their links lead somewhere."""

import json
import re
import subprocess
import sys

from tests.helpers.paths import ROOT

DOCS = ROOT / "docs"


def test_no_page_of_the_reference_is_stale():
    done = subprocess.run(
        [sys.executable, DOCS / "make_reference.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_docstrings_are_read(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    from generate.source import parse

    found = parse(
        "What.\n\nMore.\n\nArgs:\n    one: first,\n        still first.\n    two: second.\n\n"
        "Raises:\n    ValueError: bad."
    )
    assert found.params == {"one": "first, still first.", "two": "second."}
    assert found.raises == [("ValueError", "bad.")]
    assert found.text == "What.\n\nMore."


def test_what_the_site_shows_is_there():
    pages = set(re.findall(r": ([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE))
    missing = {
        page for page in pages if page.startswith(("reference/", "developer/rooms")) and not (DOCS / page).exists()
    }
    assert not missing


def test_where_the_rooms_page_points_to_is_there(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    from generate.source import find

    text = (DOCS / "developer" / "rooms.md").read_text()
    for path in re.findall(r"`(swarm/[a-z_/]+\.py)`", text):
        assert (DOCS.parent / path).is_file(), path
    named = re.findall(r"`(swarm/[a-z_/]+)\.py`, `([\w.]+)`", text)
    assert len(named) > 40, "most lines of the page name a class or a function"
    for path, name in named:
        find(path.replace("/", "."), name)


def test_the_run_picture_is_drawn_from_run_folders(tmp_path):
    run = tmp_path / "run"
    for peer, outcomes in (("ada", ["averaged", "the peers did not meet", "averaged"]), ("bob", ["averaged"])):
        (run / peer).mkdir(parents=True)
        rounds = [{"step": step, "outcome": outcome, "own_samples": 8} for step, outcome in enumerate(outcomes, 1)]
        metrics = [{"step": 1, "swarm/loss": 2.0, "perf/swarm_samples_per_second": 9.0, "perf/samples_per_second": 4.0}]
        for name, lines in (("rounds", rounds), ("metrics", [*metrics, {"step": 1, "val/top1": 0.5}])):
            (run / peer / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    picture = tmp_path / "run.png"
    subprocess.run([sys.executable, DOCS / "make_run_picture.py", run, "-o", picture], check=True, timeout=60)
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = subprocess.run(
        [sys.executable, DOCS / "make_run_picture.py", tmp_path / "no"], capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")


def test_docstrings_have_one_form():
    """Google's: "Args:", "Returns:", "Raises:"; code in single backticks."""
    other = re.compile(r"^\s*(\"\"\")?:(param|returns?|raises)\b|:(class|func|meth|attr|mod):`", re.MULTILINE)
    for package in ("analysis", "baseline_ddp", "docs", "peers", "recipe", "swarm", "tests"):
        for path in (DOCS.parent / package).rglob("*.py"):
            if path.name != "test_reference.py":
                assert not other.search(path.read_text()), path
