"""Two lanes of tests: swarms of whole programs go one after the other, beside all the rest; and what files share."""

import signal

import pytest
from xdist.scheduler import LoadScopeScheduling

PROGRAMS = {
    *("analysis_lab", "analysis_wan", "launchers", "memory"),
    *("nat", "notebooks", "peer", "peer_input", "reachability", "soak"),
}
"""Files that start swarms of several processes: two of these at once would starve on two cores."""


class Lanes(LoadScopeScheduling):
    """One worker takes all files of :data:`PROGRAMS`, the other one file after the other."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        name = file.rpartition("/")[2].removeprefix("test_").removesuffix(".py")
        return "programs" if name in PROGRAMS else file


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
