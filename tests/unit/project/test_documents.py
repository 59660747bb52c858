"""The documents are tested: examples train, commands and options exist, links lead somewhere, tables are true."""

import importlib.util
import json
import math
import re
import shlex
import sys
import tomllib
import types
from collections import defaultdict
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
import tyro
from scipy import stats

import analysis.__main__ as analysis_program
from baseline_ddp.options import parse_options as parse_baseline_options
from recipe.command_line import read_options
from recipe.presets import PRESETS, preset
from recipe.registry import build_task
from recipe.run_folder import RunFolder
from swarm.cli import app
from swarm.cli.bench import BenchOptions
from swarm.cli.demo import DemoOptions
from swarm.cli.desk import DeskOptions
from swarm.cli.doctor import DoctorOptions
from swarm.cli.export import ExportOptions
from swarm.cli.identity import IdentityOptions
from swarm.cli.ledger import LedgerOptions
from swarm.cli.organiser.control import ControlOptions
from swarm.cli.organiser.deputy import DeputyOptions
from swarm.cli.organiser.enrol import EnrolOptions
from swarm.cli.organiser.invite import InviteOptions
from swarm.cli.organiser.login import LoginOptions
from swarm.cli.organiser.members import MembersOptions
from swarm.cli.organiser.remove import RemoveOptions
from swarm.cli.train import JoinOptions, StartOptions
from swarm.cli.watch import WatchOptions
from swarm.peer.options import PeerOptions, parse_options
from tests.helpers.paths import ROOT

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
FOLDER_PAGES = sorted(ROOT.glob("[!.]*/README.md"))
PAGES = {path: path.read_text() for path in (*sorted(ROOT.glob("*.md")), *FOLDER_PAGES, *sorted(DOCS.rglob("*.md")))}
BY_HAND = {path: text for path, text in PAGES.items() if DOCS / "reference" not in path.parents}
"""All pages but those that are generated from the options themselves."""
EVERYTHING = "\n".join(BY_HAND.values())
GUIDES = {
    path: text for path, text in PAGES.items() if path.parent in (ROOT, DOCS, DOCS / "howto") and path.suffix == ".md"
}
"""Pages whose Python examples are run; elsewhere such a block may be a signature."""

MOST_README_LINES, MOST_FOLDER_LINES = 120, 15

OPTIONS = {
    "join": JoinOptions,
    "start": StartOptions,
    "watch": WatchOptions,
    "desk": DeskOptions,
    "ledger": LedgerOptions,
    "doctor": DoctorOptions,
    "demo": DemoOptions,
    "export": ExportOptions,
    "identity": IdentityOptions,
    "bench": BenchOptions,
    "invite": InviteOptions,
    "members": MembersOptions,
    "remove": RemoveOptions,
    "enrol": EnrolOptions,
    "control": ControlOptions,
    "deputy": DeputyOptions,
    "login": LoginOptions,
}
FOREIGN_OPTIONS = {"--shm-size"}
FOREIGN = {
    *("docker", "sbatch", "make", "git", "sh", "cp", "echo", "useradd", "systemctl", "journalctl", "tensorboard"),
    *(".", "source", "mail", "pip", "mkdocs", "ruff", "cd", "sudo", "apt-get", "chmod"),
}
"""Other projects' programs. Their options are not checked."""
REDIRECTIONS = {"|", "||", "&&", ">", ">>", "2>", "<", ";", "&"}


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def first_command(line: str) -> list[str]:
    """The words of a shell line up to a pipe or a redirection, without variables that are set for it."""
    words = shlex.split(line, comments=True)
    end = next((index for index, word in enumerate(words) if word in REDIRECTIONS), len(words))
    words = words[:end]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


def block_lines() -> list[tuple[str, str]]:
    """(page, line) of each command in a bash block."""
    found = []
    for page, text in PAGES.items():
        for block in code_blocks(text, "bash"):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found += [(str(page.relative_to(ROOT)), line) for line in lines if first_command(line)]
    return found


