"""A peer whose processes share one model resumes from a checkpoint that it has written, as the program does."""

import shutil

import pytest
import torch

from recipe.run_folder import read_metrics
from swarm.peer.main import main
from tests.helpers.clusters import run_processes
from tests.helpers.islands.processes import start_island
from tests.helpers.strategy_runs import Plan, assert_same_bits
from tests.helpers.swarm_peers import Peers

pytestmark = pytest.mark.timeout(120)


def run(arguments: list[str]) -> int:
    """Run one process of an island; returns its exit status."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


def test_it_ends_at_the_same_weights_as_without_a_break(tmp_path):
    """The peer is alone, so that nothing but its own samples counts."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = "--recipe digits --target-batch-size 32 --batch-size 8 --max-steps 4 --checkpoint-every-steps 2"
    options = f"{options} --inside fsdp --run-id run --public-name peer --port 0".split()
    assert run_processes(2, run, [*options, "--output-dir", str(whole)]) == [0, 0]
    shutil.copytree(whole, resumed)
    folder = resumed / "run" / "peer"
    for checkpoint in (folder / "checkpoints").iterdir():
        if checkpoint.name != "step=2.ckpt":
            checkpoint.unlink()
    (folder / "metrics.jsonl").unlink()
    assert run_processes(2, run, [*options, "--output-dir", str(resumed)]) == [0, 0]
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line] == [3, 4]
    own, expected = (
        torch.load(path / "run" / "peer" / "checkpoints" / "last.ckpt", weights_only=False) for path in (resumed, whole)
    )
    assert_same_bits(own["state_dict"], expected["state_dict"])
    for one, other in zip(*(state["optimizer_states"][0]["state"].values() for state in (own, expected)), strict=True):
        assert_same_bits(one, other)


def test_a_library_user_may_give_the_checkpoint_to_all_processes(tmp_path):
    def train(steps: int, **options):
        with Peers() as peers:
            start_island(peers, "a", Plan(), 32, inside="fsdp", max_steps=steps, **options)
            return peers.results()["a0"][0]

    train(5, folder=tmp_path)
    (checkpoint,) = tmp_path.glob("*.ckpt")
    resumed = train(7, checkpoint=checkpoint)
    assert [update.step for update in resumed.updates] == [6, 7]
    assert {int(one["step"]) for one in resumed.optimizer["state"].values()} == {7}
