"""From which peers a joiner takes its state when the first attempt fails, and that a peer trains on meanwhile."""

import contextlib
from concurrent.futures import Future
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from recipe.errors import InputError
from swarm.averaging.compression.fragments import Fragments
from swarm.protocol.messages import Blame
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from swarm.state_sync.download import Downloaded, DownloadProgress, DownloadRequest, NoState
from swarm.state_sync.serialization import pack
from swarm.state_sync.state_version import StateVersion
from swarm.state_sync.training_state import SharedState
from swarm.training.joining import fetch, state_takeover
from swarm.training.joining.attempt import Progress
from swarm.training.joining.follower import Follower
from tests.helpers.donors import version_at
from tests.helpers.hurry import shorter


def follower(version: StateVersion, tracker, averager=None) -> Follower:
    weights = list(version.state.model.parameters())
    fragments = Fragments.of([sum(weight.numel() for weight in weights)])
    gradients = SimpleNamespace(adopt=lambda: None, weights=weights, fragments=fragments)
    listener = SimpleNamespace(begin=lambda: None, is_at=lambda step: False)
    probation = SimpleNamespace(examine=lambda *_: None, begin=lambda *_: None)
    own = SimpleNamespace(
        version=version, tracker=tracker, averager=averager, gradients=gradients, should_stop=lambda: False
    )
    return Follower(own, apply=None, listener=listener, probation=probation)


def catch_up(version: StateVersion, tracker, averager, timeout_seconds: float = 20, joins: bool = True) -> bool:
    """Let a peer catch up to the end, as a newcomer does."""
    follows = follower(version, tracker, averager)
    follows.begin(None, timeout_seconds, joins=joins)
    return to_the_end(follows)


def to_the_end(follows: Follower) -> bool:
    """Follow until the attempt is over. Return whether this peer then holds other weights."""
    while (progress := follows.poll()) is Progress.NOTHING:
        follows.wait_a_little()
    return progress is Progress.OTHER_WEIGHTS


class Donor:
    """A donor with a line that fails some times before the state arrives. It has no averages."""

    timeouts = DEFAULT_TIMEOUTS

    def __init__(self, source: StateVersion, failures: int, busy_seconds: float = 0.0):
        self.source, self.failures, self.busy_seconds, self.asked = source, failures, busy_seconds, 0
        self.vector, self.cancelled, self.times_taken_over = torch.zeros(3), 0, 0
        self.transfers = SimpleNamespace(looks=0, arrived=DownloadProgress())

    def download_state(self, donors, request: DownloadRequest) -> Future:
        future: Future = Future()
        if request.average_of is not None:
            future.set_exception(NoState({}, "it has none"))
            return future
        self.asked += 1
        if self.asked <= self.failures and self.busy_seconds:
            future.set_exception(NoState({}, "", self.busy_seconds))
        elif self.asked <= self.failures:
            future.set_exception(NoState({donors[0]: "its line is dead"}))
        else:
            description, tensors = self.source.export()
            layout, content = pack(tensors)
            future.set_result(Downloaded(donors[0], description, layout, content))
        return future

    def cancel_download(self) -> None:
        self.cancelled += 1

    def took_over(self) -> None:
        self.times_taken_over += 1

    def check_alive(self) -> None:
        pass


@pytest.mark.parametrize(("reach", "times"), [(10**9, 1), (0, 0)])
def test_remainders_of_rounds_are_forgotten_with_the_weights_and_not_when_a_state_is_refused(reach, times):
    donor, tracker = Donor(version_at(7), failures=0), Tracker()
    tracker.reach = reach
    with contextlib.suppress(InputError):
        catch_up(version_at(0), tracker, donor, timeout_seconds=0.1)
    assert donor.asked
    assert donor.times_taken_over == times


