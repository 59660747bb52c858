"""A member that holds up all others, round after round, is left out. A slow line that the swarm can bear is not."""

import pytest
import torch

from swarm.averaging.compression.codec import Codec, bytes_of_member
from swarm.averaging.slow_members import MAX_SLOW_ROUNDS, SlowMembers

MEMBERS = ["fast", "slow"]
FEW_BYTES = dict.fromkeys(MEMBERS, 1e6)


def test_a_member_that_is_slow_from_its_first_round_on_is_left_out_after_three():
    members = SlowMembers()
    found = [
        members.note(MEMBERS, {"slow": 3.5}, exchange_seconds=3.9, compute_seconds=0.4, num_bytes=FEW_BYTES)
        for _ in range(4)
    ]
    assert found == [set()] * (MAX_SLOW_ROUNDS - 1) + [{"slow"}] * 2


def test_a_round_in_time_makes_up_for_slow_ones():
    members = SlowMembers()
    for _ in range(5):
        for _ in range(MAX_SLOW_ROUNDS - 1):
            assert members.note(MEMBERS, {"slow": 3.5}, 3.9, 0.4, FEW_BYTES) == set()
        assert members.note(MEMBERS, {"slow": 0.5}, 1.0, 0.4, FEW_BYTES) == set()


@pytest.mark.parametrize("compute_seconds", [26.0, 5.0], ids=["of four peers", "of twenty"])
def test_a_slow_line_at_home_is_borne(compute_seconds):
    """A ViT-S in fp16 over 10 Mbit/s takes 52 s; the others' lines need 2 s. It was left out by half of a swarm."""
    members = SlowMembers()
    for _ in range(10):
        assert (
            members.note(MEMBERS, {"slow": 50.0}, 52.0, compute_seconds, num_bytes=dict.fromkeys(MEMBERS, 65e6))
            == set()
        )


@pytest.mark.parametrize(("mbps", "is_left_out"), [(3.0, True), (5.0, False)])
def test_a_member_without_a_share_is_measured_by_the_vector_that_it_sends(mbps, is_left_out):
    """It sends one vector. It was credited with two, and left out only below 2 Mbit/s."""
    vector, members = torch.zeros(2_500_000), SlowMembers()
    seconds = 8 * vector.nbytes / (mbps * 1e6)
    num_bytes = dict.fromkeys(MEMBERS, bytes_of_member(vector.numel(), Codec().make(), num_members=3, share=0.0))
    for _ in range(MAX_SLOW_ROUNDS):
        found = members.note(MEMBERS, {"slow": seconds - 1}, seconds, 0.4, num_bytes)
    assert ("slow" in found) == is_left_out


def test_an_organiser_can_ask_for_faster_lines():
    """A line of 10 Mbit/s, in a run that asks for 20."""
    members = SlowMembers(slowest_line_mbps=20.0)
    slow = [members.note(MEMBERS, {"slow": 50.0}, 52.0, 5.0, dict.fromkeys(MEMBERS, 65e6)) for _ in range(3)]
    assert slow == [set(), set(), {"slow"}]


def test_seconds_that_no_member_notices_do_not_count():
    members = SlowMembers()
    for _ in range(10):
        assert (
            members.note(MEMBERS, {"slow": 2.0}, exchange_seconds=2.1, compute_seconds=0.1, num_bytes=FEW_BYTES)
            == set()
        )


def test_identities_do_not_fill_the_memory():
    members = SlowMembers()
    for peer in range(10_000):
        members.note([peer], {peer: 10.0}, exchange_seconds=10.5, compute_seconds=0.1, num_bytes={peer: 1e6})
    assert len(vars(members)["_slow_rounds"]) <= 4096
