"""The README is run: its example trains, its commands and options exist, its tables say what the code says."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import tyro

from baseline_ddp.options import parse_options as parse_baseline_options
from recipe.presets import PRESETS, preset
from recipe.run_folder import RunFolder
from recipe.task import VisionTask
from swarm.cli.doctor import main as doctor_main
from swarm.cli.watch import WatchOptions
from swarm.cli.watch import main as watch_main
from swarm.peer.options import PeerOptions, parse_options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
READMES = (ROOT / "README.md", *ROOT.glob("[!.]*/README.md"))
PAGES = {path: path.read_text() for path in (*READMES, *ROOT.glob("docs/**/*.md"))}
EVERYTHING = "\n".join(PAGES.values())


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(program: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", EVERYTHING, re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if program in line]


def test_the_example_with_an_own_module_trains(capfd):
    import warnings

    _, example = code_blocks("python")
    scope: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(example, "README.md", "exec"), scope)
    assert scope["strategy"].collaboration is None, "it has left the swarm"
    assert "initial_peers=['/ip4/" in capfd.readouterr().out


def test_a_volunteer_can_use_the_weights(tmp_path, monkeypatch):
    example, _ = code_blocks("python")
    folder = RunFolder(tmp_path / "runs" / "RUN_ID" / "NAME")
    folder.checkpoints.mkdir(parents=True)
    folder.write_recipe(preset("digits"))
    trained = VisionTask(preset("digits"))
    torch.save({"state_dict": trained.state_dict()}, folder.checkpoints / "last.ckpt")
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec(compile(example, "README.md", "exec"), scope)
    torch.testing.assert_close(scope["model"].state_dict(), trained.model.state_dict(), rtol=0, atol=0)


def heading_anchors(text: str) -> set[str]:
    """As GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    for page, text in PAGES.items():
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
            file = page.parent / target if target else page
            assert file.exists(), f"{page}: {target}"
            assert not anchor or anchor in heading_anchors(file.read_text()), f"{page}: {target}#{anchor}"


@pytest.mark.parametrize("command", commands("swarm.peer"))
def test_peer_commands_are_understood(command):
    arguments = shlex.split(command)
    options = parse_options(arguments[arguments.index("swarm.peer") + 1 :])
    assert isinstance(options, PeerOptions)
    assert options.recipe is None or options.recipe in PRESETS


@pytest.mark.parametrize("command", commands("swarm watch"))
def test_watch_commands_are_understood(command):
    arguments = shlex.split(command)
    tyro.cli(WatchOptions, args=arguments[arguments.index("watch") + 1 :])


@pytest.mark.parametrize("command", commands("baseline_ddp/train.py"))
def test_baseline_commands_are_understood(command):
    arguments = shlex.split(command)
    parse_baseline_options(arguments[arguments.index("baseline_ddp/train.py") + 1 :])


def test_options_in_the_text_exist(capsys):
    for parse in (parse_options, parse_baseline_options, watch_main, doctor_main):
        with pytest.raises(SystemExit):
            parse(["--help"])
    known = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    shown = set(re.findall(r"`(--[a-z0-9-]+)", EVERYTHING)) - {"--peers"}
    assert shown <= known, shown - known


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = re.findall(r"`make ([a-z]+)", EVERYTHING)
    shown += [line.split()[1] for line in commands("make ") if line.startswith("make ")]
    assert {"demo"} <= set(shown) <= targets, set(shown) - targets


def test_the_table_of_recipes_is_complete():
    rows = {name: f"| `{name}` |" in README for name in PRESETS}
    assert all(rows.values()), rows


def test_constraints_name_versions_and_nothing_else():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines)
