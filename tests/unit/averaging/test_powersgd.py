"""Low-rank passes without a network: what they keep, what they leave for later, and what they send."""

import math
import os

import pytest
import timm
import torch

from recipe.errors import InputError
from swarm.averaging.compression.codec import Codec
from swarm.averaging.compression.powersgd import LowRank
from swarm.averaging.unsettled import Unsettled
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from tests.helpers.paths import ROOT

SHAPES, SIZE = [(40, 30), (7,), (16, 4, 3, 3), (5, 5)], 40 * 30 + 7 + 16 * 36 + 25 + 3
"""Two matrices large enough for rank 4, a vector, a matrix that is too small, and three numbers of buffers."""
WEIGHTS = (8, 24)


def peers(rank: int = 4, number: int = 2) -> list[LowRank]:
    return [LowRank(SHAPES, SIZE, rank) for _ in range(number)]


def average(
    parties: list[LowRank],
    vectors: list[torch.Tensor],
    lineage: bytes = bytes(LINEAGE_BYTES),
    missing: LowRank | None = None,
):
    """Run a round without a network: weighted means of both passes. Return what every peer then has, and the lineage.

    Args:
        missing: the peer that has given everything and does not get the second average
    """
    tickets = [
        Ticket(0, samples, False, 0.0, lineage, (), party.is_warm(lineage))
        for samples, party in zip(WEIGHTS, parties, strict=True)
    ]
    group = Group(os.urandom(LINEAGE_BYTES), tuple(range(len(parties))), tuple(tickets))
    total = sum(WEIGHTS)

    def mean(parts: list[torch.Tensor]) -> torch.Tensor:
        return sum(part * (samples / total) for part, samples in zip(parts, WEIGHTS, strict=True))

    everyone = list(zip(parties, vectors, WEIGHTS, strict=True))
    first = mean([party.begin(vector, samples, group) for party, vector, samples in everyone])
    second = mean([party.go_on(first) for party in parties])
    found = [party.finish(second, group) for party in parties if party is not missing]
    assert all(torch.equal(found[0], other) for other in found)
    return found[0], group.group_id


def gradients(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) for _ in WEIGHTS]


def exact_mean(vectors: list[torch.Tensor]) -> torch.Tensor:
    return (8 * vectors[0] + 24 * vectors[1]) / 32


def matrices(vector: torch.Tensor) -> torch.Tensor:
    """The numbers that travel as thin matrices. The other numbers travel as they are."""
    return torch.cat([vector[:1200], vector[1207 : 1207 + 576]])


def others(vector: torch.Tensor) -> torch.Tensor:
    return torch.cat([vector[1200:1207], vector[1783:]])


def test_a_matrix_of_the_rank_arrives_whole():
    generator = torch.Generator().manual_seed(1)
    thin = [torch.randn(40, 2, generator=generator), torch.randn(2, 30, generator=generator)]
    vectors = gradients()
    for vector, scale in zip(vectors, (1.0, -2.0), strict=True):
        vector[:1200] = scale * (thin[0] @ thin[1]).reshape(-1)
        vector[1207 : 1207 + 576] = 0.0
    found, _ = average(peers(), vectors)
    torch.testing.assert_close(found, exact_mean(vectors), rtol=1e-4, atol=1e-4)


def test_vectors_and_small_matrices_are_exact():
    vectors = gradients()
    found, _ = average(peers(), vectors)
    torch.testing.assert_close(others(found), others(exact_mean(vectors)))
    assert (matrices(found) - matrices(exact_mean(vectors))).norm() > 1


def test_no_part_of_a_gradient_is_lost():
    """After any number of rounds, averages times samples and what is left out add up to everything that was given."""
    parties, lineage, arrived, given = peers(), bytes(LINEAGE_BYTES), torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(5):
        vectors = gradients(step)
        found, lineage = average(parties, vectors, lineage)
        arrived += found * sum(WEIGHTS)
        given += exact_mean(vectors) * sum(WEIGHTS)
    left_out = sum(party.left_out for party in parties)
    torch.testing.assert_close(arrived + left_out, given, rtol=1e-4, atol=1e-3)


