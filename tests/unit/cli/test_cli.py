"""The command `swarm`: its words, its help, and what it refuses."""

import dataclasses
import importlib
import os
import re
import signal
import subprocess
import sys
from typing import get_type_hints

import pytest

from recipe.command_line import read_options
from recipe.config import Recipe
from recipe.overrides import RecipeOverrides, field_docstrings
from swarm.cli import app, demo, train
from swarm.cli.train import SECOND_PEER, JoinOptions, StartOptions, read_start
from swarm.enrolment.join_line import whom_to_join
from swarm.peer.own_profile import software_version

ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture(autouse=True)
def nobody_to_join(monkeypatch):
    monkeypatch.delenv("INITIAL_PEERS", raising=False)


def test_help_names_every_command(capsys):
    assert app.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in app.COMMANDS:
        assert f"\n  {name} " in shown


def test_it_says_which_version_it_is(capsys):
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out == f"swarm-vit {software_version()}\n"


@pytest.mark.parametrize("name", app.COMMANDS)
def test_each_command_has_a_help(name, capsys):
    with pytest.raises(SystemExit) as end:
        app.main([name, "--help"])
    assert end.value.code == 0
    assert f"swarm {name}" in capsys.readouterr().out


def texts(kind: type) -> list[str]:
    """The help texts of all options of a command."""
    nested = [hint for hint in get_type_hints(kind).values() if dataclasses.is_dataclass(hint)]
    said = field_docstrings(Recipe if kind is RecipeOverrides else kind)
    names = {item.name for item in dataclasses.fields(kind)}  # a recipe's own name is no option
    own = [text for name, text in said.items() if name in names]
    return own + [text for group in nested for text in texts(group)]


@pytest.mark.parametrize("name", app.COMMANDS)
def test_no_sentence_of_a_help_breaks_off(name, capsys, monkeypatch):
    """tyro keeps line ends of docstrings.

    A line that a terminal of this width breaks was broken in the docstring too.
    """
    monkeypatch.setenv("COLUMNS", "9999")
    with pytest.raises(SystemExit):
        app.main([name, "--help"])
    shown = capsys.readouterr().out
    module, _, kind, _ = app.COMMANDS[name]
    said = texts(getattr(importlib.import_module(f"swarm.cli.{module}"), kind))
    assert said
    assert [text for text in said if " ".join(text.split()) not in shown] == []


@pytest.mark.parametrize("name", app.COMMANDS)
def test_what_a_command_does_fits_the_terminal(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        app.main([name, "--help"])
    said = capsys.readouterr().out.partition("\n\n")[2].partition("╭")[0].splitlines()
    assert said
    assert [line for line in said if len(line) > 80 and not line.startswith("    ")] == []


def test_what_a_volunteer_needs_first_comes_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit):
        app.main(["join", "--help"])
    first, advanced = capsys.readouterr().out.split("advanced: ", 1)
    for option in ("--public-name", "--device", "--max-time", "--pause-on-battery"):
        assert option in first
    for option in ("--inside", "--num-workers", "--checkpoint-every-steps", "--role", "--desk-port"):
        assert option in advanced
    titles = re.findall(r"^\W*((?:\w+ )?(?:arguments|options))\W*$", first, re.MULTILINE)
    assert titles == ["positional arguments", "options", "machine options", "leaving options"]


def test_an_unknown_command_is_refused_in_a_sentence(capsys):
    assert app.main(["jion"]) == 2
    assert "there is no command 'jion': give one of join, " in capsys.readouterr().err


@pytest.mark.parametrize("shell", app.SHELLS)
def test_a_shell_can_complete_it(shell, capsys):
    assert app.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "watch" in script
    assert "public-name" in script
    assert app.main(["completion", "word"]) == 2


