"""The README is run: its example trains, its commands and options exist, its tables say what the code says."""

import re
import shlex
from pathlib import Path

import pytest

from baseline_ddp.options import parse_options as parse_baseline_options
from recipe.presets import PRESETS
from swarm.options import PeerOptions, parse_options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(program: str) -> list[str]:
    lines = [line.split("#")[0].strip() for block in code_blocks("bash") for line in block.splitlines()]
    return [line for line in lines if program in line]


def test_the_example_with_an_own_module_trains(capfd):
    import warnings

    (example,) = code_blocks("python")
    scope: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(example, "README.md", "exec"), scope)
    assert scope["strategy"].collaboration is None, "it has left the swarm"
    assert "initial_peers=['/ip4/" in capfd.readouterr().out


@pytest.mark.parametrize("command", commands("swarm.peer"))
def test_peer_commands_are_understood(command):
    arguments = shlex.split(command)
    options = parse_options(arguments[arguments.index("swarm.peer") + 1 :])
    assert isinstance(options, PeerOptions)
    assert options.recipe is None or options.recipe in PRESETS


@pytest.mark.parametrize("command", commands("baseline_ddp/train.py"))
def test_baseline_commands_are_understood(command):
    arguments = shlex.split(command)
    parse_baseline_options(arguments[arguments.index("baseline_ddp/train.py") + 1 :])


def test_options_in_the_text_exist(capsys):
    for parse in (parse_options, parse_baseline_options):
        with pytest.raises(SystemExit):
            parse(["--help"])
    known = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    shown = set(re.findall(r"`(--[a-z0-9-]+)", README)) - {"--peers"}
    assert shown <= known, shown - known


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)", README)) <= targets | {"it", "the"}


def test_the_table_of_recipes_is_complete():
    rows = {name: f"| `{name}` |" in README for name in PRESETS}
    assert all(rows.values()), rows


def test_constraints_name_versions_and_nothing_else():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines)
