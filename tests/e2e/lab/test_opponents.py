"""The swarm's opponents do what they claim: torchft's peers average, and give as many samples as ours do."""

import pytest

from recipe.presets import preset
from recipe.run_folder import RunFolder, read_metrics
from tests.helpers.cli import Program, reaping

pytest.importorskip("torchft")
pytestmark = pytest.mark.long


def start(number: int, folder, *options: str) -> Program:
    address = ["--name", f"h{number}", "--address", f"127.0.0.{number}", "--first", "127.0.0.1", "--peers", "2"]
    arguments = [*address, "--output-dir", str(folder), "--recipe", "digits", "--steps", "2", *options]
    return Program("analysis.opponents.torchft_diloco", arguments, folder / f"h{number}.log")


def test_two_peers_of_torchft_average_while_they_compute(tmp_path):
    with reaping() as programs:
        for number in (1, 2):
            programs.append(start(number, tmp_path, "--local-steps", "4", "--delay", "3"))
        for program in programs:
            assert program.wait(200) == 0, program.output
    for name in ("h1", "h2"):
        lines = read_metrics(RunFolder(tmp_path / "run" / name).metrics)
        samples = {line["step"]: line["swarm/own_samples"] for line in lines if "swarm/own_samples" in line}
        assert samples == dict.fromkeys((1, 2), 4 * preset("digits").target_batch_size / 2)


def test_an_average_cannot_be_on_its_way_longer_than_to_the_next_one(tmp_path):
    with reaping() as programs:
        programs.append(program := start(1, tmp_path, "--local-steps", "2", "--delay", "2"))
        assert program.wait(200) == 2
        assert program.output == (
            "error: --delay has to be less than --local-steps: an average comes before the next one.\n"
        )
