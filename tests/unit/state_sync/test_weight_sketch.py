"""Sketches of weights keep distances, are equal everywhere, and show which peer has other weights."""

import math

import pytest
import torch

from swarm.protocol.messages import Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.state_sync.state_version import StateVersion
from swarm.state_sync.weight_sketch import SIZE, SKETCH_TOLERANCE, Sketch, nearest_to_most, relative_distance

LINEAGE = bytes(range(16))
SHAPES = [(300, 40), (7,), (64, 3, 4, 4), (1,), (5000,)]


def weights(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def moved(by: float, seed: int) -> list[torch.Tensor]:
    """Weights whose relative distance to `weights()` is `by`."""
    before, direction = weights(), weights(seed)
    norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in before))
    length = math.sqrt(sum(float(tensor.square().sum()) for tensor in direction))
    return [own + by * norm / length * step for own, step in zip(before, direction, strict=True)]


@pytest.mark.parametrize("distance", [1e-4, 1e-2, 1.0])
def test_a_sketch_keeps_relative_distances(distance):
    """Eight projections: the estimate's relative error is about 1/√16 = 0.25 (one standard deviation)."""
    here = Sketch(weights()).take(LINEAGE)
    found = [relative_distance(Sketch(moved(distance, seed)).take(LINEAGE), here) for seed in range(1, 21)]
    assert 0.75 * distance < sum(found) / len(found) < 1.33 * distance
    assert all(distance / 3 < each < 3 * distance for each in found)


def test_rounding_is_no_distance():
    here = Sketch(weights()).take(LINEAGE)
    assert len(here) == SIZE
    assert Sketch(weights()).take(LINEAGE) == here
    rounded = [tensor.bfloat16().float().sub(tensor).mul(1e-3).add(tensor) for tensor in weights()]  # to 18 bits
    assert 0 < relative_distance(Sketch(rounded).take(LINEAGE), here) < SKETCH_TOLERANCE / 100


def test_no_member_is_off_without_a_sketch():
    here = Sketch(weights()).take(LINEAGE)
    assert Sketch([torch.tensor([1.0, math.nan])]).take(LINEAGE) == ()
    assert relative_distance((), here) == relative_distance(here, ()) == 0.0


def group_of(*sketches, client_modes=None) -> Group:
    modes = client_modes or [False] * len(sketches)
    tickets = [Ticket(3, 8, mode, 1.0, bytes(LINEAGE_BYTES), s) for mode, s in zip(modes, sketches, strict=True)]
    return Group(bytes(LINEAGE_BYTES), tuple("abcdef"[: len(sketches)]), tuple(tickets))


def test_the_member_that_is_off_takes_over_the_state_of_the_others():
    here, there = Sketch(weights()).take(LINEAGE), Sketch(moved(0.1, 1)).take(LINEAGE)
    group = group_of(there, here, here)
    assert [StateVersion.strayed_from(ticket, group) for ticket in group.tickets] == ["b", None, None]
    pair = group_of(here, there)
    assert [StateVersion.strayed_from(ticket, pair) for ticket in pair.tickets] == [None, "a"], "one of two gives way"
    hidden = group_of(here, there, client_modes=[True, False])
    assert [StateVersion.strayed_from(ticket, hidden) for ticket in hidden.tickets] == ["b", None], (
        "a peer that can be called gives"
    )
    nearly = group_of(here, Sketch(moved(SKETCH_TOLERANCE / 10, 2)).take(LINEAGE))
    assert [StateVersion.strayed_from(ticket, nearly) for ticket in nearly.tickets] == [None, None]


def test_a_peer_without_a_sketch_is_no_model():
    here, there = Sketch(weights()).take(LINEAGE), Sketch(moved(0.1, 1)).take(LINEAGE)
    assert nearest_to_most([(), here, here, there], [0, 1, 2, 3]) == [1, 2]


def test_the_donor_of_these_weights_is_not_asked_for_better_ones():
    here, there = Sketch(weights()).take(LINEAGE), Sketch(moved(0.1, 1)).take(LINEAGE)
    group = group_of(there, here, here)
    assert StateVersion.strayed_from(group.tickets[0], group, last_donor="b") == "c"
    pair = group_of(there, here)
    assert StateVersion.strayed_from(pair.tickets[0], pair, last_donor="b") in (None, "b"), "no other peer is there"


def test_no_peer_can_know_in_advance_how_weights_will_look():
    """A difference that one seed does not show is shown by another seed."""
    model = weights()
    columns = [Sketch(model).take(bytes([n]) * 16) for n in range(2)]
    assert relative_distance(*columns) > 0.1
    flat = torch.zeros(4096)
    flat[0], flat[1] = 1.0, 1.0
    blind = next(n for n in range(100) if Sketch([flat]).take(bytes([n]) * 16)[0] == 0)
    assert any(Sketch([flat]).take(bytes([n]) * 16)[0] != 0 for n in range(100) if n != blind)
