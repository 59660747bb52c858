"""A peer notices that one of its processes has died, and takes nothing else for such a death."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from swarm.peer.supervisor import LOOK_SECONDS, Supervisor


@pytest.fixture
def part() -> Iterator[subprocess.Popen]:
    """A process that lives until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def supervisor_of(
    part: subprocess.Popen, tmp_path, leaves: threading.Event | None = None
) -> tuple[Supervisor, threading.Event]:
    told = threading.Event()
    process = psutil.Process(part.pid)
    supervisor = Supervisor(
        lambda: {"p2pd": process}, lambda name: told.set(), tmp_path / "note.json", leaves or threading.Event()
    )
    supervisor.setup(None, None, "fit")
    return supervisor, told


def test_a_part_that_dies_is_noticed(part, tmp_path):
    supervisor, told = supervisor_of(part, tmp_path)
    part.kill()
    assert told.wait(10 * LOOK_SECONDS)
    assert supervisor.found == "p2pd"


def test_an_error_because_of_a_part_is_told_from_others(part, tmp_path):
    supervisor, _ = supervisor_of(part, tmp_path)
    part.kill()
    part.wait()
    supervisor.on_exception(None, None, RuntimeError("it does not answer"))
    assert supervisor.found == "p2pd"


def test_after_another_error_parts_end_because_they_should(part, tmp_path):
    supervisor, told = supervisor_of(part, tmp_path)
    supervisor.on_exception(None, None, RuntimeError("the model is another one"))
    part.kill()
    part.wait()
    assert not told.wait(2 * LOOK_SECONDS)
    assert supervisor.found is None


def test_a_peer_that_leaves_misses_none_of_its_parts(part, tmp_path):
    leaves = threading.Event()
    supervisor, told = supervisor_of(part, tmp_path, leaves)
    leaves.set()
    part.kill()
    part.wait()
    supervisor.on_exception(None, None, RuntimeError("everything is taken down"))
    assert not told.wait(2 * LOOK_SECONDS)
    assert supervisor.found is None


def test_what_ends_on_purpose_while_the_supervisor_looks_is_not_missed(part, tmp_path):
    """The training ends, and its parts with it, after the look has begun."""
    told, process = threading.Event(), psutil.Process(part.pid)

    def processes() -> dict[str, psutil.Process]:
        if threading.current_thread().name == "supervisor":
            supervisor.on_train_end(None, None)
            part.kill()
            part.wait()
        return {"p2pd": process}

    supervisor = Supervisor(processes, lambda name: told.set(), tmp_path / "note.json", threading.Event())
    supervisor.setup(None, None, "fit")
    assert not told.wait(3 * LOOK_SECONDS)
    assert part.returncode is not None
    assert supervisor.found is None


def test_without_a_training_nothing_is_missed_either(part, tmp_path):
    supervisor, told = supervisor_of(part, tmp_path)
    supervisor.teardown(None, None, "fit")
    part.kill()
    part.wait()
    assert not told.wait(2 * LOOK_SECONDS)