def inline_lines() -> list[tuple[str, str]]:
    """(page, command) of our own commands within sentences, but for those with something left out."""
    found = []
    for page, text in BY_HAND.items():
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for code in re.findall(r"`([^`\n]+)`", prose):
            own = re.match(r"(\.venv/bin/)?(swarm [a-z]|python -m (swarm|analysis) ?|torchrun .*train\.py)", code)
            if own and not re.search(r"…|\.\.\.|COMMAND", code):
                found.append((str(page.relative_to(ROOT)), code))
    return found


def understand(line: str) -> None:
    """Raises SystemExit or InputError if a program of ours does not take this command line."""
    program, *rest = first_command(line)
    name = program.rsplit("/", 1)[-1]
    if name == "torchrun" and "-m" in rest:
        module = rest.index("-m") + 1
        understand_module(rest[module], rest[module + 1 :])
    elif name == "torchrun" or (name == "python" and rest and rest[0].endswith("train.py")):
        script = next(index for index, word in enumerate(rest) if word.endswith("baseline_ddp/train.py"))
        parse_baseline_options(rest[script + 1 :])
    elif name == "python" and rest[0] == "-m":
        understand_module(rest[1], rest[2:])
    elif name == "swarm":
        understand_swarm(rest)
    elif name == "python":
        assert (ROOT / rest[0]).exists(), line
    else:
        assert name in FOREIGN, f"an unknown program: {line}"
        assert name != "make" or rest[0] in make_targets(), line


def understand_module(module: str, arguments: list[str]) -> None:
    if module == "swarm.peer":
        options = parse_options(arguments)
        assert isinstance(options, PeerOptions)
        assert options.recipe is None or options.recipe in PRESETS
    elif module == "swarm":
        understand_swarm(arguments)
    elif module == "analysis":
        understand_analysis(*arguments)
    else:
        assert importlib.util.find_spec(module), module


def understand_analysis(word: str = "", *arguments: str) -> None:
    if not word:
        return
    if word == "--help":
        raise SystemExit(0)
    module, name, _ = analysis_program.COMMANDS[word]
    options = importlib.import_module(f"analysis.{module}")
    if word == "wan":
        own = arguments[: arguments.index("--")] if "--" in arguments else arguments
        tyro.cli(tyro.conf.OmitArgPrefixes[options.Check | options.Run], args=own)
    elif name is None:
        assert len(arguments) == 1, "a folder"
    else:
        kind = tyro.conf.OmitArgPrefixes[getattr(options, name)]
        tyro.cli(kind, args=arguments, return_unknown_args=word == "footprint")  # it hands on what it does not know


def understand_swarm(arguments: list[str]) -> None:
    word, *rest = arguments or ["--help"]
    if word == "--help":
        raise SystemExit(0)
    if word == app.COMPLETION:
        assert rest[0] in (*app.SHELLS, "SHELL")
        return
    assert word in app.COMMANDS, word
    if word == "demo":  # it hands on what it does not know
        _, rest = tyro.cli(DemoOptions, args=rest, return_unknown_args=True)
        parse_options(rest)
        return
    options = read_options(OPTIONS[word], rest, f"swarm {word}")
    if isinstance(options, JoinOptions | StartOptions):
        recipe = options.as_peer.recipe
        assert recipe is None or recipe in PRESETS, recipe


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


PAGE_OF = {line: page for page, line in (*inline_lines(), *block_lines())}
"""One page of each command. Some commands are on many pages."""


@pytest.mark.parametrize(("line", "page"), PAGE_OF.items())
def test_commands_are_understood(line, page):
    if "--help" in line:
        with pytest.raises(SystemExit, match=r"^0$"):
            understand(line)
    else:
        understand(line)


def test_commands_of_each_kind_are_there():
    """Otherwise the test above may have checked nothing."""
    lines = [line for _, line in block_lines()]
    for start in ("swarm join", "swarm start", "swarm watch", "swarm doctor", "swarm demo", "swarm bench"):
        assert any(line.startswith(start) for line in lines), start
    assert any("swarm.peer" in line for line in lines)
    assert any("baseline_ddp/train.py" in line for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        "swarm join ADDRESS --no-such-option",
        "swarm explode",
        "python -m swarm.peer --recipe no-such-recipe",
        "python -m no_such_module",
        "python baseline_ddp/train.py --no-such-option",
        "no-such-program",
        "make no-such-target",
    ],
)
def test_commands_that_cannot_work_are_noticed(line, capfd):
    with pytest.raises((AssertionError, SystemExit)):
        understand(line)


