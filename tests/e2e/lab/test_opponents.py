"""What the swarm is compared with does what it says: torchft's peers average, and give as many samples as ours do."""

import subprocess
import sys

import pytest

from recipe.presets import preset
from recipe.run_folder import RunFolder, read_metrics
from swarm.network.addresses import environment_without_peers

pytest.importorskip("torchft")


def start(number: int, folder, *options: str) -> subprocess.Popen:
    address = ["--name", f"h{number}", "--address", f"127.0.0.{number}", "--first", "127.0.0.1", "--peers", "2"]
    command = [sys.executable, "-m", "analysis.opponents.torchft_diloco", *address, "--output-dir", str(folder)]
    env = environment_without_peers() | {"OMP_NUM_THREADS": "1"}
    options = ("--recipe", "digits", "--steps", "2", *options)
    return subprocess.Popen([*command, *options], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_two_peers_of_torchft_average_while_they_compute(tmp_path):
    peers = [start(number, tmp_path, "--local-steps", "4", "--delay", "3") for number in (1, 2)]
    for peer in peers:
        printed, _ = peer.communicate(timeout=200)
        assert peer.returncode == 0, printed.decode()
    for name in ("h1", "h2"):
        lines = read_metrics(RunFolder(tmp_path / "run" / name).metrics)
        samples = {line["step"]: line["swarm/own_samples"] for line in lines if "swarm/own_samples" in line}
        assert samples == dict.fromkeys((1, 2), 4 * preset("digits").target_batch_size / 2)


def test_an_average_cannot_be_on_its_way_longer_than_to_the_next_one(tmp_path):
    peer = start(1, tmp_path, "--local-steps", "2", "--delay", "2")
    printed, _ = peer.communicate(timeout=200)
    assert (peer.returncode, printed.decode()) == (
        2,
        "error: --delay has to be less than --local-steps: an average comes before the next one.\n",
    )
