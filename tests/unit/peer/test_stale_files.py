"""What is left by processes that were killed, and who may take it away."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.peer import stale_files as leftovers
from swarm.peer.stale_files import remember, sweep_earlier


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(leftovers, "TEMPORARY", tmp_path / "tmp")
    return tmp_path


def ended() -> int:
    """The pid of a process that is not there any more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def made(folder, pid: int, number: int) -> str:
    (folder / "shm" / f"torch_{pid}_{number}_1").touch()
    return f"torch_{pid}_{number}_1"


def test_only_what_was_noted_of_the_dead_is_taken_away(folder):
    note, dead, alive = folder / "leftovers.json", ended(), os.getppid()
    of_dead, of_alive, of_other = made(folder, dead, 1), made(folder, alive, 2), made(folder, ended(), 3)
    of_namesake = made(folder, int(f"{dead}0"), 4)
    earlier_life = made(folder, os.getpid(), 5)
    remember(note, [dead, alive, os.getpid()])
    in_another_container = made(folder, dead, 6)
    sweep_earlier(note)
    there = {file.name for file in (folder / "shm").iterdir()}
    assert there == {of_alive, of_other, of_namesake, in_another_container}
    assert not there & {of_dead, earlier_life}


def test_the_sockets_of_the_dead_are_taken_away(folder):
    def sockets(pid: int) -> Path:
        path = folder / "tmp" / f"swarm_{pid}_{secrets.token_hex(4)}"
        path.mkdir()
        (path / "p2pd.sock").touch()
        return path

    note, dead, alive = folder / "leftovers.json", ended(), os.getppid()
    of_dead, of_alive, of_other = sockets(dead), sockets(alive), sockets(ended())
    remember(note, [dead, alive])
    sweep_earlier(note)
    assert not of_dead.exists()
    assert list(of_alive.iterdir())
    assert list(of_other.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        '["torch_*_1_1", "../x", "swarm_1_/../../x", -1, true, null, "torch_99999999999_1_1"]',
        '{"a": 1}',
        "[" * 100_000,
    ],
)
def test_a_note_that_makes_no_sense_sweeps_nothing(folder, text):
    file = made(folder, os.getppid(), 1)
    (folder / "note.json").write_text(text)
    sweep_earlier(folder / "note.json")
    assert (folder / "shm" / file).exists()
