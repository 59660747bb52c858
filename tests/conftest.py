"""Test configuration: lanes, so that no two swarms of a kind compete for two cores, and what test files share."""

import os
import signal
import sys
from contextlib import ExitStack

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of all lanes on two cores would wait for each other
# Containers set it. Then each worker would rewrite all tests, and each of a hundred programs would compile our code.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from swarm.runtime.imports import quick_imports
from tests.helpers.programs.importer import importing

sys.dont_write_bytecode = False
signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell starts background programs with Ctrl-C ignored, and programs that a test interrupts would inherit that."""

# The same inputs in every run, or a failure would come and go. No deadline: an input may take long on a busy machine.
settings.register_profile("swarm", deadline=None, derandomize=True, database=None)
settings.load_profile("swarm")

LANES = ("tests/e2e/", "tests/e2e/lab/", "tests/integration/swarms/", "tests/e2e/attacks/", "tests/integration/faults/")
"""Folders whose tests run one after the other, the longest first: programs, the lab and measurements, forked swarms,
attacks, faults."""
PLACES = (*LANES, "tests/integration/rounds/", "tests/integration/training/", "tests/")
"""Order of the tests. Rounds and trainings fill the lanes after the swarms: rounds wait while trainings compute."""


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that imports for all, once, in the process that starts the test workers."""
    if not hasattr(config, "workerinput"):
        config.add_cleanup((stack := ExitStack()).close)
        stack.enter_context(importing())


def place_of(nodeid: str) -> str:
    return max((place for place in PLACES if nodeid.startswith(place)), key=len)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import all tests, and what they import, quickly; each worker does so."""
    with quick_imports():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACES.index(place_of(item.nodeid)))


class LaneScheduling(LoadScopeScheduling):
    """Gives a worker one file, or all files of one of the `LANES`."""

    def _split_scope(self, nodeid: str) -> str:
        place = place_of(nodeid)
        return place if place in LANES else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config, log) -> LaneScheduling:
    return LaneScheduling(config, log)


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """Return a function that runs `swarm.peer.main`, which has to refuse in one sentence, and returns that sentence."""
    from swarm.peer import main as peer

    monkeypatch.delenv("INITIAL_PEERS", raising=False)
    monkeypatch.setenv("HIVEMIND_LOGLEVEL", "WARNING")
    monkeypatch.setattr(peer, "reap", lambda: None)  # the code that started a child waits for it
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
