"""How often a peer says what state it holds, and that it says it of the step that it means."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from swarm.protocol.attestation import DIGEST_BYTES, Attestation
from swarm.state_sync.state_version import SKETCH_EVERY, StateVersion
from swarm.state_sync.training_state import SharedState
from swarm.training.attester import MAX_SHARE, Attester

CPU = torch.device("cpu")


def make() -> StateVersion:
    model = nn.Linear(40, 10)
    return StateVersion(SharedState(model, [torch.optim.SGD(model.parameters())]), 0, list(model.parameters()))


class Clock:
    """Time passes when the test, or a digest, says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        monkeypatch.setattr("swarm.training.attester.time", clock)


@pytest.mark.parametrize(
    ("cost_share", "every"),
    [(0.1, 1), (0.9, 1), (1.5, 2), (2.5, 4), (4.5, 8), (100.0, 8)],
    ids=lambda value: str(value),
)
def test_it_costs_next_to_nothing_or_comes_with_every_eighth_update(monkeypatch, cost_share, every):
    clock, version, said = Clock(monkeypatch), make(), []
    honest = version.attest

    def attest():
        clock.now += cost_share * MAX_SHARE  # of updates that take a second
        return honest()

    monkeypatch.setattr(version, "attest", attest)
    attester = Attester(version, CPU)
    attester.tell = lambda attestation: said.append(attestation.step)
    attester.begin()
    attester.wait()
    for step in range(1, 4 * SKETCH_EVERY + 1):
        clock.now = 100.0 + step
        version.advance(b"%16d" % step)
        attester.note_update()
        attester.wait()
    attester.close()
    late = [step for step in said if step > SKETCH_EVERY]
    assert late == list(range(SKETCH_EVERY + every, 4 * SKETCH_EVERY + 1, every))


def test_what_it_says_is_the_state_of_that_step():
    """The update after it waits, and what comes too late is not said at all."""
    version, said = make(), []
    attester = Attester(version, CPU)
    attester.tell = said.append
    with version.lock:
        version.advance(b"1" * 16)
        attester.note_update()
        version.advance(b"2" * 16)
    attester.wait()
    assert said == [], "this peer has gone on"
    with version.lock:
        version.advance(b"3" * 16)
        attester.begin()
    attester.wait()
    with version.lock:
        assert said == [version.attest()]
    attester.close()


def test_a_state_that_cannot_be_read_harms_nobody(monkeypatch):
    version, said = make(), []
    attester = Attester(version, CPU)
    attester.tell = said.append

    def broken():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(version, "attest", broken)
    attester.begin()
    attester.wait()
    true = Attestation(0, version.lineage, bytes(DIGEST_BYTES))
    monkeypatch.setattr(version, "attest", lambda: true)
    attester.begin()
    attester.wait()
    attester.close()
    assert said == [true]