def test_the_command_is_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["swarm"].split(":")
    assert getattr(importlib.import_module(module), function) is app.program


def test_options_in_the_text_exist(capsys):
    helps = [lambda kind=kind: read_options(kind, ["--help"], "swarm") for kind in OPTIONS.values()]
    helps += [lambda: parse_options(["--help"]), lambda: parse_baseline_options(["--help"])]
    helps += [
        lambda word=word: analysis_program.main([word, "--help"])
        for word in ("run", "report", "soak", "attacks", "lying")
    ]
    for show in helps:
        with pytest.raises(SystemExit):
            show()
    known = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out)) | FOREIGN_OPTIONS
    shown = set(re.findall(r"`(--[a-z0-9-]+)", EVERYTHING))
    assert shown <= known, shown - known


def test_make_targets_exist():
    named = set(re.findall(r"`(?:[A-Z_]+=\S+ )?make ([a-z-]+)", EVERYTHING))
    assert named <= make_targets(), named - make_targets()


def test_messages_that_are_explained_are_said():
    files = [file for package in ("swarm", "recipe") for file in (ROOT / package).rglob("*.py")]
    said = "\n".join(re.sub(r'"\s*f?"', "", file.read_text()) for file in files)
    rows = re.findall(r"^\| (`.+?) \|", PAGES[DOCS / "howto" / "troubleshoot.md"], re.MULTILINE)
    quoted = [words for row in rows for words in re.findall(r"`(.+?)`", row)]
    assert len(quoted) > 30
    parts = {part.strip() for words in quoted for part in re.split("…|NAME", words)}
    assert not [part for part in parts if part not in said]


# ---- examples in Python ---------------------------------------------------------------------------------------------


def examples() -> list:
    return [
        pytest.param(page, block, id=f"{page.relative_to(ROOT)}-{number}")
        for page, text in GUIDES.items()
        for number, block in enumerate(code_blocks(text, "python"), 1)
    ]


def project_of_a_reader() -> types.ModuleType:
    """What the README's example calls `my_project`: a module and a loader."""
    import lightning as L
    from torch.utils.data import DataLoader, TensorDataset

    class MyModule(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    project = types.ModuleType("my_project")
    project.MyModule = MyModule
    project.train_loader = DataLoader(TensorDataset(torch.randn(256, 4), torch.randint(2, (256,))), batch_size=32)
    return project


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "example"), examples())
def test_examples_run(page, example, tmp_path, monkeypatch, capfd):
    import peers

    monkeypatch.setitem(sys.modules, "my_project", project_of_a_reader())
    for name in ("join", "preview"):  # only the arguments are checked; no swarm is joined
        monkeypatch.setattr(peers, name, create_autospec(getattr(peers, name)))
    folder = RunFolder(tmp_path / "runs" / "RUN_ID" / "NAME")
    folder.checkpoints.mkdir(parents=True)
    folder.write_recipe(preset("digits"))
    trained = build_task(preset("digits"))
    torch.save({"state_dict": trained.state_dict()}, folder.checkpoints / "last.ckpt")
    monkeypatch.chdir(tmp_path)
    if "local-dir:digits-vit" in example:
        torch.save(
            {"state_dict": trained.state_dict(), "global_step": 60, "recipe": trained.recipe.to_json()}, "b.ckpt"
        )
        assert app.main(["export", "b.ckpt", "--to", "digits-vit"]) == 0

    scope: dict = {}
    exec(compile(example, str(page), "exec"), scope)

    if "L.Trainer" in example:
        assert scope["strategy"].coordinator is None, "it has left the swarm"
        assert "initial_peers=['/ip4/" in capfd.readouterr().out
    if "local-dir:digits-vit" in example:
        torch.testing.assert_close(scope["model"].state_dict(), trained.model.state_dict(), rtol=0, atol=0)


