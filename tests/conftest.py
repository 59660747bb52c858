"""Three lanes of tests: two of swarms of whole programs, and one of all the rest; and what files share."""

import signal

import pytest
from xdist.scheduler import LoadScopeScheduling

PROGRAMS = (
    {"launchers", "memory", "peer", "peer_input"},
    {"analysis_lab", "analysis_wan", "nat", "notebooks", "reachability", "soak"},
)
"""Files that start swarms of several processes: no more than two of these at once, or two cores would starve them."""


class Lanes(LoadScopeScheduling):
    """One worker for each part of :data:`PROGRAMS`, a third one that takes one file after the other."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        name = file.rpartition("/")[2].removeprefix("test_").removesuffix(".py")
        return next((f"programs {number}" for number, names in enumerate(PROGRAMS) if name in names), file)


def pytest_xdist_make_scheduler(config, log) -> Lanes:
    return Lanes(config, log)


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """Runs ``swarm.peer.main``, which has to refuse in one sentence; returns it."""
    from swarm import peer

    monkeypatch.setenv("INITIAL_PEERS", "")
    monkeypatch.setenv("HIVEMIND_LOGLEVEL", "WARNING")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str) -> str:
        if "--output-dir" not in arguments:
            arguments = (*arguments, "--output-dir", str(tmp_path / "runs"))
        assert peer.main(list(arguments)) == 2
        errors = capsys.readouterr().err.strip().splitlines()
        assert len(errors) == 1
        assert errors[0].startswith("error: ")
        return errors[0]

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
