"""What a notebook says of a peer that has ended, without a swarm."""

import sys
from pathlib import Path

import pytest

from peers.display import WidgetDisplay
from peers.notebook import CannotJoin, join, preview
from swarm.enrolment.join_line import JoinLine
from swarm.peer.status import Status

PEER = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def program(folder: Path, script: str) -> str:
    """In the place of the peer, or of the doctor."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_peer_that_leaves_no_summary(tmp_path, monkeypatch):
    """As on a full disk."""
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(CannotJoin, match=r"could not write its summary: is the disk full\? See .*ada\.log"):
        join(PEER, public_name="ada", output_dir=tmp_path)


def test_the_join_line_is_on_no_command_line(tmp_path, monkeypatch):
    """Others on the same hub can read that; they cannot read the environment of a process."""
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
    """As one that has the widgets of another version."""
    pytest.importorskip("ipywidgets")
    now = 0.0
    display = WidgetDisplay(lambda: now)
    capsys.readouterr()
    for now in range(0, 150, 10):
        display.show(Status("ada", "run", f"training for {now} s"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2] for line in lines if "training for" in line] == ["0", "60", "120"]
    assert len(lines) == 3