def test_help_of_completion_is_no_error(capsys):
    assert app.main(["completion", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: swarm completion bash|zsh\n")


def test_join_takes_addresses_and_the_options_of_a_volunteer():
    options = read_options(JoinOptions, [ADDRESS, "--public-name", "anna", "--batch-size", "8"], "swarm join").as_peer
    assert options.initial_peers == (ADDRESS,)
    assert (options.machine.public_name, options.machine.batch_size) == ("anna", 8)
    assert options.recipe is None, "that comes from the swarm"


def test_join_takes_the_words_of_other_programs(monkeypatch):
    read = []
    monkeypatch.setattr(train, "run", lambda options: read.append(options()) or 0)
    given = [["--initial-peers", ADDRESS], ["--initial_peers", ADDRESS], [f"--initial-peers={ADDRESS}"]]
    for words in given:
        assert app.main(["join", *words, "--public-name", "anna"]) == 0
        assert app.main(["join", "--host-maddrs", "/ip4/0.0.0.0/tcp/31337", *words]) == 0
    assert [options.initial_peers for options in read] == [(ADDRESS,)] * 6
    assert app.main(["join", ADDRESS, "--initial-peers", "another"]) == 0
    assert read[-1].initial_peers == (ADDRESS, "another")


def test_join_without_an_address_is_refused(capsys):
    assert app.main(["join"]) == 2
    assert capsys.readouterr().err.startswith("error: swarm join needs a join line or an address")


def test_start_joins_no_other_swarm(monkeypatch, capsys):
    read = []
    monkeypatch.setenv("INITIAL_PEERS", ADDRESS)
    monkeypatch.setattr(train, "run", lambda options: read.append(options()) or 0)
    assert app.main(["start", "--run-id", "mine"]) == 0
    assert whom_to_join(read[0].initial_peers) == ([], None)
    assert "INITIAL_PEERS" not in os.environ, "a peer that starts itself again reads it anew"
    assert capsys.readouterr().err.startswith("INITIAL_PEERS is not used: ")
    assert app.main(["start"]) == 0
    assert capsys.readouterr().err == ""


def test_start_waits_for_a_second_peer():
    assert read_options(StartOptions, [], "swarm start").as_peer.patience.min_peers == SECOND_PEER
    alone = read_options(StartOptions, ["--min-peers", "1", "--learning-rate", "0.1"], "swarm start").as_peer
    assert alone.patience.min_peers == 1
    assert alone.wanted_recipe == {"learning_rate": 0.1}


@pytest.mark.parametrize(
    ("words", "by_invitation"),
    [([], True), (["--by-invitation"], True), (["--no-by-invitation"], False)],
    ids=["not said", "asked for", "not wanted"],
)
def test_a_swarm_of_one_machine_is_by_invitation_only_if_an_option_says_so(words, by_invitation):
    assert read_start(words).as_peer.membership.by_invitation is by_invitation
    here = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", *words]
    assert read_start(here).as_peer.membership.by_invitation is ("--by-invitation" in words)


@pytest.mark.parametrize("words", [["--port", "31337"], ["--role", "helper"], ["--client-mode"], ["--desk-port", "0"]])
def test_a_demo_takes_no_option_of_one_peer(words, monkeypatch, capsys, tmp_path):
    """With three such peers the demo would wait for minutes for something that cannot happen."""
    monkeypatch.setattr(demo, "LocalSwarm", lambda *_: pytest.fail("it starts"))
    assert app.main(["demo", "--output-dir", str(tmp_path), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {words[0]}")
    assert " to one peer: leave that out here" in said


def test_the_installed_command_runs():
    shown = subprocess.run([sys.executable, "-m", "swarm"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("usage: swarm COMMAND")


def test_a_reader_of_the_output_may_stop_reading():
    """`head` does so after some lines."""
    command = subprocess.Popen(
        [sys.executable, "-m", "swarm", "ledger", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    command.stdout.close()
    _, said = command.communicate(timeout=60)
    assert (command.returncode, said) == (128 + signal.SIGPIPE, b"")


def test_another_pipe_that_breaks_is_an_error_like_any_other():
    raises = "def main():\n    raise BrokenPipeError('between processes')\n"
    program = f"from recipe.interrupts import run_to_end\n{raises}run_to_end(main)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "between processes" in done.stderr
