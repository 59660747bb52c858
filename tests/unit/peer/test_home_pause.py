"""If its owner wishes, a peer leaves while its machine runs on its battery, or its line is metered."""

import contextlib
import os
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from recipe.presets import preset
from recipe.run_folder import RunFolder
from swarm.network.home import sparing
from swarm.network.home.sparing import is_on_battery, never_spared, wait_while_spared, why_spared
from swarm.peer import main, options
from swarm.peer.callbacks import home_pause
from swarm.peer.callbacks.home_pause import HomePause
from swarm.peer.options import parse_options
from swarm.peer.startup_timer import STARTED


def begin(monkeypatch, words: list[str]) -> int:
    """Begin a peer with these options, up to its imports. Return its exit status."""

    def imports():
        raise SystemExit(0)

    monkeypatch.setattr(main, "reap", lambda: None)  # it would reap the children of this process
    monkeypatch.setattr(main, "speaks", imports)
    monkeypatch.delenv("INITIAL_PEERS", raising=False)
    with contextlib.suppress(SystemExit):
        return main.run(lambda: parse_options(words))
    return 0


@pytest.mark.parametrize(
    ("battery", "is_on"),
    [
        (None, None),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=None), None),
        (SimpleNamespace(power_plugged=False), True),
    ],
    ids=["none", "charging", "unknown", "in use"],
)
def test_a_battery_counts_if_it_is_in_use(monkeypatch, battery, is_on):
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery)
    assert is_on_battery() is is_on
    assert why_spared(True, False) == ("This machine runs on its battery" if is_on else "")
    assert why_spared(False, False) == ""
    assert len(never_spared(True, False)) == (is_on is None)
    assert never_spared(False, False) == []


def test_a_peer_pauses_for_no_battery_where_the_system_has_none(monkeypatch):
    """psutil looks into a folder that some containers lack."""

    def missing():
        raise FileNotFoundError("/sys/class/power_supply")

    monkeypatch.setattr(psutil, "sensors_battery", missing)
    assert why_spared(True, False) == ""
    (sentence,) = never_spared(True, False)
    assert sentence.startswith("--pause-on-battery: this machine has no battery, or does not say")


@pytest.fixture
def network_manager(tmp_path, monkeypatch):
    """Replace NetworkManager's answer by the content of the file that is returned."""
    program = tmp_path / "busctl"
    program.write_text(f'#!/bin/sh\ncat "{tmp_path}/says"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "says"


@pytest.mark.parametrize(
    ("says", "is_metered"), [("u 1", True), ("u 3", True), ("u 0", None), ("u 2", False), ("u 4", False), ("", None)]
)
def test_a_line_counts_if_it_is_metered_or_taken_for_metered(network_manager, says, is_metered):
    network_manager.write_text(says + "\n")
    assert why_spared(False, True) == ("This machine's line is metered" if is_metered else "")
    assert why_spared(False, False) == ""
    assert len(never_spared(False, True)) == (is_metered is None)


def test_a_person_that_wishes_to_pause_hears_at_the_start_that_the_system_does_not_tell_when(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_spared(False, True) == ""
    begin(monkeypatch, ["--pause-on-metered"])
    assert capsys.readouterr().out.startswith("--pause-on-metered: NetworkManager is missing or does not know")
    begin(monkeypatch, [])
    assert capsys.readouterr().out == ""


def test_each_reason_of_a_pause_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(sparing, "LOOK_SECONDS", 0.0)
    reasons = iter(["It rains", "It rains", "It snows", ""])
    wait_while_spared(lambda: next(reasons))
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"{reason}: this peer is paused until that changes. Ctrl-C ends it." for reason in ("It rains", "It snows")
    ]


@pytest.mark.parametrize(("again", "has_trained"), [(True, True), (True, False), (False, True)])
def test_a_peer_that_is_ended_during_a_pause_says_where_its_weights_are(
    monkeypatch, capsys, tmp_path, again, has_trained
):
    def interrupted(_why):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "wait_while_spared", interrupted)
    if again:
        monkeypatch.setenv(STARTED, str(time.time()))
    if has_trained:
        folder = RunFolder.create(tmp_path, "home", "ada")
        folder.write_recipe(preset("digits"))
        (folder.checkpoints / "last.ckpt").touch()
    words = ["--output-dir", str(tmp_path), "--run-id", "home", "--public-name", "ada"]
    if again and has_trained:
        assert begin(monkeypatch, words) == 0
        said = (
            f"Stopped while paused (battery or metered line).\nWeights: {tmp_path / 'home' / 'ada' / 'checkpoints'}\n"
        )
        assert capsys.readouterr() == (said, "")
    else:
        assert begin(monkeypatch, words) == 130
        assert capsys.readouterr().err == "Interrupted before the training began.\n"


