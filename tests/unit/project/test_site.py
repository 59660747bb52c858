"""The site of docs/ builds without warnings. It needs the optional extra `docs`."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.helpers.paths import ROOT

pytest.importorskip("mkdocs", reason="the extra docs is not installed: make docs does it")

PAGES = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
OF_THE_ROOT = {"developer/contributing.md", "developer/changelog.md"}


@pytest.fixture
def hooks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import site_hooks

    return site_hooks


def rewritten(hooks, page: str, markdown: str, pages: tuple[str, ...] = ("quickstart.md", "howto/join.md")) -> str:
    files = SimpleNamespace(get_file_from_path=lambda name: name if name in (*pages, *OF_THE_ROOT) else None)
    return hooks.on_page_markdown(markdown, SimpleNamespace(file=SimpleNamespace(src_uri=page)), None, files)


def test_links_work_on_the_site_as_in_the_repository(hooks, monkeypatch):
    assert rewritten(hooks, "howto/join.md", "[a](../quickstart.md#b)") == "[a](../quickstart.md#b)"
    assert rewritten(hooks, "howto/join.md", "[`a`](../../CHANGELOG.md)") == "[`a`](../developer/changelog.md)"
    assert rewritten(hooks, "developer/contributing.md", "[a](docs/howto/join.md#b)") == "[a](../howto/join.md#b)"
    assert rewritten(hooks, "quickstart.md", "[a](../swarm/README.md#b) ![c](d.png)") == "a ![c](d.png)"
    monkeypatch.setattr(hooks, "REPOSITORY", "https://example.org/code")
    assert (
        rewritten(hooks, "quickstart.md", "[a](../swarm/README.md)") == "[a](https://example.org/code/swarm/README.md)"
    )


@pytest.mark.parametrize(
    "link", ["[a](missing.md)", "[a](https://example.org)", "[a](#b)", "```\n[a](../README.md)\n```"]
)
def test_other_links_stay_as_they_are(hooks, link):
    assert rewritten(hooks, "quickstart.md", link) == link


def test_it_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").exists()
