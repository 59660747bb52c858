"""How often a peer states which state it holds, and that the statement is about the right step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from swarm.protocol.attestation import DIGEST_BYTES, Attestation
from swarm.state_sync.state_version import SKETCH_EVERY, StateVersion
from swarm.state_sync.training_state import SharedState
from swarm.training.joining.attester import MAX_SHARE, Attester

CPU = torch.device("cpu")


def make() -> StateVersion:
    model = nn.Linear(40, 10)
    return StateVersion(SharedState(model, [torch.optim.SGD(model.parameters())]), 0, list(model.parameters()))


class Clock:
    """A clock on which time passes when the test, or a digest, says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        monkeypatch.setattr("swarm.training.joining.attester.time", clock)


@pytest.mark.parametrize(
    ("cost_share", "every"),
    [(0.1, 1), (0.9, 1), (1.5, 2), (2.5, 4), (4.5, 8), (9.0, 16), (10**3, 1024)],
    ids=lambda value: str(value),
)
def test_a_digest_costs_next_to_nothing_and_a_sketch_comes_with_every_eighth_update(monkeypatch, cost_share, every):
    clock, version, said = Clock(monkeypatch), make(), []
    honest = version.attest

    def attest(with_digest=True):
        clock.now += cost_share * MAX_SHARE * with_digest  # in a step whose updates take a second
        return honest(with_digest)

    monkeypatch.setattr(version, "attest", attest)
    attester = Attester(version, CPU)
    attester.tell = said.append
    attester.begin()
    attester.wait()
    for step in range(1, 4 * SKETCH_EVERY + 1):
        clock.now = 100.0 + step
        version.advance(b"%16d" % step)
        attester.note_update()
        attester.wait()
    attester.close()
    steps = range(SKETCH_EVERY + 1, 4 * SKETCH_EVERY + 1)
    late = [attestation for attestation in said if attestation.step in steps]
    assert [own.step for own in late] == [step for step in steps if step % min(every, SKETCH_EVERY) == 0]
    assert [own.step for own in late if own.digest] == [step for step in steps if step % every == 0]
    assert all(own.sketch for own in late)


def test_a_statement_is_about_the_state_of_its_step():
    """The update after that step waits. A statement that would come too late is not made at all."""
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


def test_a_state_that_cannot_be_read_does_no_harm(monkeypatch):
    version, said = make(), []
    attester = Attester(version, CPU)
    attester.tell = said.append

    def broken(with_digest=True):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(version, "attest", broken)
    attester.begin()
    attester.wait()
    true = Attestation(0, version.lineage, bytes(DIGEST_BYTES), ())
    monkeypatch.setattr(version, "attest", lambda with_digest=True: true)
    attester.begin()
    attester.wait()
    attester.close()
    assert said == [true]
