"""Processes of an island with options that do not fit: one of them says why, and all end with status 2."""

import contextlib
import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from recipe.errors import InputError
from swarm.peer.island import launch
from swarm.peer.main import main
from swarm.peer.options import PeerOptions, parse_options
from swarm.training.strategy import SwarmStrategy
from tests.helpers.clusters import run_processes
from tests.helpers.strategy_runs import MICRO_BATCH, Plan, Samples, Task, trainer_for

pytestmark = pytest.mark.timeout(120)


def start(commands: list[list[str]]) -> tuple[int, str]:
    """Run this process; returns its exit status, and what it prints on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(commands[int(os.environ["RANK"])])
        except SystemExit as end:
            status = end.code
    return status, said.getvalue()


def refused(*commands: str) -> str:
    """Return the one sentence with which an island refuses these commands."""
    found = run_processes(len(commands), start, [command.split() for command in commands])
    assert [status for status, _ in found] == [2] * len(commands), found
    said = [line for _, text in found for line in text.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, found
    return said[0]


def test_processes_with_other_recipes_are_refused():
    said = refused("--recipe digits", "--recipe cifar10-vit-tiny")
    assert "Process 1 of this island has --recipe 'cifar10-vit-tiny' and process 0 has 'digits'" in said


def test_processes_with_other_addresses_are_refused():
    peer = "/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    said = refused(*(f"--initial-peers /ip4/127.0.0.1/tcp/{port}{peer}" for port in (31337, 31338)))
    assert "--initial-peers" in said
    assert "start all of them with the same command" in said


def test_a_helper_is_one_process(tmp_path):
    assert "A helper computes nothing" in refused(*["--role helper --port 31337"] * 2)


def test_processes_of_which_one_only_shares_its_model_are_refused():
    said = refused("--inside fsdp --batch-size 8", "--batch-size 8")
    assert "Process 1 of this island has --inside 'ddp' and process 0 has 'fsdp'" in said


def test_a_model_in_pieces_needs_a_micro_batch():
    assert "give --batch-size" in refused(*["--inside fsdp"] * 2)


def test_a_model_in_pieces_waits_for_each_average(tmp_path):
    """Its processes learn from the first one how the run averages, so each of them could report the same problem."""
    options = f"--inside fsdp --batch-size 8 --averaging overlap --output-dir {tmp_path} --public-name peer --port 0"
    assert "give --averaging sync" in refused(*[options] * 2)


def train_in_pieces(optimizer: str) -> str:
    """Return the refusal of an optimizer that is not elementwise; "exit 2" if another process reports it."""
    task = Task(Plan())
    task.configure_optimizers = lambda: getattr(torch.optim, optimizer)(task.parameters())
    strategy = SwarmStrategy(64, "test", inside="fsdp")
    try:
        trainer_for(strategy, devices=2).fit(task, DataLoader(Samples(), MICRO_BATCH, sampler=of_this_process()))
    except InputError as error:
        return str(error)
    except SystemExit as end:
        return f"exit {end.code}"
    return ""


def of_this_process() -> DistributedSampler:
    return DistributedSampler(Samples(), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))


def test_an_optimizer_that_cannot_be_divided_is_refused_once():
    said, other = run_processes(2, train_in_pieces, "Adafactor")
    assert said.startswith("The optimizer Adafactor cannot be divided among processes: take one of SGD, Adam, AdamW,")
    assert other == "exit 2"


def test_an_option_that_does_not_exist_is_refused_once():
    found = run_processes(2, start, [["--batch-size", "none"]] * 2)
    assert [status for status, _ in found] == [2, 2]
    assert [bool(text) for _, text in found] == [True, False]


@pytest.fixture
def environment(monkeypatch):
    """The environment of the first of two processes."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_more_processes_than_gpus_are_refused(environment):
    environment.setenv("LOCAL_WORLD_SIZE", "2")
    environment.setattr("torch.cuda.is_available", lambda: True)
    environment.setattr("torch.cuda.device_count", lambda: 1)
    from recipe.training.launched import Launched

    with pytest.raises(InputError, match="need as many GPUs and torch finds 1"):
        Launched.from_environment().device("auto")


@pytest.mark.parametrize(
    "variables",
    [{"RANK": "x"}, {"RANK": "2"}, {"RANK": "-1"}, {"LOCAL_WORLD_SIZE": "0"}, {"LOCAL_WORLD_SIZE": "3"}],
)
def test_variables_that_torchrun_would_not_set_are_refused(environment, variables):
    from recipe.training.launched import Launched

    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(InputError, match="=".join(*variables.items())):
        Launched.from_environment()


def checkpoint_of(folder: Path) -> Path:
    """Return a checkpoint that a peer has written into its run folder just now."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "rounds.jsonl").touch()
    path = folder / "checkpoints" / "step=1.ckpt"
    path.touch()
    return path


def test_an_island_that_torchrun_starts_again_is_the_same_peer(environment, tmp_path):
    options = replace(PeerOptions(), machine=replace(PeerOptions().machine, output_dir=tmp_path))
    first, again = launch.settled(options), launch.settled(options)
    assert first.machine.public_name == again.machine.public_name
    os.utime(checkpoint_of(tmp_path / "before" / first.machine.public_name), (1, 1))
    environment.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert launch.settled(options).run_id is None, "it was killed before its first checkpoint of this run"
    checkpoint_of(tmp_path / "run" / first.machine.public_name)
    environment.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert launch.settled(options).run_id is None
    environment.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert launch.settled(options).run_id == "run"
    resuming = replace(options, resume=True)
    assert launch.settled(resuming) == resuming


def test_a_machine_with_several_gpus_is_offered_an_island(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/venv/bin/swarm", "join", "swarm://line"])
    said, command = launch.offer(4).splitlines()
    assert said.endswith("One peer of all, with what you gave in place of …:"), "an invitation is not printed"
    assert command.strip() == "torchrun --standalone --nproc-per-node 4 --max-restarts 9 -m swarm join 'swarm://…'"
    monkeypatch.setattr("sys.argv", ["/venv/bin/swarm", "join", "/ip4/203.0.113.5/tcp/31337/p2p/Qm"])
    said, command = launch.offer(4).splitlines()
    assert said.endswith("One peer of all:")
    assert command.endswith(" -m swarm join /ip4/203.0.113.5/tcp/31337/p2p/Qm")


def test_one_process_cannot_share_its_model():
    with pytest.raises(InputError, match="start several with torchrun"):
        launch.check_one_process(parse_options(["--inside", "fsdp"]))


def test_options_that_each_machine_has_of_its_own_may_differ():
    one, other = (launch.asked(parse_options(words.split())) for words in ("--data-dir a --port 1", "--data-dir b"))
    assert one == other
