"""Trainings with one member that lies: what is refused, and the arithmetic of the tables."""

import json
import os
import subprocess
from unittest.mock import patch

import pytest

from analysis.endurance import lying, membership
from analysis.endurance.honest_swarm import SwarmError
from analysis.endurance.lying import LyingOptions, cost, main, table
from recipe.errors import InputError
from recipe.training.pacing import ALL_SAMPLES, computes_all


@pytest.fixture(autouse=True)
def same_environment_afterwards():
    """The measurements change the environment for the peers that they start, and later tests would be paced, too."""
    with patch.dict(os.environ):
        yield


def row(lie: str, where: str, seconds: float, weights=("a", "a"), accuracy: float = 0.9, number: int = 1) -> dict:
    return {
        "lie": lie,
        "where": where,
        "number": number,
        "accuracies": [accuracy, accuracy - 0.02],
        "weights": list(weights),
        "named_by": 1,
        "updates": [60, 60],
        "seconds": [seconds, seconds],
        "longest_pause_seconds": seconds / 10,
    }


def test_pairs_of_honest_trainings_say_what_clipping_costs():
    rows = [row("honest", "off", seconds, number=number) for number, seconds in enumerate((60.0, 50.0, 40.0))]
    rows += [row("honest", "clip", seconds, number=number) for number, seconds in enumerate((60.0, 50.0, 80.0))]
    rows += [row("reverse", "clip", 1.0)]
    # ratios 1, 1 and 0.5; Student's 4.303 for two degrees of freedom
    assert cost(rows) == "Updates/s with clip over off, without lies: 0.833 ± 0.717 (n = 3)"
    assert cost(rows[:3]) == ""


def test_a_training_that_failed_leaves_the_other_pairs_as_they_are():
    """The machine is slower each time. The first training with clipping has not come to its end."""
    rows = [row("honest", "off", 60.0, number=1)]
    for number, seconds in ((2, 90.0), (3, 120.0)):
        rows += [row("honest", where, seconds, number=number) for where in ("off", "clip")]
    assert cost(rows) == "Updates/s with clip over off, without lies: 1.000 (n = 2)"


def test_two_pairs_of_swarms_have_no_interval():
    numbers = {"updates_per_second": 1.0, "first_contribution_seconds": 2.0, "failed_rounds": 0}
    shown = membership.table([{"open": numbers, "by invitation": numbers}] * 2)
    assert list(shown.columns[-1].cells) == ["1.000", "1.000", ""]


def test_a_row_has_the_mean_over_trainings_and_says_whether_weights_are_alike():
    shown = table([row("reverse", "clip", 60.0), row("reverse", "clip", 30.0, ("a", "b"), 0.8)])
    cells = [next(iter(column.cells)) for column in shown.columns]
    assert cells == ["reverse", "clip", "2", "84.0", "1.500", "6.0", "up to 2 different ones", "1 to 1"]
    (same,) = (
        list(column.cells) for column in table([row("noise", "off", 60.0)]).columns if "weights" in column.header
    )
    assert same == ["bit-identical"]


def test_another_system_has_an_accuracy_and_no_more():
    shown = table([{"lie": "reverse", "where": "ddp", "accuracies": [0.1]}])
    assert [next(iter(column.cells)) for column in shown.columns][:5] == ["reverse", "ddp", "1", "10.0", "–"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"peers": 1}, "peers"),
        ({"liars": 0}, "liars"),
        ({"updates": 5}, "updates"),
        ({"paced_samples_per_second": 0.0}, "more than 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, problem):
    with pytest.raises(InputError, match=problem):
        LyingOptions(**options).check()


def test_bad_input_ends_with_a_sentence_and_status_2(capsys):
    assert main(["--peers", "1"]) == 2
    assert "--peers" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["clip", "ddp", "hivemind"])
def test_each_repetition_has_a_seed_of_its_own(tmp_path, monkeypatch, where):
    """All trainings of a repetition share a seed.

    DDP has no fresh identities, so one seed for all would train the same.
    """
    commands = []

    def popen(command, **_):
        commands.append([str(word) for word in command])
        raise SwarmError("nothing is started here")

    monkeypatch.setattr(subprocess, "Popen", popen)
    for number in (1, 2):
        with pytest.raises(SwarmError, match="nothing is started"):
            lying.measure("reverse", where, number, LyingOptions(output_dir=tmp_path))
    seeds = [command[command.index("--seed") + 1] for command in commands if "--seed" in command]
    seeds += [word for command in commands for word in command if word.startswith("seed=")]
    assert seeds == (["seed=0", "seed=1"] if where == "hivemind" else ["0", "1"])


def test_accuracies_are_of_gradients_of_all_samples(tmp_path, monkeypatch):
    monkeypatch.delenv(ALL_SAMPLES, raising=False)
    computed = []

    def measure(lie, where, number, options):
        computed.append(computes_all())
        return row(lie, where, 60.0)

    monkeypatch.setattr(lying, "measure", measure)
    assert main(["reverse", "--where", "clip", "--output-dir", str(tmp_path)]) == 0
    assert computed == [True], "two of 16 samples of a micro-batch are no gradient to judge an accuracy by"
    assert json.loads((tmp_path / "lying.json").read_text())["environment"]["paced_all_samples"] is True


def test_the_cost_of_membership_deletes_only_what_it_has_made(tmp_path, monkeypatch, capsys):
    def watch(*_) -> None:
        raise SwarmError("no peer trains")

    monkeypatch.setattr(membership, "watch", watch)
    key, earlier = tmp_path / "identities" / "ada.key", tmp_path / "swarms" / "0-op" / "peer-1.log"
    result = tmp_path / "membership.json"
    for file in (key, earlier, result):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("kept?")
    assert membership.main(["--output-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: pair 1: no peer trains\n"
    assert key.exists()
    assert not earlier.exists()
    assert not result.exists(), "or it would pass for the result of this time"
