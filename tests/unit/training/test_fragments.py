"""Parts of a model that are averaged in turn: how the model is divided, and what happens to the parts between turns."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.model import build_model
from recipe.presets import preset
from swarm.averaging.compression.fragments import Fragments
from swarm.state_sync.training_state import SharedState
from swarm.training.averaging_mode import Averaging, LocalSteps
from swarm.training.local_steps import PseudoGradient

THREE = LocalSteps(steps=1, fragments=3)


def weights_after(updates: int, averages: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights of a small model and its anchors.

    With `averages`, the peer averages alone after each of its steps.
    """
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    vector = PseudoGradient(list(module.parameters()), [], LocalSteps(steps=1, learning_rate=1.0, momentum=0.0))
    for _ in range(updates):
        inputs, labels = torch.randn(8, 5), torch.randint(3, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
        if averages:
            vector.average_alone(8)
            vector.hand_over()
    return [parameter.detach() for parameter in module.parameters()], [anchor.detach() for anchor in vector.anchors]


def test_a_peer_alone_makes_the_updates_of_one_process():
    expected, _ = weights_after(6, averages=False)
    found, anchors = weights_after(6, averages=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(anchors, expected, rtol=0, atol=0)


def sizes_of_a_vit() -> list[int]:
    return [parameter.numel() for parameter in build_model(preset("digits")).parameters()]


def test_one_fragment_is_the_whole_in_its_order():
    whole = Fragments.of([3, 5, 2], rest=4)
    assert whole.tensors_at(7) == (0, 1, 2)
    assert whole.size_at(7) == 14


@pytest.mark.parametrize(("number", "uneven"), [(2, 0.05), (3, 0.05), (4, 0.05), (7, 0.2)])
def test_fragments_of_a_vit_are_about_equal_and_hold_each_tensor_once(number, uneven):
    sizes = sizes_of_a_vit()
    fragments = Fragments.of(sizes, number)
    assert sorted(place for step in range(number) for place in fragments.tensors_at(step)) == list(range(len(sizes)))
    for step in range(number):
        assert fragments.size_at(step) == sum(sizes[place] for place in fragments.tensors_at(step))
        assert fragments.size_at(step) == pytest.approx(sum(sizes) / number, rel=uneven)
    assert fragments == Fragments.of(sizes, number), "every peer finds the same"


def test_tensors_of_a_size_are_dealt_in_turn_so_each_fragment_has_every_depth():
    layers = [(100, 10) for _ in range(8)]
    sizes = [size for layer in layers for size in layer]
    fragments = Fragments.of(sizes, 4)
    matrices = [[place // 2 for place in fragments.tensors_at(step) if place % 2 == 0] for step in range(4)]
    assert matrices == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_no_fragment_is_larger_than_a_fair_part_and_the_largest_tensor():
    sizes = [math.ceil(1000 / (place + 1)) for place in range(50)]
    fragments = Fragments.of(sizes, 6)
    assert max(fragments.sizes) <= sum(sizes) / 6 + max(sizes)


def test_each_has_its_turn_and_buffers_go_with_all():
    fragments = Fragments.of([4, 3, 2], 3, rest=5)
    assert [fragments.tensors_at(step) for step in range(4)] == [(0,), (1,), (2,), (0,)]
    assert [fragments.size_at(step) for step in range(4)] == [9, 8, 7, 9]
    assert [fragments.turn_at(step) for step in range(7)] == [0, 0, 0, 1, 1, 1, 2]


def test_fewer_tensors_than_fragments_are_refused():
    with pytest.raises(InputError, match="3 tensors cannot be averaged in 4 fragments: set --fragments lower"):
        Fragments.of([1, 2, 3], 4)


# ---- local steps ----------------------------------------------------------------------------------------------------


class Peer:
    """A peer that makes local steps by hand, and comes to its updates.

    Args:
        seed: seed of its local steps
    """

    def __init__(self, seed: int = 0, local: LocalSteps = THREE):
        torch.manual_seed(0)
        layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False)
        self.model, self.step = nn.Sequential(*layers), 0
        params, buffers = list(self.model.parameters()), [layers[1].running_mean, layers[1].running_var]
        self.vector = PseudoGradient(params, buffers, local, lambda: self.step)
        self._steps = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def train(self) -> None:
        for param in self.vector.params:
            param.add_(0.1 * torch.randn(param.shape, generator=self._steps))
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand(buffer.shape, generator=self._steps))

    @property
    def sent(self) -> torch.Tensor:
        """A view of what travels with this update."""
        return self.vector.wire[: self.vector.fragments.size_at(self.step)]

    def update(self) -> None:
        """Make the update with the average that is on the wire."""
        self.vector.from_wire()
        self.vector.hand_over()
        self.step += 1

    @property
    def anchors(self) -> list[torch.Tensor]:
        return [anchor.detach().clone() for anchor in self.vector.anchors]

    @property
    def moved(self) -> list[torch.Tensor]:
        """How far each weight is from its anchor."""
        pairs = zip(self.vector.params, self.vector.anchors, strict=True)
        return [(param - anchor).detach() for param, anchor in pairs]


def average(*peers: Peer, samples: int = 8) -> torch.Tensor:
    """Make a round of all these peers. Return its average."""
    for peer in peers:
        peer.vector.to_wire(samples)
    mean = torch.stack([peer.sent for peer in peers]).mean(0)
    for peer in peers:
        peer.sent.copy_(mean)
        peer.update()
    return mean


def assert_equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ones, others, rtol=0, atol=0)


def test_an_update_moves_only_the_anchors_of_its_fragment():
    one, other = Peer(1), Peer(2)
    fragments, before = one.vector.fragments, one.anchors
    changed_at = {}
    for step in range(6):
        one.train()
        other.train()
        average(one, other)
        after = one.anchors
        assert_equal(after, other.anchors)
        changed = {place for place, pair in enumerate(zip(before, after, strict=True)) if not torch.equal(*pair)}
        assert changed == set(fragments.tensors_at(step))
        changed_at |= dict.fromkeys(changed, step)
        before = after
    assert len(changed_at) == len(before), "after so many updates as there are fragments, each was averaged"


def test_a_fragment_that_waits_for_its_turn_is_given_whole_when_that_comes():
    peer, start = Peer(), Peer().anchors
    for _ in range(3):
        peer.train()
        average(peer)
    last = set(peer.vector.fragments.tensors_at(2))
    for place, (anchor, param) in enumerate(zip(peer.vector.anchors, peer.vector.params, strict=True)):
        is_there = torch.equal(anchor, param)
        assert is_there == (place in last), "others have moved on since their turn"
    for place in last:
        torch.testing.assert_close(peer.anchors[place] - start[place], (peer.vector.params[place] - start[place]))


@pytest.mark.parametrize("outer", [{}, {"learning_rate": 0.7, "momentum": 0.9}], ids=["taken over", "momentum"])
def test_a_follower_has_the_same_anchors_and_keeps_what_it_did_to_other_fragments(outer):
    local = replace(THREE, **outer)
    one, other, late = Peer(1, local), Peer(2, local), Peer(3, local)
    for _ in range(5):
        for peer in (one, other, late):
            peer.train()
        missed = late.step == 3
        if not missed:
            average(one, other, late)
            continue
        moved, fragment = late.moved, late.vector.fragments.tensors_at(late.step)
        mean = average(one, other)
        late.vector.follow(mean)
        late.step += 1
        for place, now in enumerate(late.moved):
            expected = torch.zeros_like(now) if place in fragment else moved[place]
            assert_equal([now], [expected])
    assert_equal(one.anchors, late.anchors)
    assert_equal(one.anchors, other.anchors)


def test_a_round_that_failed_leaves_its_fragment_for_the_next_attempt():
    peer = Peer()
    peer.train()
    peer.vector.to_wire(8)
    peer.vector.take_back(8)
    before = peer.moved
    peer.train()
    moved = peer.moved
    peer.vector.to_wire(16)
    fragment = peer.vector.fragments.tensors_at(0)
    sent = peer.vector.views_of(peer.sent, [peer.vector.params[place] for place in fragment])
    for place, numbers in zip(fragment, sent, strict=True):
        torch.testing.assert_close(numbers, -moved[place])
        assert not torch.equal(moved[place], before[place])


def test_a_peer_that_gives_nothing_to_a_round_keeps_what_it_has_done_for_the_next_one():
    """The peer has no samples since the last update, or has come to the round before it had the weights."""
    for departs in (False, True):
        peer = Peer()
        peer.train()
        moved, fragment = peer.moved, peer.vector.fragments.tensors_at(0)
        if departs:
            peer.vector.depart()
        else:
            peer.vector.to_wire(0)
        peer.sent.fill_(0.25)
        peer.update()
        for place in fragment:
            torch.testing.assert_close(peer.moved[place], moved[place])


def test_buffers_are_averaged_with_every_fragment():
    one, other = Peer(1), Peer(2)
    for _ in range(3):
        one.train()
        other.train()
        means = [peer.model[1].running_mean.clone() for peer in (one, other)]
        average(one, other)
        for peer in (one, other):
            torch.testing.assert_close(peer.model[1].running_mean, torch.stack(means).mean(0))


def test_newcomers_begin_at_the_anchors_of_all_fragments():
    donor, newcomer = Peer(1), Peer(2)
    for _ in range(2):
        donor.train()
        average(donor)
    donor.train()
    states = [
        SharedState(peer.model, [peer.vector.outer], dict(zip(peer.vector.params, peer.vector.anchors, strict=True)))
        for peer in (donor, newcomer)
    ]
    newcomer.train()
    exported = states[0].export(2, bytes(16))
    states[1].check(*exported)
    newcomer.step, _ = states[1].take(*exported)
    newcomer.vector.adopt()
    assert newcomer.step == 2
    assert_equal(newcomer.anchors, donor.anchors)
    assert not any(moved.any() for moved in newcomer.moved)


def test_a_lone_peer_shows_what_followers_need():
    peer, follower = Peer(1), Peer(2)
    for _ in range(4):
        peer.train()
        peer.vector.average_alone(8)
        follower.vector.follow(peer.sent.clone())
        peer.vector.hand_over()
        peer.step = follower.step = peer.step + 1
        peer.vector.reset()
        assert_equal(peer.anchors, follower.anchors)


def test_peers_of_different_fragments_do_not_meet_and_one_is_as_before():
    recipe = replace(preset("digits"), averaging="local", local_steps=4)
    parts = replace(recipe, fragments=4)
    assert parts.fingerprint != recipe.fingerprint
    assert "fragments" not in recipe.to_json(), "recipes without them keep their fingerprints"
    assert Recipe.from_json(parts.to_json()) == parts
    assert str(Averaging.of(recipe)) == "none-4-1.0-0.0-clip"
    assert str(Averaging.of(parts)) == "none-4-1.0-0.0-4-clip" == str(Averaging.local(4, fragments=4))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"averaging": "sync"}, "Fragments need local steps, and averaging is sync: set --averaging local"),
        ({"averaging": "auto"}, "Fragments need local steps, and averaging is auto"),
        ({"averaging": "local", "codec": "powersgd"}, "powersgd averages whole models only"),
        ({"averaging": "local", "fragments": 65}, "fragments is 65: give a number from 1 to 64"),
    ],
)
def test_options_that_contradict_each_other_are_refused_in_a_sentence(changes, why):
    with pytest.raises(InputError, match=why):
        replace(preset("digits"), **{"fragments": 4} | changes)


def test_python_refuses_it_too():
    with pytest.raises(InputError, match="powersgd averages whole models only: set fragments=1"):
        Averaging.local(codec="powersgd", fragments=2)
    with pytest.raises(InputError, match="at least 1 fragment"):
        LocalSteps(fragments=0)
