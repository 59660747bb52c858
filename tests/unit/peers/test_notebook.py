"""Messages of a notebook about a peer that has ended, without a swarm."""

import errno
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from peers.display import WidgetDisplay
from peers.notebook import CannotJoin, join, preview
from peers.platforms import detect
from swarm.enrolment.join_line import JoinLine
from swarm.peer.status import Status
from tests.helpers.paths import ROOT

PEER = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def program(folder: Path, script: str) -> str:
    """Write a script that stands for the peer, or the doctor."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_peer_that_leaves_no_summary_is_reported(tmp_path, monkeypatch):
    """This happens on a full disk."""
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(CannotJoin, match=r"could not write its summary: is the disk full\? See .*ada\.log"):
        join(PEER, public_name="ada", output_dir=tmp_path)


def test_the_join_line_is_on_no_command_line(tmp_path, monkeypatch):
    """Other users of the same hub can read command lines. They cannot read the environment of a process."""
    line = str(JoinLine("run", bytes(32), (PEER,), bytes(16)))
    monkeypatch.setattr(
        "peers.notebook.sys.executable", program(tmp_path, 'echo "$@" > words; echo $INITIAL_PEERS > line')
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotJoin, match="could not write its summary"):
        join(line, public_name="ada", output_dir=tmp_path)
    assert "swarm://" not in (tmp_path / "words").read_text()
    assert (tmp_path / "line").read_text().strip() == line
    (tmp_path / "line").unlink()
    with pytest.raises(CannotJoin, match="The check of this machine failed"):
        preview(line)
    assert "swarm://" not in (tmp_path / "words").read_text()
    assert (tmp_path / "line").read_text().strip() == line


def test_a_preview_says_that_a_new_name_uses_up_an_invitation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", program(tmp_path, """echo '{"checks": [], "can_join": true}'"""))
    assert preview(PEER)
    assert "invitation" not in capsys.readouterr().out, "an open run has none"
    assert preview(str(JoinLine("run", bytes(32), (PEER,), bytes(16))))
    assert "a new name uses up one more use of it" in capsys.readouterr().out


def test_a_notebook_that_shows_no_widgets_prints_a_line_a_minute(capsys):
    """For example, it has the widgets of another version."""
    pytest.importorskip("ipywidgets")
    now = 0.0
    display = WidgetDisplay(lambda: now)
    capsys.readouterr()
    for now in range(0, 150, 10):
        display.show(Status("ada", "run", f"training for {now} s"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2] for line in lines if "training for" in line] == ["0", "60", "120"]
    assert len(lines) == 3


class Screen:
    """A screen at which a person waits until the peer is there, and then interrupts the cell, or that fails then."""

    def __init__(self, there: Path, error: BaseException | None = None):
        self.there, self.error, self.last_words = there, error or KeyboardInterrupt(), ""

    def show(self, status: Status) -> None:
        if self.there.exists():
            raise self.error

    def close(self, last_words: str) -> None:
        self.last_words = last_words


@pytest.mark.parametrize(
    ("at_interrupt", "words"),
    [("exit 130", "Left before the training began."), ("", "Ended by force after 0.3 s. The others train on.")],
)
def test_a_person_that_interrupts_the_cell_sees_no_error(tmp_path, monkeypatch, at_interrupt, words):
    screen = Screen(tmp_path / "there")
    script = f"trap '{at_interrupt}' INT; touch {screen.there}; while :; do sleep 0.05; done"
    monkeypatch.setattr(sys, "executable", program(tmp_path, script))
    monkeypatch.setattr("peers.notebook.make_display", lambda: screen)
    monkeypatch.setattr("peers.notebook.LEAVE_SECONDS", 0.3)
    monkeypatch.setattr("peers.notebook.POLL_SECONDS", 0.05)
    assert join(PEER, public_name="ada", output_dir=tmp_path) == {}
    assert screen.last_words == words


class Person:
    """Reads what the cell prints, and then lets the peer's upload arrive, or interrupts the cell once more."""

    def __init__(self, arrived: Path, is_patient: bool):
        self.arrived, self.is_patient, self.told = arrived, is_patient, ""

    def read(self, words: str) -> None:
        self.told = words
        if not self.is_patient:
            raise KeyboardInterrupt
        self.arrived.touch()