class Tracker:
    """A tracker that knows one peer, at a later step, and distrusts it until it has looked three times."""

    def __init__(self):
        self.others, self._looks, self.trusted, self.has_come_back = {"anna": None}, 0, False, False
        self.others = {"anna": SimpleNamespace(step=0)}
        self.latest_step, self.refreshes, self.reach = 0, 0, 10**9
        self.swarm = self.exchange = self.distrusted = self

    @property
    def superiors(self) -> list[str]:
        return [] if self._looks else list(self.others)

    def donors(self, min_step: int) -> list[str]:
        return self.superiors

    def name_of(self, peer: str) -> str:
        return peer

    def may_hold(self, peer: str, step: int) -> bool:
        return step <= self.reach

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

    def ask_refreshed(self) -> int:
        self._looks = max(0, self._looks - 1)
        return self.refreshes

    def hurry(self) -> None:
        pass


def test_a_newcomer_tries_a_donor_again_that_could_not_hand_over_the_state():
    newcomer, donor, tracker = version_at(0), Donor(version_at(7), failures=2), Tracker()
    assert catch_up(newcomer, tracker, donor)
    assert (newcomer.step, donor.asked) == (7, 3)
    assert tracker.trusted
    assert tracker.has_come_back


def test_a_newcomer_waits_for_busy_donors_and_blames_none(caplog):
    newcomer, donor, tracker = version_at(0), Donor(version_at(7), failures=2, busy_seconds=0.1), Tracker()
    assert catch_up(newcomer, tracker, donor, timeout_seconds=0.05), "what they announce does not count"
    assert donor.asked == 3
    assert not tracker.is_distrusted
    assert "other joiners first" in caplog.text


def test_a_peer_that_has_trained_goes_on_without_a_donor_that_claims_to_be_ahead():
    member, donor, tracker = version_at(5), Donor(version_at(7), failures=1), Tracker()
    member.advance(b"a round")
    assert not catch_up(member, tracker, donor, joins=False)
    assert (member.step, donor.asked) == (6, 1)


class Stalling(Tracker):
    """A tracker with two strangers that answer and send nothing of use. They are believed again at once."""

    superiors = ("anna", "ben", "cleo")

    def __init__(self):
        super().__init__()
        self.others = {"anna": SimpleNamespace(step=7), "ben": SimpleNamespace(step=7), "cleo": SimpleNamespace(step=6)}
        self.given_up = []

    def donors(self, min_step: int) -> list[str]:
        return ["anna", "ben"]

    def cannot_hand_over(self, peer: str) -> None:
        self.given_up.append(peer)

    def ask_refreshed(self) -> int:
        Event().wait(0.02)
        return self.refreshes


def test_a_peer_that_has_trained_does_not_end_because_no_donor_hands_over_a_state():
    member, newcomer, donor = version_at(5), version_at(0), Donor(version_at(7), failures=10**9)
    member.advance(b"a round")
    tracker = Stalling()
    assert not catch_up(member, tracker, donor, timeout_seconds=0.2, joins=False)
    assert {*tracker.given_up[-2:]} == {"anna", "ben"}, "no donor is asked again at once"
    assert "cleo" not in tracker.given_up, "it is where we are, and was not asked"
    assert member.step == 6
    with pytest.raises(InputError, match=r"could not be downloaded in [0-9]+ s \(its line is dead\)"):
        catch_up(newcomer, Stalling(), donor, timeout_seconds=0.2)


