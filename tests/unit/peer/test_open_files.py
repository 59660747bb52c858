"""A peer says when one of its processes has nearly as many files open as it may."""

import queue
import resource
import threading

import psutil
import pytest

from swarm.peer import supervisor
from swarm.peer.open_files import OpenFiles


@pytest.fixture
def few_files():
    """Let this process open two more files than it has. To count them takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 2, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_peer_with_room_for_files_says_nothing():
    assert OpenFiles().look({"p2pd": psutil.Process()}) == []


def test_a_peer_that_runs_out_of_files_says_so_once(few_files):
    files, processes = OpenFiles(), {"p2pd": psutil.Process()}
    (sentence,) = files.look(processes)
    assert sentence.startswith("p2pd has ")
    assert "ulimit -n" in sentence
    assert files.look(processes) == []


def test_the_trainer_process_is_watched_as_well(few_files, monkeypatch, tmp_path):
    warnings: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(supervisor.logger, "warning", warnings.put)
    leaves = threading.Event()
    supervisor.Supervisor(dict, pytest.fail, tmp_path / "leftovers.json", leaves).setup(None, None, "fit")
    try:
        assert warnings.get(timeout=10).startswith("The trainer process has ")
    finally:
        leaves.set()
