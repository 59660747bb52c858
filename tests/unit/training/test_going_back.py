"""Peers keep the same earlier states. They go back to the same one, and are as they were then, bit by bit."""

import math

import pytest
import torch
from hivemind.p2p import PeerID
from torch import nn

from swarm.protocol.messages import Group, Ticket, WentBack
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.state_sync.state_version import StateVersion
from swarm.state_sync.training_state import SharedState
from swarm.training.undo import sound_states
from swarm.training.undo.breaker import WINDOW
from swarm.training.undo.going_back import MAX_TIMES_BACK, GoingBack
from swarm.training.undo.sound_states import KEEP_EVERY, KEEP_LARGE_EVERY, NUM_KEPT

MEMBERS = tuple(PeerID(bytes([number] * 32)) for number in range(3))


class Peer:
    """A peer that makes updates of its own. A seed stands for an average."""

    def __init__(self, folder=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.version = StateVersion(SharedState(self.model, [self.optimizer]), 0, [*self.model.parameters()])
        self.going_back = GoingBack(self.version, True, folder)
        self.going_back.begin()

    def update(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model(torch.randn(8, 6, generator=generator))  # running statistics move on, too
        for param in self.model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        self.optimizer.step()
        self.version.advance(bytes([seed % 256] * LINEAGE_BYTES))

    def come_to(self, step: int) -> "Peer":
        while self.version.step < step:
            self.update(self.version.step)
        return self

    def held(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.version.state.held()[1]]

    def back(self, step: int) -> WentBack:
        """The decision of the group of its step to go back."""
        ticket = Ticket(self.version.step, 8, False, 1.0, self.version.lineage, back_to=step)
        return WentBack(Group.close(bytes(16), MEMBERS, (ticket,) * 3), step)


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def on_disk(monkeypatch) -> None:
    """Treat the model as a large one."""
    monkeypatch.setattr(sound_states, "MAX_SMALL_BYTES", 0)
    monkeypatch.setattr(sound_states, "KEEP_LARGE_EVERY", KEEP_EVERY)


@pytest.fixture(params=["memory", "disk"])
def place(request, monkeypatch, tmp_path):
    """The folder in which states are kept."""
    if request.param == "disk":
        on_disk(monkeypatch)
    return tmp_path


def test_all_hold_what_they_held_then(place):
    """Weights, running statistics and the optimizer's state go back.

    Step and lineage go on, and later updates are alike.
    """
    one, other = Peer(place), Peer(place)
    before = one.come_to(KEEP_EVERY).held()
    other.come_to(KEEP_EVERY)
    one.come_to(KEEP_EVERY + 3)
    other.come_to(KEEP_EVERY + 3).model[0].weight.data.mul_(-1)  # the other peer was given another average
    for peer in (one, other):
        back = peer.back(KEEP_EVERY)
        assert peer.going_back.go(back)
        assert_same(peer.held(), before)
        assert (peer.version.step, peer.version.lineage) == (KEEP_EVERY + 4, back.group.group_id)
        peer.come_to(2 * KEEP_EVERY)
    assert_same(one.held(), other.held())
    assert not [*place.iterdir()], "its files have no name"


def test_peers_that_have_made_the_same_updates_name_the_same_states():
    peer = Peer()
    for step in range(1, (NUM_KEPT + 2) * KEEP_EVERY):
        peer.come_to(step)
        newest = step - step % KEEP_EVERY
        assert peer.going_back.steps == tuple(
            range(max(0, newest - (NUM_KEPT - 1) * KEEP_EVERY), newest + 1, KEEP_EVERY)
        )
    assert len(peer.going_back.steps) == NUM_KEPT


def test_the_oldest_state_is_not_dropped_for_the_one_that_it_becomes():
    peer = Peer().come_to(NUM_KEPT * KEEP_EVERY - 1)
    assert peer.going_back.go(peer.back(0))
    assert peer.going_back.steps == (NUM_KEPT * KEEP_EVERY,)
    assert_same(peer.held(), Peer().held())


def test_a_peer_that_went_back_cannot_undo_that():
    peer = Peer().come_to(KEEP_EVERY + 2)
    assert peer.going_back.go(peer.back(0))
    assert peer.going_back.steps == (KEEP_EVERY + 3,)
    assert_same(peer.held(), Peer().held())
    peer.come_to(KEEP_EVERY + 5)
    assert peer.going_back.go(peer.back(KEEP_EVERY + 3)), "the next lie is undone as well"
    assert_same(peer.held(), Peer().held())


def test_a_peer_that_cannot_go_back_changes_nothing():
    """The peer has not kept that state, or holds other weights than its group."""
    peer = Peer().come_to(KEEP_EVERY + 1)
    held, step = peer.held(), peer.version.step
    assert not peer.going_back.go(peer.back(1))
    other = peer.back(0)
    peer.version.lineage = bytes(LINEAGE_BYTES - 1) + b"x"
    assert not peer.going_back.go(other)
    assert_same(peer.held(), held)
    assert peer.version.step == step


def test_a_peer_that_has_taken_over_a_state_names_no_earlier_state_of_its_own():
    peer, donor = Peer().come_to(KEEP_EVERY), Peer().come_to(KEEP_EVERY + 1)
    peer.version.load(*donor.version.export())
    assert peer.going_back.steps == ()
    peer.come_to(2 * KEEP_EVERY)
    assert peer.going_back.steps == (2 * KEEP_EVERY,)


def test_a_peer_does_not_want_to_go_back_again_and_again():
    peer = Peer()
    for number in range(MAX_TIMES_BACK):
        assert peer.going_back.steps, f"it has gone back {number} times"
        peer.come_to(peer.version.step + 2)
        assert peer.going_back.go(peer.back(peer.going_back.steps[0]))
    assert peer.going_back.steps == ()


def test_losses_that_are_learnt_again_are_no_reason_to_go_back_once_more(monkeypatch):
    """A proof takes all peers back to the start, where the loss was high. It falls as slowly as it did before."""
    monkeypatch.setattr(sound_states, "MAX_SMALL_BYTES", 0)
    peer, losses = Peer(), [2.3 * math.exp(-update / 60) + 0.05 for update in range(3 * KEEP_LARGE_EVERY)]

    def learn(updates: int) -> None:
        for loss in losses[:updates]:
            peer.going_back.breaker.note(loss)
            peer.update(peer.version.step)
            assert not peer.going_back.breaker.has_risen

    learn(KEEP_LARGE_EVERY - 1)
    assert peer.going_back.go(peer.back(0))
    learn(len(losses))
    peer.version.on_change(False)  # the files are written by now


def test_a_disk_that_is_full_ends_nothing(monkeypatch, tmp_path, caplog):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    on_disk(monkeypatch)
    monkeypatch.setattr(torch, "save", full)
    peer = Peer(tmp_path).come_to(3 * KEEP_EVERY)
    assert not peer.going_back.go(peer.back(2 * KEEP_EVERY))
    assert 2 * KEEP_EVERY not in peer.going_back.steps, "it does not wish for that state again"
    assert caplog.text.count("to go back to: [Errno 28] No space left on device (said once)") == 1


def test_a_large_model_keeps_fewer_states_and_less_often(monkeypatch):
    monkeypatch.setattr(sound_states, "MAX_SMALL_BYTES", 0)
    peer = Peer().come_to(3 * KEEP_LARGE_EVERY + 1)
    assert peer.going_back.steps == (2 * KEEP_LARGE_EVERY, 3 * KEEP_LARGE_EVERY)


def test_a_peer_with_a_risen_loss_names_a_state_from_before_that():
    peer = Peer().come_to(3 * KEEP_EVERY + 3 * WINDOW)
    ticket = Ticket(peer.version.step, 8, False, 1.0, peer.version.lineage)
    assert peer.going_back.with_wish(ticket) == ticket
    for loss in [*[2.0] * WINDOW, *[0.1] * WINDOW, *[5.0] * 2 * WINDOW]:
        peer.going_back.breaker.note(loss)
    assert peer.going_back.with_wish(ticket).back_to == 3 * KEEP_EVERY
    assert peer.going_back.go(peer.back(3 * KEEP_EVERY))
    assert peer.going_back.with_wish(ticket) == ticket, "it is looked at anew"


def test_a_peer_does_not_go_back_because_others_want_to():
    """Unless the others show it a proof, or it has no loss of its own to judge by, as a helper."""
    peer = Peer().come_to(KEEP_EVERY)
    back = peer.back(0)
    assert peer.going_back.is_convinced(back)
    for loss in [*[2.0] * WINDOW, *[0.1] * WINDOW]:
        peer.going_back.breaker.note(loss)
    assert not peer.going_back.is_convinced(back)
    assert peer.going_back.is_convinced(WentBack(back.group, 0, frozenset(MEMBERS[:1])))
    for loss in [5.0] * WINDOW:
        peer.going_back.breaker.note(loss)
    assert peer.going_back.is_convinced(back)
