"""What killed processes leave behind, and when it is removed."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.peer import stale_files
from swarm.peer.stale_files import remember, sweep_earlier


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(stale_files, "TEMPORARY", tmp_path / "tmp")
    return tmp_path


def ended() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def sockets(folder: Path, pid: int) -> Path:
    path = folder / "tmp" / f"swarm_{pid}_{secrets.token_hex(4)}"
    path.mkdir()
    (path / "p2pd.sock").touch()
    return path


def test_only_noted_files_of_dead_processes_are_removed(folder):
    note, dead, alive = folder / "note.json", ended(), os.getppid()
    of_dead, of_alive, of_other = sockets(folder, dead), sockets(folder, alive), sockets(folder, ended())
    of_namesake, earlier_life = sockets(folder, int(f"{dead}0")), sockets(folder, os.getpid())
    remember(note, [dead, alive, os.getpid()])
    in_another_container = sockets(folder, dead)
    sweep_earlier(note)
    there = set((folder / "tmp").iterdir())
    assert there == {of_alive, of_other, of_namesake, in_another_container}
    assert not there & {of_dead, earlier_life}
    assert list(of_alive.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        '["swarm_*_aaaaaaaa", "../x", "swarm_1_/../../x", -1, true, null, "swarm_99999999999_aaaaaaaa"]',
        '{"a": 1}',
        "[" * 100_000,
    ],
)
def test_a_note_that_makes_no_sense_removes_nothing(folder, text):
    there = sockets(folder, os.getppid())
    (folder / "note.json").write_text(text)
    sweep_earlier(folder / "note.json")
    assert (there / "p2pd.sock").exists()
