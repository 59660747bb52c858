"""Whose state a peer takes over when the first attempt fails."""

from concurrent.futures import Future
from types import SimpleNamespace

import torch
from torch import nn

from swarm.rounds import RoundFailed
from swarm.state import SharedState
from swarm.transfer import pack
from swarm.version import Version


def make(step: int) -> Version:
    model = nn.Linear(2, 1)
    state = SharedState(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return Version(state, step, list(model.parameters()), lambda: False)


class Donor:
    """Its line fails some times before the state arrives."""

    def __init__(self, source: Version, failures: int):
        self.source, self.failures, self.asked = source, failures, 0

    def download_state(self, peer_id, max_bytes) -> Future:
        future: Future = Future()
        self.asked += 1
        if self.asked <= self.failures:
            future.set_exception(RoundFailed("its line is dead"))
        else:
            description, tensors = self.source.export()
            layout, content = pack(tensors)
            future.set_result((description, layout, content))
        return future

    def check_alive(self) -> None:
        pass


class Tracker:
    """Knows one peer, at a later step, which it distrusts until it has looked three times."""

    def __init__(self):
        self.others, self._looks, self.trusted, self.has_come_back = {"anna": None}, 0, False, False

    @property
    def superiors(self) -> list[str]:
        return [] if self._looks else list(self.others)

    def donors(self, min_step: int) -> list[str]:
        return self.superiors

    def name_of(self, peer: str) -> str:
        return peer

    def distrust(self, peer: str) -> None:
        self._looks = 3

    def trust(self, peer: str) -> None:
        self.trusted = True

    def came_back(self) -> None:
        self.has_come_back = True

    def wait_refreshed(self, timeout_seconds: float) -> None:
        self._looks = max(0, self._looks - 1)


def test_a_newcomer_tries_again_who_could_not_hand_over_the_state():
    newcomer, donor, tracker = make(0), Donor(make(7), failures=2), Tracker()
    assert newcomer.catch_up(tracker, donor, timeout_seconds=20)
    assert (newcomer.step, donor.asked) == (7, 3)
    assert tracker.trusted
    assert tracker.has_come_back


def test_who_has_trained_goes_on_without_who_claims_to_be_ahead():
    member, donor, tracker = make(5), Donor(make(7), failures=1), Tracker()
    member.advance(b"a round")
    assert not member.catch_up(tracker, donor, timeout_seconds=20)
    assert (member.step, donor.asked) == (6, 1)


def test_a_newcomer_does_not_wait_for_who_has_left():
    newcomer, donor, tracker = make(0), Donor(make(7), failures=1), Tracker()
    tracker.distrust = lambda peer: tracker.others.clear()
    assert not newcomer.catch_up(tracker, donor, timeout_seconds=20)
    assert newcomer.step == 0


def test_a_true_state_under_a_false_claim_is_not_taken_over():
    """Whoever took it over would be told of a later step again, and drop its samples again, after every micro-batch."""
    member, donor, tracker = make(5), Donor(make(6), failures=0), Tracker()
    tracker.others["anna"] = SimpleNamespace(step=10**6)
    member.advance(b"a round")
    assert not member.catch_up(tracker, donor, timeout_seconds=20)
    assert (member.step, member.lineage) == (6, b"a round")
    assert not tracker.trusted
