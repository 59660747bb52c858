"""Input of a volunteer that cannot work is refused in one sentence that names the fix."""

from __future__ import annotations

import socket

import pytest
import torch

from recipe.presets import preset
from recipe.run_folder import RunFolder
from tests.helpers.cli import START_SECONDS, Program, reaping
from tests.helpers.clusters import rude_listener

pytestmark = pytest.mark.timeout(300)

ADDRESS = "/ip4/127.0.0.1/tcp/{port}/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.parametrize(
    ("arguments", "explanation"),
    [
        ("--initial-peers 192.168.0.5:31337", "lacks the peer id"),
        ("--initial-peers /ip4/127.0.0.1/tcp/31337", "/p2p/PEER_ID is missing"),
        ("--recipe digit", "did you mean digits?"),
        ("--recipe missing.json", "missing.json cannot be read"),
        ("--model vit_tiny_patch16_223", "is no timm model (did you mean"),
        ("--batch-size 4096", "does not fit the target batch size of 512: give --batch-size 512 or less"),
        ("--batch-size 0", "--batch-size is 0"),
        ("--model resnet18 --batch-size 1", "which needs 2 samples or more: give --batch-size 2"),
        ("--initial-peers", "The address is empty: give the address of a running peer, or a join line"),
        ("--target-accuracy 95", "such as 0.95"),
        ("--max-time 5m", "write --max-time as HH:MM:SS"),
        ("--max-steps 0", "--max-steps is 0"),
        ("--port 70000", "--port is 70000"),
        ("--run-id ../elsewhere", "--run-id"),
        ("--public-name ../elsewhere", "--public-name"),
        ("--max-upload-mbps 3", "give 4 or more"),
        ("--max-upload-mbps nan", "give 4 or more"),
        ("--max-traffic-gb 0", "more than 0"),
        ("--averaging-timeout 3", "has to be longer than --matchmaking-time 5"),
        ("--public-ip router", "--public-ip router is not an IP address"),
        ("--public-ip 203.0.113.5", "--public-ip needs a fixed --port"),
        ("--recipe imagefolder-vit-small --data-dir nowhere", "nowhere"),
        pytest.param(
            "--device cuda",
            "--device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_input_is_explained(refused, arguments, explanation):
    assert explanation in refused(*arguments.split())


def test_an_address_without_a_listener_is_refused(refused):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert "refused" in refused("--initial-peers", ADDRESS.format(port=unused.getsockname()[1]))


def test_an_address_of_another_program_is_refused(refused):
    """The other program hangs up. A silent one gets five seconds, twice: `tests/integration/swarms/test_network.py`."""
    with rude_listener() as (_, port):
        error = refused("--initial-peers", ADDRESS.format(port=port))
    assert "No peer with the expected id answers" in error


def test_a_port_in_use(refused):
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert "is in use" in refused("--port", str(server.getsockname()[1]))


def test_a_folder_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused("--output-dir", str(tmp_path / "file" / "runs"))


def test_a_recipe_file_that_is_none(refused, tmp_path):
    (tmp_path / "recipe.json").write_text('{"learning_rate": 1}')
    assert "format" in refused("--recipe", str(tmp_path / "recipe.json"))


def test_a_data_folder_without_images(refused, tmp_path):
    (tmp_path / "data" / "train").mkdir(parents=True)
    error = refused("--recipe", "imagefolder-vit-small", "--data-dir", str(tmp_path / "data"))
    assert str(tmp_path / "data") in error


def test_a_folder_of_another_recipe(refused, tmp_path):
    RunFolder.create(tmp_path / "runs", "mine", "me").write_recipe(preset("synthetic"))
    error = refused("--run-id", "mine", "--public-name", "me")
    assert "holds a run of another recipe" in error
    assert "dataset: there synthetic, now digits" in error


def test_a_damaged_checkpoint(refused, tmp_path):
    folder = RunFolder.create(tmp_path / "runs", "mine", "me")
    (folder.checkpoints / "last.ckpt").write_bytes(b"half a file")
    assert "delete the folder to begin anew" in refused("--run-id", "mine", "--public-name", "me")


def test_more_steps_than_the_run_has(refused):
    assert "which has 60 updates" in refused("--max-steps", "61")


def test_weights_to_start_from_that_are_none(refused, tmp_path):
    assert "cannot be read (No such file" in refused("--start-from", str(tmp_path / "best.ckpt"))
    torch.save({"state_dict": {"model.head.weight": torch.ones(2)}, "global_step": 1}, tmp_path / "best.ckpt")
    assert "does not hold the weights" in refused("--start-from", str(tmp_path / "best.ckpt"))


def test_a_wrong_option_of_a_local_swarm(tmp_path):
    """It is refused before any peer starts."""
    with reaping() as programs:
        started = [
            Program("swarm", ["demo", "--output-dir", str(tmp_path), *arguments], tmp_path / f"{number}.log")
            for number, arguments in enumerate((["--port", "31337"], ["--target-accuracy", "95"], ["--lerning-rate"]))
        ]
        programs += started
        assert [program.wait(START_SECONDS) for program in started] == [2, 2, 2]
    outputs = [program.output for program in started]
    assert "--port belongs to one peer: leave that out here" in outputs[0]
    assert "such as 0.95" in outputs[1]
    assert "--learning-rate" in outputs[2]
    assert not list(tmp_path.glob("*/peer-1"))