def test_the_readers_own_model_takes_ten_lines():
    (example,) = code_blocks(README, "python")
    assert len([line for line in example.splitlines() if line and not line.startswith("#")]) <= 10


# ---- links, lengths, tables -----------------------------------------------------------------------------------------


def heading_anchors(text: str) -> set[str]:
    """Anchors of the headings: as GitHub makes them, and as the site does, which writes one dash instead of two."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*?)(?: \{#.*\})?$", text, re.MULTILINE)
    github = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return github | {re.sub(r"-+", "-", anchor) for anchor in github}


def test_links_between_pages_lead_somewhere():
    for page, text in PAGES.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", prose):
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), f"{page}: {target}"
            assert not anchor or anchor in heading_anchors(file.read_text()), f"{page}: {target}#{anchor}"


def test_each_page_can_be_found():
    """Each page is one or two clicks away from the README or the index."""
    linked = set()
    for page in (ROOT / "README.md", DOCS / "index.md"):
        linked |= {(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+)", PAGES[page])}
    lost = {page.name for page in PAGES if page.parent == DOCS / "howto"} - {page.name for page in linked}
    assert not lost


def test_readmes_are_short():
    assert README.count("\n") <= MOST_README_LINES
    for folder in ("peers", "baseline_ddp"):
        assert PAGES[ROOT / folder / "README.md"].count("\n") <= MOST_FOLDER_LINES, folder


def test_pages_tell_no_history():
    for page, text in PAGES.items():
        if page.name != "CHANGELOG.md":
            prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
            assert not re.search(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}(?:[0-9a-f]{33})?\b", prose), page


def test_the_readme_says_which_peers_can_spoil_a_swarm():
    start = README.split("\n## Start\n")[1].split("\n## ")[0]
    assert "**Earlier lies that no peer checked stay.**" in start
    assert "by anyone with the address" in start


def test_the_table_of_recipes_is_complete():
    text = PAGES[DOCS / "howto" / "organise.md"]
    rows = {name: f"| `{name}` | {preset(name).model}" in text for name in PRESETS}
    assert all(rows.values()), rows
    assert all(f"{preset(name).target_batch_size:,} |" in text for name in PRESETS)


RESULTS = [
    ("delay_100", None, "swarm-fp16"),
    ("delay_paced", 200, "swarm-local-1-fp16"),
    ("continents", "continents", "swarm-local-1-fp16"),
    ("home_ddp", "home", "swarm-fp16"),
    ("home_quarter", "home-half", "swarm-local-1-fp16"),
]
"""Rows of the README's table: experiment, setting, system."""


def measured(experiment: str, setting: int | str | None, system: str) -> list[str]:
    """The two cells that the README has to show: samples/s and updates/s over those of DDP with the fp16 hook."""
    runs: dict[int, dict[str, dict]] = defaultdict(dict)
    for line in (ROOT / "analysis" / "report" / f"{experiment}.jsonl").read_text().splitlines():
        found = json.loads(line)
        if "cell" not in found or found["result"].get("problems"):
            continue
        if setting in (None, found["cell"]["rtt_ms"], found["cell"]["topology"]):
            runs[found["cell"]["repetition"]][found["cell"]["system"]] = found["result"]
    pairs = [(run[system], run["ddp-fp16"]) for run in runs.values() if {system, "ddp-fp16"} <= run.keys()]
    samples = [swarm["samples_per_second"] / ddp["samples_per_second"] for swarm, ddp in pairs]
    sizes = [swarm["samples_per_step"] / ddp["samples_per_step"] for swarm, ddp in pairs]
    return [shown(np.array(samples)), shown(np.array(samples) / np.array(sizes))]


def shown(ratios: np.ndarray) -> str:
    half = stats.t.ppf(0.975, len(ratios) - 1) * ratios.std(ddof=1) / math.sqrt(len(ratios))
    holds_one = abs(ratios.mean() - 1) <= half
    return f"{ratios.mean():.2f} ± {half:.2f}" + (", not shown" if holds_one else "")