def test_a_newcomer_whose_model_is_built_otherwise_reads_that_versions_may_differ():
    """Another timm can build another model of the same name. No message says with which one a run is trained."""
    model = torch.nn.Linear(3, 1)
    state = SharedState(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    donor = Donor(StateVersion(state, 7, list(model.parameters())), failures=0)
    with pytest.raises(InputError, match=r"does not fit this model\): .* torch and timm have the same versions here"):
        catch_up(version_at(0), Stalling(), donor, timeout_seconds=0.2)


class Pending(Donor):
    """A donor that delivers the state when the test says so."""

    def __init__(self, source: StateVersion):
        super().__init__(source, 0)
        self.coming: list[Future] = []

    def download_state(self, donors, request: DownloadRequest) -> Future:
        if request.average_of is not None:
            return super().download_state(donors, request)
        self.coming.append(Future())
        return self.coming[-1]

    def come(self) -> None:
        self.coming[-1].set_result(Donor(self.source, 0).download_state(["anna"], DownloadRequest(0)).result())


def test_a_peer_that_has_trained_computes_on_while_the_state_is_on_its_way():
    member, donor, tracker = version_at(5), Pending(version_at(7)), Tracker()
    member.advance(b"a round")
    follows = follower(member, tracker, donor)
    follows.begin(None, 20)
    for _ in range(100):
        assert follows.poll() is Progress.NOTHING
        assert (member.step, len(donor.coming)) == (6, 1), "nothing has changed, and the peer does not wait"
    donor.come()
    assert follows.poll() is Progress.OTHER_WEIGHTS
    assert (member.step, follows.is_running) == (7, False)


def test_a_state_that_this_peer_has_overtaken_is_not_taken_over_and_no_donor_is_blamed():
    member, donor, tracker = version_at(5), Pending(version_at(7)), Tracker()
    member.advance(b"a round")
    follows = follower(member, tracker, donor)
    follows.begin(None, 20)
    assert follows.poll() is Progress.NOTHING
    member.advance(b"another round")
    member.advance(b"one more")
    donor.come()
    assert follows.poll() is Progress.IN_VAIN
    assert (member.step, member.lineage) == (8, b"one more")
    assert not tracker.is_distrusted


class Witnesses:
    """Statements of the other peers that were in the last round with this peer."""

    leader, is_needed = "mallory", True

    def __init__(self, is_confirmed: bool = True, is_denied: bool = False, is_held: bool = True):
        self.is_confirmed, self.is_denied, self.is_held = is_confirmed, is_denied, is_held

    def may_confirm_state_of(self, donor) -> bool:
        return True

    def confirms(self, donor, step, lineage) -> bool:
        return self.is_held


def told(follows: Follower, witnesses: Witnesses) -> bool:
    """The outcome for a peer that its leader tells that the swarm has gone on."""
    follows.begin(None, 0.2, is_told=True, corroboration=witnesses)
    return to_the_end(follows)


def test_a_state_that_no_other_peer_holds_is_not_taken_over_and_its_donor_may_be_honest(monkeypatch, caplog):
    monkeypatch.setattr(state_takeover, "CONFIRM_SECONDS", 0.0)
    member, donor, tracker = version_at(5), Donor(version_at(7), 0), Tracker()
    member.advance(b"a round")
    donor.timeouts = shorter(300)
    assert not told(follower(member, tracker, donor), Witnesses(is_held=False))
    assert (member.step, tracker.is_distrusted) == (6, False)
    assert "no other peer confirms the state of step 7 that anna offers" in caplog.text
    assert told(follower(member, Tracker(), donor), Witnesses())
    assert member.step == 7


@pytest.mark.parametrize(
    ("record", "blamed_after"),
    [((9, b"other"), 1), ((6, b"other"), 1), ((6, b"a round"), 2), (None, 2)],
    ids=["further", "other weights", "where this peer is", "nothing"],
)
def test_a_leader_that_all_peers_deny_is_left_out(record, blamed_after):
    """Its round may only have failed. Then the leader is where all peers are, and has claimed a step only once."""
    member, donor, tracker, blamed = version_at(5), Donor(version_at(7), 0), Tracker(), []
    member.advance(b"a round")
    tracker.blame = blamed.append
    if record is not None:
        tracker.others["mallory"] = SimpleNamespace(step=record[0], lineage=record[1])
    follows = follower(member, tracker, donor)
    for times in (1, 2):
        assert not told(follows, Witnesses(is_confirmed=False, is_denied=True))
        assert bool(blamed) == (times >= blamed_after)
    assert blamed[0] == {"mallory": Blame.GOES_ON_ALONE}
    assert (member.step, donor.asked) == (6, 0), "nothing was downloaded"


def test_a_peer_that_leaves_ends_its_download():
    donor = Pending(version_at(7))
    follows = follower(version_at(0), Tracker(), donor)
    follows.begin(None, 20)
    assert follows.poll() is Progress.NOTHING
    follows.cancel()
    assert not follows.is_running
    assert donor.cancelled == 1


class StoppedAverager(Donor):
    """An averaging process that is stopped while it downloads, and says nothing any more."""

    is_killed = False

    def __init__(self):
        super().__init__(version_at(7), 0)

    def download_state(self, donors, request: DownloadRequest) -> Future:
        return Future() if request.average_of is None else super().download_state(donors, request)

    def kill(self) -> None:
        self.is_killed = True

    def check_alive(self) -> None:
        self.transfers.looks += self.transfers.looks < 3  # the process is stopped after three looks
        if self.is_killed:
            raise InputError("The averaging process has died")


def test_an_averaging_process_that_is_stopped_while_it_downloads_is_ended():
    averager = StoppedAverager()
    averager.timeouts = shorter(300)  # a tenth of a second
    with pytest.raises(InputError, match="has died"):
        catch_up(version_at(0), Tracker(), averager)
    assert averager.transfers.looks == 3, "it was waited for as long as it showed that it was there"


def test_how_far_a_download_is_can_be_seen(monkeypatch, caplog):
    monkeypatch.setattr(fetch, "TELL_SECONDS", 0.0)
    donor = Pending(version_at(7))
    donor.transfers.arrived = DownloadProgress(0, 31_000_000, 70_000_000, 40.2)
    follows = follower(version_at(0), Tracker(), donor)
    follows.begin(None, 20, joins=True)
    assert follows.poll() is Progress.NOTHING
    assert follows.poll() is Progress.NOTHING
    assert "state: 31 of 70 MB from anna, 40 s left" in caplog.text


def test_how_far_the_download_before_was_is_not_told_of_donors_that_are_not_asked_now(monkeypatch, caplog):
    monkeypatch.setattr(fetch, "TELL_SECONDS", 0.0)
    donor = Pending(version_at(7))
    donor.transfers.arrived = DownloadProgress(1, 31_000_000, 70_000_000, 40.2)  # the second one of those asked before
    follows = follower(version_at(0), Tracker(), donor)
    follows.begin(None, 20, joins=True)
    assert follows.poll() is Progress.NOTHING
    assert follows.poll() is Progress.NOTHING
    assert "MB" not in caplog.text


def test_a_peer_that_is_behind_does_not_take_over_the_step_that_it_has():
    member, donor, tracker = version_at(5), Donor(version_at(7), failures=0), Tracker()
    tracker.others = {"anna": SimpleNamespace(step=7), "cleo": SimpleNamespace(step=5)}
    tracker.latest_step, asked = 7, []

    def donors(min_step: int) -> list[str]:
        asked.append(min_step)
        return [peer for peer, record in tracker.others.items() if record.step >= min_step]

    tracker.donors = donors
    assert catch_up(member, tracker, donor)
    assert member.step == 7
    assert 6 in asked, "the state of a later step was asked for"


def test_a_newcomer_does_not_wait_for_a_donor_that_has_left():
    newcomer, donor, tracker = version_at(0), Donor(version_at(7), failures=1), Tracker()
    tracker.cannot_hand_over = lambda peer: tracker.others.clear()
    assert not catch_up(newcomer, tracker, donor)
    assert newcomer.step == 0


def test_a_true_state_under_a_false_claim_is_not_taken_over():
    """A peer that took it over would hear of a later step, and drop its samples, again after every micro-batch."""
    member, donor, tracker = version_at(5), Donor(version_at(6), failures=0), Tracker()
    tracker.others["anna"] = SimpleNamespace(step=10**6)
    member.advance(b"a round")
    assert not catch_up(member, tracker, donor, joins=False)
    assert (member.step, member.lineage) == (6, b"a round")
    assert not tracker.trusted


@pytest.mark.parametrize(("claimed", "reach"), [(7, 10**9), (10**6, 106)])
def test_a_state_of_a_step_that_no_peer_can_have_made_is_not_taken_over(claimed, reach, caplog):
    """The donor's own claim does not matter: other peers have to be near that step."""
    member, donor, tracker = version_at(5), Donor(version_at(10**6), failures=0), Tracker()
    tracker.others["anna"], tracker.reach = SimpleNamespace(step=claimed), reach
    member.advance(b"a round")
    assert not catch_up(member, tracker, donor, joins=False)
    assert (member.step, donor.asked) == (6, 1)
    assert "No state from anna: it offers step 1000000, and no other peer is near that step" in caplog.text
