"""The reference pages say what the code says, and their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_no_page_of_the_reference_is_stale():
    done = subprocess.run(
        [sys.executable, DOCS / "make_reference.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_docstrings_of_both_kinds_are_read(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    from generate.source import parse

    google = parse(
        "What.\n\nMore.\n\nArgs:\n    one: first,\n        still first.\n    two: second.\n\n"
        "Raises:\n    ValueError: bad."
    )
    sphinx = parse(
        "What.\n\nMore.\n\n:param one: first,\n    still first.\n:param two: second.\n:raises ValueError: bad."
    )
    assert google == sphinx
    assert google.params == {"one": "first, still first.", "two": "second."}
    assert google.raises == [("ValueError", "bad.")]
    assert google.text == "What.\n\nMore."


def test_what_the_site_shows_is_there():
    pages = set(re.findall(r": ([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE))
    missing = {
        page for page in pages if page.startswith(("reference/", "developer/rooms")) and not (DOCS / page).exists()
    }
    assert not missing