def test_a_remainder_of_a_round_that_only_this_peer_has_missed_goes_with_its_next_round():
    """Otherwise the remainder from before that round would go twice."""
    parties, lineage, arrived, given = peers(), bytes(LINEAGE_BYTES), torch.zeros(SIZE), torch.zeros(SIZE)
    unsettled = Unsettled()
    for step in range(6):
        vectors, fails = gradients(step), step == 3
        found, made = average(parties, vectors, lineage, parties[0] if fails else None)
        if fails:
            unsettled.failed(made, [parties[0]])
            before = parties[0].left_out.clone()
            unsettled.holds(b"made alone")
            assert torch.equal(parties[0].left_out, before)
            unsettled.holds(made)
        lineage = made
        arrived += found * sum(WEIGHTS)
        given += exact_mean(vectors) * sum(WEIGHTS)
    left_out = sum(party.left_out for party in parties)
    torch.testing.assert_close(arrived + left_out, given, rtol=1e-4, atol=1e-3)


def test_a_peer_that_fails_in_the_first_pass_has_what_it_had():
    parties = peers()
    average(parties, gradients())
    before = parties[0].left_out.clone()
    lineage = bytes(LINEAGE_BYTES)
    group = Group(lineage, (0,), (Ticket(0, 8, False, 0.0, lineage, (), False),))
    parties[0].begin(gradients(1)[0], 8, group)
    parties[0].keep_left_out()
    assert torch.equal(parties[0].left_out, before)


def test_a_warm_start_finds_the_largest_directions_of_a_gradient_that_stays():
    """Power iteration: with the Q of the last round, a product of rank 4 comes near to the best there is."""
    vectors, errors = gradients(), []
    for warm in (True, False):
        parties, lineage = peers(), bytes(LINEAGE_BYTES)
        for _ in range(12):
            for party in parties:
                party.reset()
            found, new = average(parties, vectors, lineage)
            lineage = new if warm else lineage
        errors.append((found[:1200] - exact_mean(vectors)[:1200]).norm().item())
    values = torch.linalg.svdvals(exact_mean(vectors)[:1200].view(40, 30))
    best = values[4:].square().sum().sqrt().item()
    assert best <= errors[0] < 1.05 * best < errors[1]


def test_a_newcomer_makes_all_members_start_anew():
    parties, lineage = peers(), bytes(LINEAGE_BYTES)
    _, lineage = average(parties, gradients(), lineage)
    assert all(party.is_warm(lineage) for party in parties)
    average([parties[0], LowRank(SHAPES, SIZE, 4)], gradients(1), lineage)  # asserts equal bits


def test_bytes_on_the_wire():
    low_rank = LowRank(SHAPES, SIZE, 4)
    assert low_rank.numbers == 4 * (40 + 30) + 4 * (16 + 36) + 7 + 25 + 3
    assert Codec("powersgd", 4).payload_bytes([(40, 30)]) == 4 * 4 * 70
    assert Codec("powersgd", 4).payload_bytes([(5, 5), (9,)]) == 4 * 34


@pytest.mark.parametrize(
    ("model", "name", "part"), [("vit_small_patch16_224", "ViT-S", 7), ("vit_base_patch16_224", "ViT-B", 15)]
)
def test_the_documents_say_how_many_bytes_a_parameter_takes(model, name, part):
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in timm.create_model(model).parameters()]
    assert round(sum(map(math.prod, shapes)) / Codec("powersgd").payload_bytes(shapes)) == part
    assert f"1/{part} for a {name}" in (ROOT / "docs" / "howto" / "choose-averaging.md").read_text()


@pytest.mark.parametrize("arguments", [("jpeg",), ("powersgd", 0)])
def test_arguments_that_name_no_codec_are_refused(arguments):
    with pytest.raises(InputError, match="There is no codec"):
        Codec(*arguments)
