"""What a peer shows. Its training does not depend on a reader."""

import errno
import io
import itertools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.run_folder import RunFolder, read_metrics
from recipe.training.task import ClassificationTask
from recipe.training.trainer import build_trainer
from swarm.peer.callbacks import reachable_peer_check, time_limit
from swarm.peer.callbacks.evaluation import Evaluation
from swarm.peer.callbacks.slow_line_advice import SlowLineAdvice
from swarm.peer.callbacks.status_reporter import STATUS_SECONDS, PatientConsole, StatusReporter
from swarm.peer.callbacks.swarm_metrics import SwarmMetrics
from swarm.peer.callbacks.time_limit import TimeLimit
from swarm.peer.callbacks.traffic_limit import TrafficLimit
from swarm.peer.startup_timer import seconds_since_command
from swarm.peer.status import Status
from swarm.protocol.messages import Ticket
from swarm.protocol.round_report import StepReport
from swarm.runtime.line_use import LineUse
from swarm.runtime.timeouts import seconds_since_boot
from swarm.training.averaging_mode import Averaging
from swarm.training.limits import is_to_leave
from tests.helpers.cli import wait_until


class Broken(io.StringIO):
    """A file to which nothing can be written."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def write(self, _text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))  # for EPIPE, Python makes a BrokenPipeError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EIO])
def test_output_that_cannot_be_written_ends_nothing(number):
    console = PatientConsole(file=Broken(number))
    for _ in range(2):
        console.print("step 1/20")


def test_output_is_shown():
    console = PatientConsole(file=(file := io.StringIO()))
    console.print("step 1/20")
    assert file.getvalue() == "step 1/20\n"


@pytest.mark.parametrize("is_quiet", [True, False])
def test_a_peer_that_waits_for_company_prints_nothing_below_its_join_line(tmp_path, capsys, is_quiet):
    folder = RunFolder.create(tmp_path, "night-1", "ada")
    asked, metrics = threading.Event(), SwarmMetrics(folder.rounds)
    reporter = StatusReporter(folder, Status("ada", "night-1", "joining"), metrics, asked, is_quiet)
    trainer = SimpleNamespace(strategy=SimpleNamespace(coordinator=None), max_steps=20)
    reporter.setup(trainer, None, "fit")
    wait_until(lambda: Status.read(folder.status), 10, "status.json tells that it lives")
    time.sleep(2 * STATUS_SECONDS)
    said = capsys.readouterr().out
    assert said == ("" if is_quiet else "joining\n")
    reporter.on_train_start(trainer, None)
    time.sleep(2 * STATUS_SECONDS)
    reporter.finish("left")
    assert capsys.readouterr().out == "joining\n", "a line tells that the training has begun"


def test_a_member_that_claims_a_false_loss_does_not_change_what_others_say_of_theirs(tmp_path):
    coordinator = SimpleNamespace(last_step=None)
    trainer = SimpleNamespace(global_step=0, strategy=SimpleNamespace(coordinator=coordinator), loggers=[])
    metrics = SwarmMetrics(tmp_path / "rounds.jsonl")
    metrics.on_train_start(trainer, None)
    for step, own_samples, own_loss in ((1, 10, 2.5), (2, 0, 0.0)):
        trainer.global_step = step
        ticket = Ticket(step - 1, own_samples, False, own_loss, bytes(16))
        coordinator.last_step = StepReport(step, 2, 40, own_samples, 1e9, 1.0, 0.0, None, ticket=ticket)
        metrics.on_train_batch_end(trainer, None, None, None, 0)
    assert metrics.updates == 2
    assert metrics.loss == 1e9
    assert metrics.own_loss == 2.5, "in the second round it only listened"


def leaves_with(looks: Iterator[int]) -> str:
    """Return the complaint of a client-mode peer that sees so many other client-mode peers, look by look."""

    class Tracker:
        @property
        def others(self) -> dict:
            return {str(number): SimpleNamespace(client_mode=True) for number in range(next(looks))}

    strategy = SimpleNamespace(coordinator=SimpleNamespace(tracker=Tracker()))
    check = reachable_peer_check.ReachablePeerCheck(client_mode=True, stop_requested=(asked := threading.Event()))
    check.setup(SimpleNamespace(strategy=strategy), None, "fit")
    assert asked.wait(10)
    return check.complaint


@pytest.fixture
def hasty(monkeypatch):
    """No pause between two looks, and no patience where client-mode peers are seen."""
    monkeypatch.setattr(reachable_peer_check, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(reachable_peer_check, "LOOK_SECONDS", 0.0)
    return monkeypatch


def test_a_peer_that_can_call_no_other_hears_how_many_are_there(hasty):
    assert "(only 2 client-mode peers are there)" in leaves_with(itertools.repeat(1))


def test_a_peer_whose_own_line_is_away_has_more_patience_and_says_what_may_be_wrong(hasty):
    """It gets no record at all, and cannot tell whether all other peers have left."""
    assert "(only 3 client-mode peers are there)" in leaves_with(itertools.chain([0] * 100, itertools.repeat(2)))
    hasty.setattr(reachable_peer_check, "RETURN_SECONDS", 0.0)
    assert "is this machine's network or clock wrong?" in leaves_with(itertools.repeat(0))


def said_after(seconds: list[tuple[float, float]], averaging: Averaging, module: nn.Module, num_peers: int = 2) -> list:
    """The advice that a person gets after updates with these seconds of computing and of averaging."""
    said: list[str] = []
    callback = SlowLineAdvice(averaging, said.append)
    for step, (compute, exchange) in enumerate(seconds):
        exchanged = SimpleNamespace(exchange_seconds=exchange)
        report = SimpleNamespace(step=step, num_peers=num_peers, compute_seconds=compute, round=exchanged)
        trainer = SimpleNamespace(strategy=SimpleNamespace(coordinator=SimpleNamespace(last_step=report)))
        for _ in range(2):  # micro-batches of the same update
            callback.on_train_batch_end(trainer, module, None, None, 0)
    return said


def test_averages_that_take_longer_than_computing_are_told_of_once_with_what_helps():
    slow, plain, with_buffers = [(40.0, 62.0)] * 9, nn.Linear(2, 2), nn.BatchNorm1d(2)
    fp16 = Averaging.local(1, "fp16")
    (line,) = said_after(slow, fp16, plain)
    assert line.startswith("An average takes 62 s and the computing for it 40 s")
    assert "--codec topk sends 1/32 of the bytes" in line
    for averaging, module in ((fp16, with_buffers), (Averaging.local(1, "topk"), plain)):
        (line,) = said_after(slow, averaging, module)
        assert "--target-batch-size" in line
    assert said_after([(40.0, 62.0)] * 4, fp16, plain) == [], "too early to say"
    assert said_after([(0.2, 0.3)] * 9, fp16, plain) == [], "bytes are not why"
    assert said_after([(62.0, 40.0)] * 4 + slow, fp16, plain) == [], "most of the first rounds were short"
    assert said_after(slow, fp16, plain, num_peers=1) == []


def test_a_peer_leaves_when_its_traffic_is_used_up(monkeypatch):
    monkeypatch.setenv("SWARM_TRAFFIC_BYTES", "0")  # monkeypatch puts it back: otherwise it would reach later programs
    coordinator = SimpleNamespace(step=7, is_averaging=True)
    trainer = SimpleNamespace(strategy=SimpleNamespace(coordinator=coordinator))
    asked, line = threading.Event(), LineUse()
    limit, without = TrafficLimit(line, 0.001, asked), TrafficLimit(line, None, asked)

    def leaves() -> bool:
        for callback in (limit, without):
            callback.on_train_batch_end(trainer, None, None, None, 0)
        assert limit.has_stopped == asked.is_set()
        return limit.has_stopped

    line.receive(999_999)
    assert not leaves()
    line.receive(1)
    assert not leaves(), "a round is under way, and the others would have to make it again"
    coordinator.step = 8
    assert leaves(), "it has just ended, though the next one may have begun"
    assert not without.has_stopped
    assert without.num_bytes == 1_000_000
    assert TrafficLimit(LineUse(), 0.001, asked).num_bytes == 0, "of another start"
    limit.keep()
    assert TrafficLimit(LineUse(), 0.001, asked).num_bytes == 1_000_000, "a peer that starts itself again counts on"


def test_time_counts_from_the_command_on_also_while_a_peer_joins(monkeypatch):
    limit = TimeLimit(timedelta(seconds=seconds_since_command() + 10))
    trainer = Trainer(accelerator="cpu", callbacks=[limit], logger=False, enable_checkpointing=False)
    assert not is_to_leave(trainer)
    boot = seconds_since_boot()
    monkeypatch.setattr(time_limit, "seconds_since_boot", lambda: boot + 11)
    assert is_to_leave(trainer)


@pytest.mark.parametrize("is_reached", [False, True])
def test_a_peer_that_waits_asks_its_limits(is_reached):
    asked, line = threading.Event(), LineUse()
    line.receive(2_000_000 * is_reached)
    trainer = SimpleNamespace(
        callbacks=[TrafficLimit(line, 0.001, asked)],
        should_stop=False,
        strategy=SimpleNamespace(coordinator=SimpleNamespace(step=5, is_averaging=False)),
    )
    assert not is_to_leave(trainer), "it is asked to stop in another way"
    assert asked.is_set() == is_reached


@pytest.mark.slow
def test_weights_are_tested_after_validations_and_nothing_is_chosen_by_that(tmp_path):
    recipe = replace(preset("digits"), embed_dim=16, depth=1, num_heads=2, warmup_steps=1, target_batch_size=32)
    recipe = replace(recipe, validate_every_steps=2, total_steps=9, drop_path=0.5)
    folder, said = RunFolder.create(tmp_path, "run", "ada"), []
    evaluation = Evaluation(5, 2, folder.evaluations, said.append)

    def train(name: str, *callbacks) -> tuple[Trainer, ClassificationTask]:
        torch.manual_seed(0)
        trainer = build_trainer(recipe, RunFolder.create(tmp_path, "run", name), accelerator="cpu", callbacks=callbacks)
        trainer.fit(task := build_task(recipe), build_data(recipe, batch_size=32))
        return trainer, task

    trainer, task = train("ada", evaluation)
    _, untested = train("ben")
    for tested, other in zip(task.parameters(), untested.parameters(), strict=True):
        assert torch.equal(tested, other), "the training does not notice"

    lines = read_metrics(folder.evaluations)
    assert [line["step"] for line in lines] == [6, 9], "at the first validation after 5, and at the end"
    validated = {line["step"]: line["val/top1"] for line in read_metrics(folder.metrics) if "val/top1" in line}
    assert [line["val_top1"] for line in lines] == pytest.approx([validated[6], validated[9]])
    assert evaluation.best["val_top1"] == max(line["val_top1"] for line in lines)
    assert said[-1].startswith("Test images at step 9: ")
    trainer.test(task, build_data(recipe, batch_size=7), verbose=False)
    found = {name.removeprefix("test/"): float(value) for name, value in trainer.callback_metrics.items()}
    assert {name: lines[-1][name] for name in ("loss", "top1", "top5")} == pytest.approx(
        {name: found[name] for name in ("loss", "top1", "top5")}, rel=1e-4
    )
    assert lines[-1]["images"] == 270
    assert not any("test/top1" in line for line in read_metrics(folder.metrics) if line["step"] < 9)
