"""A version of Hivemind other than the one that is repaired is refused in a sentence."""

import subprocess
import sys
from importlib import metadata

import pytest

from swarm.cli import app, checks, watch
from swarm.runtime import hivemind_version
from tests.helpers.paths import ROOT

PEER = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture
def another_hivemind(monkeypatch):
    def version(package):
        return "1.2.0" if package == "hivemind" else metadata.distribution(package).version

    monkeypatch.setattr(hivemind_version, "version", version)


def test_the_expected_version_is_installed():
    hivemind_version.check_hivemind_version()


def test_a_peer_does_not_start(another_hivemind, refused):
    assert "pip install hivemind==1.1.12" in refused()


def test_an_observer_does_not_start(another_hivemind, capsys):
    assert watch.main([PEER]) == 2
    assert capsys.readouterr().err.startswith("error: Hivemind 1.2.0 is installed")


def test_the_doctor_says_so(another_hivemind):
    found = checks.check_versions()
    assert found.state == "failed"
    assert "hivemind==1.1.12" in found.found


@pytest.mark.parametrize("module", ["swarm.training.strategy", "swarm.network.dht_options"])
def test_a_library_user_reads_the_sentence_before_anything_is_repaired(module):
    code = (
        "import sys\nfrom importlib import metadata\nmetadata.version = lambda package: '1.2.0'\n"
        f"try:\n    import {module}\n"
        "except ValueError as error:\n    print(error, 'hivemind' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.stdout.startswith("Hivemind 1.2.0 is installed, and a peer works with 1.1.12 only.")
    assert ran.stdout.strip().endswith("False")


def test_a_command_that_imports_hivemind_at_once_says_so(another_hivemind, monkeypatch, capsys):
    """`swarm bench` does so, which takes seconds to import."""
    monkeypatch.setattr(app.importlib, "import_module", lambda _: hivemind_version.check_hivemind_version())
    assert app.main(["bench"]) == 2
    assert capsys.readouterr().err.startswith("error: Hivemind 1.2.0 is installed")