@pytest.mark.parametrize("has_trained", [True, False])
def test_a_pause_ends_when_time_is_up(monkeypatch, capsys, tmp_path, has_trained):
    """The machine runs on its battery all night."""
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=False))
    monkeypatch.setattr(sparing, "LOOK_SECONDS", 0.0)
    seconds = iter([3599.0, 3600.0, 3600.0])
    monkeypatch.setattr(options, "seconds_since_command", lambda: next(seconds))
    words = ["--output-dir", str(tmp_path), "--run-id", "home", "--public-name", "ada", "--pause-on-battery"]
    if has_trained:
        monkeypatch.setenv(STARTED, str(time.time()))
        folder = RunFolder.create(tmp_path, "home", "ada")
        folder.write_recipe(preset("digits"))
        (folder.checkpoints / "last.ckpt").touch()
    assert begin(monkeypatch, [*words, "--max-time", "01:00:00"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("This machine runs on its battery: this peer is paused")
    weights = [f"Weights: {tmp_path / 'home' / 'ada' / 'checkpoints'}"]
    assert said[1:] == ["Time is up (--max-time).", *(weights if has_trained else [])]


class Looks:
    """A training whose batches end, with a reason to pause that the test sets."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(home_pause, "LOOK_SECONDS", 0.0)
        self.why, self.stop = "", threading.Event()
        self.callback = HomePause(lambda: self.why, self.stop)
        self.coordinator = SimpleNamespace(step=5, is_averaging=False)
        self.trainer = SimpleNamespace(
            strategy=SimpleNamespace(coordinator=self.coordinator), global_step=5, max_steps=20
        )
        self.end_batch()

    def end_batch(self) -> bool:
        """End a batch. Return whether this peer leaves."""
        self.callback.on_train_batch_end(self.trainer, None, None, None, 0)
        return self.callback.has_stopped


def test_a_peer_leaves_between_two_rounds(monkeypatch):
    looks = Looks(monkeypatch)
    assert not looks.end_batch()
    looks.why, looks.coordinator.is_averaging = "It rains", True
    assert not looks.end_batch(), "a round is under way"
    looks.coordinator.step = 6
    assert looks.end_batch(), "and has ended, although the next one is under way"
    assert looks.stop.is_set()


def test_a_peer_that_charges_again_meanwhile_stays(monkeypatch):
    looks = Looks(monkeypatch)
    looks.why, looks.coordinator.is_averaging = "It rains", True
    assert not looks.end_batch()
    looks.why, looks.coordinator.is_averaging = "", False
    assert not looks.end_batch()


def test_a_peer_that_leaves_for_another_reason_does_not_come_back(monkeypatch):
    looks = Looks(monkeypatch)
    looks.stop.set()
    looks.why = "It rains"
    assert not looks.end_batch()


def test_a_peer_that_has_made_the_last_update_does_not_come_back(monkeypatch):
    looks = Looks(monkeypatch)
    looks.why, looks.trainer.global_step = "It rains", 20
    assert not looks.end_batch()