@pytest.mark.parametrize(("is_patient", "words"), [(True, "Goodbye."), (False, "Ended by force. The others train on.")])
def test_a_peer_that_uploads_is_waited_for_until_the_cell_is_interrupted_again(
    tmp_path, monkeypatch, is_patient, words
):
    person, screen = Person(tmp_path / "arrived", is_patient), Screen(tmp_path / "there")
    ends = f"while [ ! -e {person.arrived} ]; do sleep 0.05; done; echo Goodbye.; exit 0"
    begins = """mkdir -p run/ada; echo '{"upload_to": "file:///far"}' > run/ada/summary.json"""
    script = f"cd {tmp_path}; trap '{ends}' INT; sleep 0.1; {begins}; touch there; while :; do sleep 0.05; done"
    monkeypatch.setattr(sys, "executable", program(tmp_path, script))
    monkeypatch.setattr("peers.notebook.make_display", lambda: screen)
    monkeypatch.setattr("peers.notebook.print", person.read, raising=False)
    monkeypatch.setattr("peers.notebook.LEAVE_SECONDS", 0.3)
    monkeypatch.setattr("peers.notebook.POLL_SECONDS", 0.05)
    assert join(PEER, public_name="ada", output_dir=tmp_path) == {"upload_to": "file:///far"}
    assert "for 300 s at most; interrupt again to end" in person.told
    assert screen.last_words == words


def test_an_error_while_watching_leaves_no_peer_that_nobody_can_stop(tmp_path, monkeypatch):
    """For example, the output of the cell cannot be written any more."""
    screen = Screen(tmp_path / "there", OSError("no longer connected"))
    script = f"trap 'exit 130' INT; echo $$ > {tmp_path}/pid; touch {screen.there}; while :; do sleep 0.05; done"
    monkeypatch.setattr(sys, "executable", program(tmp_path, script))
    monkeypatch.setattr("peers.notebook.make_display", lambda: screen)
    monkeypatch.setattr("peers.notebook.POLL_SECONDS", 0.05)
    with pytest.raises(OSError, match="no longer connected"):
        join(PEER, public_name="ada", output_dir=tmp_path)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_folder_that_cannot_be_read_for_a_while_ends_nothing(tmp_path, monkeypatch):
    """As with a Drive that is mounted: reading raises OSError until it is there again."""

    def unreadable(folder, pattern):
        (tmp_path / "read").touch()
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    script = f"while [ ! -e {tmp_path}/read ]; do sleep 0.05; done; echo error: no room; exit 2"
    monkeypatch.setattr(sys, "executable", program(tmp_path, script))
    monkeypatch.setattr(Path, "glob", unreadable)
    with pytest.raises(CannotJoin, match="no room"):
        join(PEER, public_name="ada", output_dir=tmp_path)


def test_an_interrupt_before_there_is_a_display_ends_the_peer_too(tmp_path, monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "executable", program(tmp_path, "trap 'exit 130' INT; while :; do sleep 0.05; done"))
    monkeypatch.setattr("peers.notebook.make_display", interrupt)
    assert join(PEER, public_name="ada", output_dir=tmp_path) == {}
    assert "Left before the training began." in capsys.readouterr().out


def test_a_peer_that_fails_while_the_cell_is_interrupted_says_why(tmp_path, monkeypatch):
    screen = Screen(tmp_path / "there")
    script = f"trap 'echo error: no room; exit 2' INT; touch {screen.there}; while :; do sleep 0.05; done"
    monkeypatch.setattr(sys, "executable", program(tmp_path, script))
    monkeypatch.setattr("peers.notebook.make_display", lambda: screen)
    monkeypatch.setattr("peers.notebook.POLL_SECONDS", 0.05)
    with pytest.raises(CannotJoin, match="no room"):
        join(PEER, public_name="ada", output_dir=tmp_path)


def test_a_person_that_saves_a_notebook_on_kaggle_is_told_that_a_key_is_in_it(monkeypatch):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    for text in (detect().hint, (ROOT / "peers" / "kaggle.ipynb").read_text()):
        assert "Keep this notebook private: its output holds your key" in text


@pytest.mark.parametrize(
    ("hours", "words", "said"),
    [
        (
            1.0,
            "--max-time 10:50:00",
            "This peer leaves after 10:50:00, ten minutes before the longest session on Kaggle",
        ),
        (11.7, "--max-time 00:08:00", "This peer leaves after 00:08:00"),
        (11.8, "", "lasts 12 h at most, and 12 min of them are left. So no limit is set"),
        (14.0, "", "and 0 min of them are left. So no limit is set"),
    ],
)
def test_the_limit_is_said_and_a_peer_that_starts_late_in_a_session_has_none(
    tmp_path, monkeypatch, capsys, hours, words, said
):
    """With a limit, such a peer trained for a minute and said that the time was up."""
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setattr(sys, "executable", program(tmp_path, f'echo "$@" > {tmp_path}/words'))
    now = time.time()
    monkeypatch.setattr("peers.platforms.psutil.Process", lambda pid: Began(now - 3600 * hours))
    monkeypatch.setattr("peers.platforms.time.time", lambda: now)
    with pytest.raises(CannotJoin, match="could not write its summary"):
        join(PEER, public_name="ada", output_dir=tmp_path)
    given = (tmp_path / "words").read_text()
    assert words in given if words else "--max-time" not in given
    assert said in capsys.readouterr().out


class Began(NamedTuple):
    """The first process of a session."""

    at: float

    def create_time(self) -> float:
        return self.at
