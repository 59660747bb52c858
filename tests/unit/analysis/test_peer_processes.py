"""Programs of an experiment: how they are started and ended, and the last message that they print."""

import signal
import sys

import pytest

from analysis.campaigns.peer_processes import has_ended, last_words, started

PROGRAM = "import os, time; print(os.environ.get('INITIAL_PEERS'), os.environ['PACE'], flush=True); time.sleep(60)"


def test_a_program_joins_no_other_swarm_and_ends_with_its_block(tmp_path, monkeypatch):
    monkeypatch.setenv("INITIAL_PEERS", "of somebody else")
    log = tmp_path / "program.log"
    with started([sys.executable, "-c", PROGRAM], log, {"PACE": "4"}) as process:
        while log.read_text() != "None 4\n":
            assert not has_ended(process, 0.05), last_words(log)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training\nerror: There is no room.\nwarning: 3 leaked semaphores\n", "error: There is no room."),
        ("error: first\nerror: then\n", "error: then"),
        ("Traceback ...\nValueError: odd\n\n", "ValueError: odd"),
        ("", "it printed nothing"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_the_last_message_of_a_program_is_its_last_error_or_its_last_line(tmp_path, text, words):
    log = tmp_path / "program.log"
    log.write_text(text)
    assert last_words(log) == words
