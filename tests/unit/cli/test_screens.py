"""What programs print on terminals with few letters, without a reader, or where nothing can be written."""

import os
import signal
import subprocess
import sys

import pytest

from baseline_ddp import train
from recipe.data import benchmark
from recipe.interrupts import LOOK_ALIKES
from swarm.cli import app, demo, doctor
from swarm.cli.organiser import invite
from tests.helpers.paths import ROOT

SWARM, BASELINE = ["-m", "swarm"], ["baseline_ddp/train.py"]
ALL_LETTERS = "".join(chr(number) for number in LOOK_ALIKES) + "é█"


def run(*command: str, encoding: str = "utf-8", **options) -> subprocess.CompletedProcess:
    """Run a program of ours on a terminal of this encoding."""
    told = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | told, timeout=60, **streams)


def printing(text: str) -> list[str]:
    """The command line of a program that prints this text."""
    return ["-c", f"from recipe.interrupts import run_to_end\nrun_to_end(lambda: print({text!a}))"]


def test_help_is_read_on_a_terminal_that_has_only_ascii():
    done = run(*SWARM, "join", "--help", encoding="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"GB (10^9 bytes" in done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_no_letter_ends_a_program(encoding):
    done = run(*printing(ALL_LETTERS + "\udcff"), encoding=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    said = done.stdout.decode(encoding)
    assert said.startswith(ALL_LETTERS if encoding == "utf-8" else "")
    assert len(said) > len(ALL_LETTERS)


def test_look_alikes_are_ascii_and_keep_columns_straight():
    done = run(*printing("…QmAbc – 2 × 3 → 4"), encoding="ascii")
    assert done.stdout == b".QmAbc - 2 x 3 > 4\n"


@pytest.mark.parametrize("command", [SWARM, BASELINE], ids=["swarm", "baseline"])
def test_a_full_disk_is_said_in_one_sentence(command):
    with open("/dev/full", "wb") as full:
        done = run(*command, "--help", stdout=full)
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == [
        "error: No space left on device: make room, or send the output elsewhere."
    ]


@pytest.mark.parametrize(("file", "named"), [("", ""), (", '/runs/a'", " (/runs/a)")], ids=["unknown", "known"])
def test_another_file_that_is_full_is_not_taken_for_the_output(file, named):
    main = f"def main():\n    print('[1]')\n    raise OSError(28, 'No space left on device'{file})\n"
    done = run("-c", f"from recipe.interrupts import run_to_end\n{main}run_to_end(main)")
    assert (done.returncode, done.stdout) == (2, b"[1]\n"), "others may read that: nothing is added"
    assert done.stderr.decode() == (
        f"error: No space left on device{named}: make room, or send the output elsewhere.\n"
    )


def test_a_program_that_ends_with_a_sentence_says_it():
    done = run("-c", "import sys\nfrom recipe.interrupts import run_to_end\nrun_to_end(lambda: sys.exit('so it is'))")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"so it is\n")


def test_the_help_of_the_baseline_ends_quietly_without_a_reader():
    reading, writing = os.pipe()
    os.close(reading)
    done = run(*BASELINE, "--help", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=["stdout", "stderr", "all"])
def test_a_program_runs_without_the_usual_files(closed):
    def close() -> None:
        for number in closed:
            os.close(number)

    done = run(*SWARM, "nothing like that", preexec_fn=close, encoding="ascii")
    assert done.returncode == 2
    assert bool(done.stderr) == (2 not in closed)


def test_programs_that_such_a_program_starts_have_the_usual_files():
    """Otherwise the next file that they open would take the number, and get what they print."""

    def close() -> None:
        for number in range(3):
            os.close(number)

    asks = "import sys; sys.exit(3 if None in (sys.stdin, sys.stdout, sys.stderr) else 7)"
    main = f"lambda: subprocess.run([sys.executable, '-c', {asks!r}]).returncode"
    program = f"import subprocess, sys\nfrom recipe.interrupts import run_to_end\nrun_to_end({main})"
    assert run("-c", program, preexec_fn=close).returncode == 7


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", None])
def test_a_qr_code_is_drawn_only_where_the_terminal_has_its_blocks(encoding, her_run, monkeypatch):
    class Terminal:
        def __init__(self):
            self.encoding, self.isatty = encoding, lambda: True

    monkeypatch.setenv("COLUMNS", "200")
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal())
        status = invite.main(her_run.options("--qr"), said.append)
    assert status == 0
    assert ("█" in said[0]) == (encoding == "utf-8")
    assert said[0].startswith("(For a QR code the terminal needs UTF-8") == (encoding != "utf-8")


@pytest.mark.parametrize(
    ("main", "line", "said"),
    [
        (app.main, "watch /ip4/127.0.0.1 --seconds nan", "--seconds is nan"),
        (app.main, "watch /ip4/127.0.0.1 --seconds -5", "--seconds is -5"),
        (app.main, "doctor --port 70000", "--port is 70000"),
        (app.main, "demo --run-id=", "'' cannot name a folder"),
        (train.main, "--print-launch --nnodes 99999999999 --master-addr a", "--nnodes is 99999999999"),
        (train.main, "--print-launch --nnodes 2 --master-addr a --master-port 99999", "--master-port is 99999"),
        (train.main, "--print-launch --nnodes 2 --master-addr=", "Several nodes have to know where to meet"),
        (benchmark.main, "--seconds nan", "There is no time to measure in"),
    ],
)
def test_impossible_options_are_refused_at_once(main, line, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "LocalSwarm", lambda *_: pytest.fail("it starts"))
    monkeypatch.setattr(doctor, "diagnose", lambda _: pytest.fail("it looks"))
    assert main(line.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