def test_the_table_of_results_is_what_was_measured():
    table = README.split("\n## Results\n")[1].split("\n## ")[0]
    rows = [
        re.split(r" *\| *", line.strip("| ")) for line in table.splitlines() if line.startswith("| ") and "±" in line
    ]
    assert [row[2:] for row in rows] == [measured(*row) for row in RESULTS]


def valid(experiment: str, number: str, **settings: float | str) -> list[float]:
    """A number of the report's valid cells that have these settings."""
    lines = map(json.loads, (ROOT / "analysis" / "report" / f"{experiment}.jsonl").read_text().splitlines()[1:])
    return [
        line["result"][number]
        for line in lines
        if not line["result"].get("problems") and settings.items() <= line["cell"].items()
    ]


def test_the_readme_begins_with_what_was_measured():
    swarm, waiting, ddp = (
        valid("home_ddp", "samples_per_second", system=system)
        for system in ("swarm-local-1-fp16", "swarm-fp16", "ddp-fp16")
    )
    assert [len(found) for found in (swarm, waiting, ddp)] == [2, 3, 3]
    began = " ".join(README.split("\n## ")[0].split())
    assert f"at {np.mean(swarm):.0f} samples/s (two runs), or {np.mean(waiting):.0f} if they wait" in began
    assert f"DDP makes {np.mean(ddp):.0f} (" in began


def sizes(experiment: str, system: str, mbps: float) -> str:
    """The fewest and the most samples that an update of a system had, as the benchmarks write it."""
    found = valid(experiment, "samples_per_step", system=system, bandwidth_mbps=mbps)
    return f"{min(found):,.0f} to {max(found):,.0f}"


def test_the_benchmarks_say_how_many_samples_updates_had():
    text = PAGES[DOCS / "benchmarks.md"]
    assert f"{sizes('accuracy', 'swarm-local-1-fp16', 100)} samples instead of 512" in text
    assert f"{sizes('accuracy', 'swarm-local', 100)} instead of 2,048" in text
    assert f"({sizes('bandwidth', 'swarm-local', 10)} at 10 Mbit/s)" in text


@pytest.mark.parametrize(
    ("peers", "said"),
    [(8, "| eight peers, an average in fp16 every 15 s | {} cores, {} MB each |"), (2, ": {} cores and {} MB.\n")],
)
def test_the_benchmarks_say_what_a_peer_costs(peers, said):
    kept = json.loads((ROOT / "analysis" / "report" / f"footprint-{peers}.json").read_text())
    (row,) = [row for row in kept["rows"] if row["process"] == "beside the training"]
    assert said.format(f"{row['cores']:.3f}", f"{row['mb']:.0f}") in PAGES[DOCS / "benchmarks.md"]


def test_the_benchmarks_say_when_killed_peers_were_started_again():
    events = json.loads((ROOT / "analysis" / "report" / "soak.json").read_text())["events"]
    names = ("killed", "first peer killed", "all but one killed", "all killed")
    away = [event["mended"] - event["began"] for event in events if event["fault"] in names]
    assert len(away) == 18
    assert {int(seconds) for seconds in away} == {3}
    assert "after their restart, 3 s after the kill" in PAGES[DOCS / "benchmarks.md"]


def test_the_benchmarks_count_every_fault():
    events = json.loads((ROOT / "analysis" / "report" / "soak.json").read_text())["events"]
    table = PAGES[DOCS / "benchmarks.md"].split("\n| fault | times |")[1].split("\n\n")[0]
    assert sum(map(int, re.findall(r"^\| [^|]+ \| (\d+) \|", table, re.MULTILINE))) == len(events)


def test_the_benchmarks_list_every_experiment():
    names = {file.stem for file in (ROOT / "analysis" / "experiments").rglob("*.toml")}
    rows = PAGES[DOCS / "benchmarks.md"].split("\n| experiment | question |")[1].split("\n\n")[0]
    assert set(re.findall(r"`([a-z0-9_]+)`", rows)) == names


def test_constraints_name_versions_and_nothing_else():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines)
