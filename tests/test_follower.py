"""Whose state a peer takes over when the first attempt fails."""

from concurrent.futures import Future
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recipe.errors import InputError
from swarm import follower as follower_module
from swarm.donors import Donors
from swarm.download import SLOWEST_BYTES_PER_SECOND, TooSlow
from swarm.follower import Follower
from swarm.packing import pack
from swarm.rounds import RoundFailed
from swarm.state import SharedState
from swarm.version import Version


def make(step: int) -> Version:
    model = nn.Linear(2, 1)
    state = SharedState(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return Version(state, step, list(model.parameters()))


def follower(version: Version, tracker, averager=None) -> Follower:
    gradients = SimpleNamespace(reset=lambda: None, weights=list(version.state.model.parameters()))
    return Follower(version, tracker, averager, gradients, None, lambda: False)


def catch_up(version: Version, tracker, averager) -> bool:
    return follower(version, tracker, averager).catch_up(timeout_seconds=20)


class Donor:
    """Its line fails some times before the state arrives."""

    looks = 0

    def __init__(self, source: Version, failures: int):
        self.source, self.failures, self.asked = source, failures, 0

    def download_state(self, peer_id, max_bytes, min_bytes_per_second) -> Future:
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
        self.swarm_step, self.distrusted = 0, self

    @property
    def superiors(self) -> list[str]:
        return [] if self._looks else list(self.others)

    def donors(self, min_step: int) -> list[str]:
        return self.superiors

    def name_of(self, peer: str) -> str:
        return peer

    @property
    def is_distrusted(self) -> bool:
        return self._looks > 0

    def add(self, peer: str) -> None:
        self._looks = 3

    cannot_hand_over = add

    def has_handed_over(self, peer: str) -> None:
        self.trusted = True

    def came_back(self) -> None:
        self.has_come_back = True

    def wait_refreshed(self, timeout_seconds: float) -> None:
        self._looks = max(0, self._looks - 1)


def test_a_newcomer_tries_again_who_could_not_hand_over_the_state():
    newcomer, donor, tracker = make(0), Donor(make(7), failures=2), Tracker()
    assert catch_up(newcomer, tracker, donor)
    assert (newcomer.step, donor.asked) == (7, 3)
    assert tracker.trusted
    assert tracker.has_come_back


def test_who_has_trained_goes_on_without_who_claims_to_be_ahead():
    member, donor, tracker = make(5), Donor(make(7), failures=1), Tracker()
    member.advance(b"a round")
    assert not catch_up(member, tracker, donor)
    assert (member.step, donor.asked) == (6, 1)


class Stalling(Tracker):
    """Two strangers answer, and what they send is of no use; they are believed again at once."""

    superiors = ("anna", "ben", "cleo")

    def __init__(self):
        super().__init__()
        self.others = {"anna": SimpleNamespace(step=7), "ben": SimpleNamespace(step=7), "cleo": SimpleNamespace(step=6)}
        self.given_up = []

    def donors(self, min_step: int) -> list[str]:
        return ["anna", "ben"]

    def cannot_hand_over(self, peer: str) -> None:
        self.given_up.append(peer)

    def wait_refreshed(self, timeout_seconds: float) -> None:
        Event().wait(0.02)


def test_who_has_trained_does_not_end_because_nobody_hands_over_a_state():
    member, newcomer, donor = make(5), make(0), Donor(make(7), failures=10**9)
    member.advance(b"a round")
    tracker = Stalling()
    assert not follower(member, tracker, donor).catch_up(timeout_seconds=0.2)
    assert {*tracker.given_up[-2:]} == {"anna", "ben"}, "nobody is asked again at once"
    assert "cleo" not in tracker.given_up, "it is where we are, and was not asked"
    assert member.step == 6
    with pytest.raises(InputError, match=r"could not be downloaded in 0 s \(its line is dead\)"):
        follower(newcomer, Stalling(), donor).catch_up(timeout_seconds=0.2)


class StoppedAverager:
    """Its process has been stopped while it downloaded, and says nothing any more."""

    looks, is_killed = 0, False

    def download_state(self, peer_id, max_bytes, min_bytes_per_second) -> Future:
        return Future()

    def kill(self) -> None:
        self.is_killed = True

    def check_alive(self) -> None:
        self.looks += self.looks < 3  # it has been stopped after three
        if self.is_killed:
            raise InputError("The averaging process has died")


def test_an_averaging_process_that_is_stopped_while_it_downloads_is_ended(monkeypatch):
    monkeypatch.setattr(follower_module, "HANGS_SECONDS", 0.1)
    averager = StoppedAverager()
    with pytest.raises(InputError, match="has died"):
        catch_up(make(0), Tracker(), averager)
    assert averager.looks == 3, "it was waited for as long as it showed that it was there"


class Lines:
    """Each donor sends so many bytes per second."""

    looks = 0

    def __init__(self, source: Version, rates: dict[str, float]):
        self.source, self.rates, self.asked = source, rates, []

    def download_state(self, peer_id, max_bytes, min_bytes_per_second) -> Future:
        self.asked.append(peer_id)
        if (rate := self.rates[peer_id]) >= min_bytes_per_second:
            return Donor(self.source, failures=0).download_state(peer_id, max_bytes, min_bytes_per_second)
        future: Future = Future()
        future.set_exception(TooSlow(rate))
        return future

    def check_alive(self) -> None:
        pass


@pytest.mark.parametrize(
    ("rates", "asked"),
    [
        ({"anna": 1e5, "ben": 3e7, "cleo": 3e7}, ["anna", "ben"]),
        ({"anna": 1e5, "ben": 3e5, "cleo": 2e5, "dan": 3e7}, ["anna", "ben", "cleo", "ben"]),
        ({"anna": 1e5}, ["anna"]),
        ({"anna": 1e4, "ben": 1e5}, ["anna", "ben", "ben"]),
    ],
    ids=["another one is faster", "all who were tried are slow", "nobody else", "one is far too slow"],
)
def test_a_slow_donor_is_left_for_a_faster_one(rates, asked):
    newcomer, lines, tracker = make(0), Lines(make(7), rates), Tracker()
    tracker.others = dict.fromkeys(rates)
    assert catch_up(newcomer, tracker, lines)
    assert (newcomer.step, lines.asked) == (7, asked)


def test_who_is_behind_does_not_take_over_the_step_that_it_has():
    """However fast the line: it would be as far behind afterwards."""
    member, lines, tracker = make(5), Lines(make(7), {"anna": 1e5, "cleo": 3e7}), Tracker()
    tracker.others = {"anna": SimpleNamespace(step=7), "cleo": SimpleNamespace(step=5)}
    tracker.swarm_step = 7
    tracker.donors = lambda min_step: [peer for peer, record in tracker.others.items() if record.step >= min_step]
    assert catch_up(member, tracker, lines)
    assert (member.step, lines.asked) == (7, ["anna"])


def test_when_all_slow_donors_have_left_the_others_are_asked():
    donors = Donors()
    for peer in ("anna", "ben", "cleo"):
        donors.was_slow(peer, 1e5)
    assert [peer for peer, _ in donors.in_order(["dan", "eve"])] == ["dan", "eve"]
    donors.was_slow("dan", 2e5)
    assert donors.in_order(["dan", "eve"]) == [("dan", SLOWEST_BYTES_PER_SECOND)]


def test_a_newcomer_does_not_wait_for_who_has_left():
    newcomer, donor, tracker = make(0), Donor(make(7), failures=1), Tracker()
    tracker.cannot_hand_over = lambda peer: tracker.others.clear()
    assert not catch_up(newcomer, tracker, donor)
    assert newcomer.step == 0


def test_a_true_state_under_a_false_claim_is_not_taken_over():
    """Whoever took it over would be told of a later step again, and drop its samples again, after every micro-batch."""
    member, donor, tracker = make(5), Donor(make(6), failures=0), Tracker()
    tracker.others["anna"] = SimpleNamespace(step=10**6)
    member.advance(b"a round")
    assert not catch_up(member, tracker, donor)
    assert (member.step, member.lineage) == (6, b"a round")
    assert not tracker.trusted


def test_a_state_of_a_step_that_nobody_can_have_made_is_not_taken_over():
    member, donor, tracker = make(5), Donor(make(10**6), failures=0), Tracker()
    tracker.others["anna"] = SimpleNamespace(step=7)
    member.advance(b"a round")
    assert not catch_up(member, tracker, donor)
    assert (member.step, donor.asked) == (6, 1)


def test_weights_of_no_use_are_replaced_or_end_a_peer_that_is_alone():
    member, tracker = make(5), Tracker()
    assert follower(member, tracker).find_healer() == "anna"
    tracker.others = {}
    assert follower(member, tracker).find_healer() is None, "they are finite: the data may be the reason"
    with torch.no_grad():
        next(member.state.model.parameters()).fill_(torch.nan)
    with pytest.raises(InputError, match="start again"):
        follower(member, tracker).find_healer()


def test_a_leader_with_another_model_ends_newcomers_only():
    newcomer, member, tracker = make(0), make(5), Tracker()
    with pytest.raises(InputError, match="anna averages another model"):
        follower(newcomer, tracker).refused_by("anna")
    assert not tracker.is_distrusted
    member.advance(b"a round")
    follower(member, tracker).refused_by("anna")
    assert tracker.is_distrusted
