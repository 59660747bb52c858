"""The micro-batch follows the time that it takes in the training, within its bounds."""

import json
import math
import signal
from dataclasses import replace
from itertools import islice

import pytest
import torch

from recipe.data.vision_data import VisionData
from recipe.presets import preset
from recipe.registry import build_data
from swarm.training.micro_batch import finder as micro_batch
from swarm.training.micro_batch import review as micro_batch_review
from swarm.training.micro_batch.review import MICRO_BATCHES, UPDATES, MicroBatchRule


def judged(rule: MicroBatchRule, seconds_per_sample: float, updates: int, has_room: bool = True) -> list[int]:
    """Return the sizes that it changes to over so many updates of a dozen micro-batches."""
    changes = []
    for _ in range(updates):
        for _ in range(12):
            rule.note(rule.samples, seconds_per_sample * rule.samples)
        if (samples := rule.judge(has_room)) is not None:
            changes.append(samples)
    return changes


def test_measured_while_busy_it_grows_to_what_takes_a_second():
    assert judged(MicroBatchRule(1, 1, 64), 0.011, updates=60) == [2, 4, 8, 16, 32, 64]
    assert judged(MicroBatchRule(1, 1, 64), 0.1, updates=60) == [2, 4, 8]


def test_it_stays_below_what_the_recipe_allows_and_the_memory_holds():
    assert judged(MicroBatchRule(4, 1, 8), 0.001, updates=60) == [8]
    assert judged(MicroBatchRule(4, 1, 64), 0.001, updates=60, has_room=False) == []


def test_measured_while_idle_it_shrinks_but_not_below_what_the_model_needs():
    assert judged(MicroBatchRule(32, 1, 64), 0.3, updates=60) == [16, 8]
    assert judged(MicroBatchRule(8, 2, 64), 9.0, updates=60) == [4, 2]
    assert judged(MicroBatchRule(2, 2, 1), 0.001, updates=60) == []


def test_it_waits_for_updates_and_for_micro_batches():
    rule = MicroBatchRule(1, 1, 64)
    assert judged(rule, 0.01, updates=UPDATES - 1) == []
    assert judged(rule, 0.01, updates=1) == [2]
    for _ in range(MICRO_BATCHES):
        rule.note(1, 0.01)
    assert [rule.judge(True) for _ in range(20)] == [None] * 20, "micro-batches of the size before do not count"


def test_one_slow_micro_batch_changes_nothing():
    rule = MicroBatchRule(8, 1, 8)
    for _ in range(20):
        for place in range(MICRO_BATCHES):
            rule.note(8, 60.0 if place == 0 else 1.0)
        assert rule.judge(True) is None


def test_a_machine_that_is_busy_now_and_then_settles():
    rule, changes = MicroBatchRule(8, 1, 16), []
    for turn in range(200):
        changes += judged(rule, (0.01, 1.0)[turn % 2], updates=UPDATES)
    assert len(changes) <= 12, "each change of direction doubles the wait: a logarithm of the updates"


def test_samples_keep_their_order_whatever_the_size():
    recipe = replace(preset("digits"), augmentation="light")
    plain, changed = (build_data(recipe, batch_size=4, identity="ada") for _ in range(2))
    expected = torch.cat([images for images, _ in islice(plain.train_dataloader(), 12)])
    batches, sizes = iter(changed.train_dataloader()), []
    seen = []
    for size in (4, 8, 2, 8):
        changed.resize_micro_batch(size)
        seen += [next(batches)[0], next(batches)[0]]
        sizes += [len(images) for images in seen[-2:]]
    assert sizes == [4, 4, 8, 8, 2, 2, 8, 8]
    assert torch.equal(torch.cat(seen), expected[: sum(sizes)])
    assert changed.val_dataloader().batch_sampler.batch_size == 8


@pytest.mark.timeout(200)
@pytest.mark.long
def test_in_a_real_run(tmp_path, capsys, monkeypatch):
    """The peer's measurement found a machine so busy that it chose single samples; only the clock is made up."""
    from swarm.peer import main as peer
    from tests.helpers.cli import TINY

    monkeypatch.delenv("INITIAL_PEERS", raising=False)
    monkeypatch.setattr(peer, "reap", lambda: None)  # the test process waits for its children itself
    true_seconds = micro_batch.Probe.seconds
    slow = lambda probe, samples: (true_seconds(probe, samples), 1.3 * samples)[1]  # noqa: E731
    monkeypatch.setattr(micro_batch.Probe, "seconds", slow)
    monkeypatch.setattr(micro_batch_review, "MIN_FREE_BYTES", -math.inf)  # whatever other programs on this machine do
    options = ["--recipe", "digits", "--run-id", "busy", "--public-name", "ada", "--output-dir", str(tmp_path), *TINY]
    options += ["--target-batch-size", "64", "--max-steps", "30", "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert peer.main(options) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capsys.readouterr().out
    assert "Micro-batch: 1 sample, measured: 1.3 s each" in said
    assert "Micro-batch: 2 samples from now on instead of 1, by measuring again while training." in said
    assert "Micro-batch: 4 samples from now on instead of 2" in said
    assert "Micro-batch: 8 samples" not in said, "the target batch is the bound"
    folder = tmp_path / "busy" / "ada"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["micro_batch"] == 4
    last = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    position = last[VisionData.__qualname__]["position"]
    assert summary["samples"] <= position <= summary["samples"] + 64, "a resumed peer goes on behind them"
