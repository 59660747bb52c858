"""What a person reads of a peer."""

import io
import math

import pytest
from rich.console import Console

from recipe.presets import preset
from recipe.run_folder import RunFolder
from swarm.peer.status import Status, how_to_use, result_table, shown_rate, status_table


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0.0, "0"),
        (0.0042, "0.0042"),
        (0.312, "0.31"),
        (1.0, "1"),
        (3.14, "3.1"),
        (9.97, "10"),
        (734.4, "734"),
        (2043.0, "2,043"),
    ],
)
def test_rates_are_readable(rate, text):
    assert shown_rate(rate) == text


def test_a_person_that_has_trained_reads_how_to_use_the_weights():
    folder = RunFolder("runs/night-1/ada")
    assert how_to_use(preset("digits"), folder).endswith("swarm export runs/night-1/ada --to my-model")
    said = how_to_use(preset("docstrings"), folder)
    assert said == 'torch.load("runs/night-1/ada/checkpoints/last.ckpt", weights_only=True)["state_dict"], in Python'


def test_the_status_wakes_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _file: pytest.fail("it is written twice a second, for weeks"))
    Status("ada", "run", "training", step=7).write(tmp_path / "status.json")
    assert Status.read(tmp_path / "status.json").step == 7
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def text_of(table) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()


def test_a_slow_peer_is_shown_everywhere():
    status = Status("slow", "run", "training", step=1, total_steps=9, rate=0.312, swarm_rate=0.734)
    assert "0.31 of 0.73 samples/s" in status.line()
    assert "0.31" in text_of(status_table([status], "run", 120))
    assert "0.73" in text_of(status_table([status], "run", 120))
    summary = {"outcome": "completed", "steps": 1, "val_accuracy": 0.5, "seconds": 100.0, "name": "slow"}
    summary |= {"updates": 1, "complete_updates": 1, "samples": 31}
    assert "0.31" in text_of(result_table([summary]))
