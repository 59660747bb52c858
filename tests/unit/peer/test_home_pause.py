"""A peer leaves for as long as its machine runs on its battery, or its line is metered, if its owner wishes."""

import os
import threading
from types import SimpleNamespace

import psutil
import pytest

from swarm.network.home import sparing
from swarm.network.home.sparing import is_on_battery, wait_while_spared, why_spared
from swarm.peer.callbacks import home_pause
from swarm.peer.callbacks.home_pause import HomePause


@pytest.mark.parametrize(
    ("battery", "is_on"),
    [
        (None, False),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=None), False),
        (SimpleNamespace(power_plugged=False), True),
    ],
    ids=["none", "charging", "unknown", "in use"],
)
def test_a_battery_counts_if_it_is_in_use(monkeypatch, battery, is_on):
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery)
    assert is_on_battery() is is_on
    assert why_spared(True, False) == ("This machine runs on its battery" if is_on else "")
    assert why_spared(False, False) == ""


@pytest.fixture
def network_manager(tmp_path, monkeypatch):
    """Says what the file has that is returned."""
    program = tmp_path / "busctl"
    program.write_text(f'#!/bin/sh\ncat "{tmp_path}/says"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "says"


@pytest.mark.parametrize(
    ("says", "is_spared"), [("u 1", True), ("u 3", True), ("u 0", False), ("u 4", False), ("", False)]
)
def test_a_line_counts_that_is_metered_or_taken_for_it(network_manager, says, is_spared):
    network_manager.write_text(says + "\n")
    assert why_spared(False, True) == ("This machine's line is metered" if is_spared else "")
    assert why_spared(True, False) == ""


def test_without_network_manager_no_line_is_metered(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_spared(False, True) == ""


def test_it_is_said_once_why_nothing_happens(monkeypatch, capsys):
    monkeypatch.setattr(sparing, "LOOK_SECONDS", 0.0)
    reasons = iter(["It rains", "It rains", "It snows", ""])
    wait_while_spared(lambda: next(reasons))
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"{reason}: this peer waits for better times. Ctrl-C ends it." for reason in ("It rains", "It snows")
    ]


class Looks:
    """A training whose batches end, and what the machine says."""

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
        """Whether this peer leaves."""
        self.callback.on_train_batch_end(self.trainer, None, None, None, 0)
        return self.callback.has_stopped


def test_it_leaves_between_two_rounds(monkeypatch):
    looks = Looks(monkeypatch)
    assert not looks.end_batch()
    looks.why, looks.coordinator.is_averaging = "It rains", True
    assert not looks.end_batch(), "a round is under way"
    looks.coordinator.step = 6
    assert looks.end_batch(), "and has ended, although the next one is under way"
    assert looks.stop.is_set()


def test_who_goes_on_charging_meanwhile_stays(monkeypatch):
    looks = Looks(monkeypatch)
    looks.why, looks.coordinator.is_averaging = "It rains", True
    assert not looks.end_batch()
    looks.why, looks.coordinator.is_averaging = "", False
    assert not looks.end_batch()


def test_who_leaves_for_another_reason_does_not_come_back(monkeypatch):
    looks = Looks(monkeypatch)
    looks.stop.set()
    looks.why = "It rains"
    assert not looks.end_batch()


def test_who_has_made_the_last_update_does_not_come_back(monkeypatch):
    looks = Looks(monkeypatch)
    looks.why, looks.trainer.global_step = "It rains", 20
    assert not looks.end_batch()
