"""Another Hivemind than the one whose inner parts are repaired is refused in a sentence."""

from importlib import metadata

import pytest

from swarm.cli import checks, watch
from swarm.runtime import hivemind_version

PEER = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture
def another_hivemind(monkeypatch):
    def version(package):
        return "1.2.0" if package == "hivemind" else metadata.distribution(package).version

    monkeypatch.setattr(hivemind_version, "version", version)


def test_this_one_is_installed():
    hivemind_version.check_hivemind_version()


def test_a_peer_does_not_start(another_hivemind, refused):
    assert "pip install hivemind==1.1.12" in refused()


def test_nobody_watches(another_hivemind, capsys):
    assert watch.main([PEER]) == 2
    assert capsys.readouterr().err.startswith("error: Hivemind 1.2.0 is installed")


def test_the_doctor_says_so(another_hivemind):
    found = checks.check_versions()
    assert found.state == "failed"
    assert "hivemind==1.1.12" in found.found
