"""Run folders as an early version wrote them: a peer goes on from them, and their weights can be exported.

Each is of a ViT of one block, which made 8 of 40 updates with digits. Only its last checkpoint is kept here.
"""

import shutil

import pytest
import torch

from recipe.export.folder import export_model
from recipe.run_folder import RunFolder, read_metrics
from swarm.peer.main import main
from tests.helpers.clusters import run_processes
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.timeout(120)

EARLY = ROOT / "tests" / "data" / "early_runs"


@pytest.fixture(params=["sync", "local"])
def folder(request, tmp_path) -> RunFolder:
    """A copy of a run with this averaging."""
    shutil.copytree(EARLY / request.param, tmp_path / request.param)
    return RunFolder(tmp_path / request.param / "ada")


def test_a_peer_goes_on_from_an_early_run(folder):
    options = f"--resume --output-dir {folder.path.parent.parent} --max-steps 10 --device cpu --batch-size 32"
    assert run_processes(1, main, [*options.split(), "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]) == [0]
    steps = [line["step"] for line in read_metrics(folder.metrics) if "train/loss" in line]
    assert steps == [*range(1, 11)], "the updates of the early version, and two more"
    last = torch.load(folder.checkpoints / "last.ckpt", weights_only=False)
    assert last["global_step"] == 10
    assert {int(moments["step"]) for moments in last["optimizer_states"][0]["state"].values()} == {10}


def test_the_weights_of_an_early_run_are_exported(folder, tmp_path):
    assert export_model(folder.path, tmp_path / "exported").trained.step == 8
