"""Codecs, and how the part of a number that a codec leaves out is sent later."""

import pytest
import torch
from hivemind.compression import CompressionInfo, Float16Compression
from hypothesis import given
from hypothesis import strategies as some

from recipe.errors import InputError
from swarm.averaging.compression.blockwise import BlockwiseInt4, BlockwiseInt8
from swarm.averaging.compression.codec import CODECS, Codec
from swarm.averaging.compression.error_feedback import ErrorFeedback
from swarm.averaging.compression.top_k import CHUNK, KEPT, LARGEST_LEVEL, ChunkedTopK
from swarm.training.averaging_mode import Averaging

INT8, INT4, TOP_K = BlockwiseInt8(), BlockwiseInt4(), ChunkedTopK()
BLOCK = BlockwiseInt8.block
LARGEST_LEVELS = {INT8: 127, INT4: 7}
BYTES = {"none": 4, "fp16": 2, "int8": 1 + 4 / 1024, "int4": 0.5 + 4 / 256, "topk": (4 + 2 * KEPT) / CHUNK}
"""Bytes of each number, by codec."""


def info(tensor: torch.Tensor) -> CompressionInfo:
    return CompressionInfo.from_tensor(tensor)


def travelled(codec, tensor: torch.Tensor) -> torch.Tensor:
    return codec.extract(codec.compress(tensor, info(tensor)))


@pytest.mark.parametrize(("codec", "expected"), BYTES.items())
def test_the_expected_traffic_knows_the_codec(codec, expected):
    tensor = torch.randn(16 * BLOCK)
    assert Codec(codec).payload_bytes([(16, BLOCK)]) == pytest.approx(expected * 16 * BLOCK)
    assert len(CODECS[codec]().compress(tensor, info(tensor)).buffer) == pytest.approx(expected * tensor.numel())


@pytest.mark.parametrize("codec", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("size", [1, 2, 255, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
def test_few_bits_are_off_by_half_a_level_of_their_block(codec, size):
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-6, 6, (size,), generator=generator)
    found = travelled(codec, numbers)
    for block, decoded in zip(numbers.split(codec.block), found.split(codec.block), strict=True):
        level = block.abs().max() / LARGEST_LEVELS[codec]
        assert ((block - decoded).abs() <= 0.5001 * level).all()
    expected = -(-size * codec.bits // 8) + 4 * -(-size // codec.block)
    assert len(codec.compress(numbers, info(numbers)).buffer) == expected
    torch.testing.assert_close(travelled(codec, found), found, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("codec", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1e-44, -3e38])
def test_few_bits_of_a_block_without_a_range(codec, value):
    found = travelled(codec, torch.full((BLOCK + 1,), value))
    torch.testing.assert_close(found, torch.full((BLOCK + 1,), value), rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_the_largest_numbers_of_each_chunk_arrive_and_nothing_else(size):
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(size))
    found = travelled(TOP_K, numbers)
    for chunk, decoded in zip(numbers.split(CHUNK), found.split(CHUNK), strict=True):
        largest = chunk.abs().topk(min(KEPT, len(chunk))).indices
        others = torch.ones(len(chunk), dtype=torch.bool).index_fill(0, largest, False)
        level = chunk.abs().max() / LARGEST_LEVEL
        assert ((chunk - decoded)[largest].abs() <= 0.5001 * level).all()
        assert (decoded[others] == 0).all()
    assert len(TOP_K.compress(numbers, info(numbers)).buffer) == -(-size // CHUNK) * (4 + 2 * KEPT)
    torch.testing.assert_close(travelled(TOP_K, found), found, rtol=1e-6, atol=0.0)
    assert (travelled(TOP_K, torch.zeros(size)) == 0).all()


@pytest.mark.parametrize("codec", [INT8, INT4, TOP_K], ids=["int8", "int4", "topk"])
@given(buffer=some.binary(max_size=600), size=some.lists(some.integers(0, 2**31 - 1), max_size=3))
def test_a_malformed_message_is_a_value_error(codec, buffer, size):
    message = codec.compress(torch.zeros(1), info(torch.zeros(1)))
    message.buffer = buffer
    message.size[:] = size
    try:
        found = codec.extract(message)
    except ValueError:
        return
    assert codec.num_bytes(found.numel()) == len(buffer)


def test_fp16_is_decoded_as_hivemind_does_it():
    numbers = torch.randn(4099) * 10.0 ** torch.randint(-9, 7, (4099,))
    message = Float16Compression().compress(numbers, info(numbers))
    assert torch.equal(CODECS["fp16"]().extract(message), Float16Compression().extract(message))


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "topk"])
def test_nothing_is_lost_between_a_sender_and_a_reducer(name):
    """Everything that was given has arrived in the averages or is still waiting at the sender or the reducer."""
    codec, size, generator = CODECS[name](), 2 * BLOCK, torch.Generator().manual_seed(0)
    sender, reducer = ErrorFeedback(codec, size), ErrorFeedback(codec, size)
    given_so_far, arrived = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for samples in (30, 50, 0, 20) * 5:
        own, other = (1e-4 * torch.randn(size, generator=generator) for _ in range(2))
        given_so_far += samples * other.double() + 40 * own.double()
        sender.add_to(other, info(other), 0, samples)
        if samples:
            torch.testing.assert_close(travelled(codec, other), other, rtol=1e-6, atol=0.0)
        average = reducer.with_left_out((samples * other + 40 * own) / (samples + 40), 0, samples + 40)
        encoded = travelled(codec, average)
        reducer.keep(average - encoded, 0, samples + 40)
        arrived += (samples + 40) * encoded.double()
    waiting = sender.left_out + reducer.left_out
    assert waiting.abs().max() > 0
    torch.testing.assert_close(arrived + waiting, given_so_far, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_what_a_codec_cuts_off_is_no_debt(sign):
    """A single spike is one large number in one update, and not in hundreds that follow."""
    codec, largest = CODECS["fp16"](), torch.finfo(torch.float16).max
    sender, reducer = ErrorFeedback(codec, 2), ErrorFeedback(codec, 2)
    spike, quiet = torch.tensor([1e7 * sign, 1e-3]), torch.tensor([0.0, 1e-3])
    sender.add_to(spike, info(spike), 0, 8)
    whole = reducer.with_left_out(torch.tensor([1e7 * sign, 1e-3]), 0, 8)
    reducer.keep(whole - travelled(codec, whole), 0, 8)
    assert spike[0] == travelled(codec, whole)[0] == largest * sign
    sender.add_to(quiet, info(quiet), 0, 8)
    assert quiet[0] == reducer.with_left_out(torch.zeros(2), 0, 8)[0] == 0
    assert quiet[1] == pytest.approx(1e-3, rel=1e-3)


def test_a_remainder_of_one_codec_goes_with_the_next_one():
    numbers = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(0))
    feedback, part, rest = ErrorFeedback(INT8, len(numbers)), numbers.clone(), torch.zeros(len(numbers))
    feedback.add_to(part, info(part), 0, 8)
    assert not torch.equal(part, numbers)
    feedback.use(CODECS["none"](), 1.0)
    feedback.add_to(rest, info(rest), 0, 4)
    torch.testing.assert_close(8 * part + 4 * rest, 8 * numbers)
    assert not feedback.left_out.any()


def test_a_remainder_that_waits_for_long_fades_away():
    feedback = ErrorFeedback(TOP_K, CHUNK, decay=0.5)
    part = torch.linspace(1, 2, CHUNK)
    feedback.add_to(part, info(part), 0, 8)
    waiting = feedback.left_out.clone()
    for step in (2, 2, 1):  # the second 2 stands for a round that has failed
        feedback.come_to(step)
        torch.testing.assert_close(feedback.left_out, 0.25 * waiting)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_the_largest_numbers_alone_are_for_local_steps(mode):
    with pytest.raises(InputError, match="needs local steps"):
        Averaging.named(f"{mode}-topk")
    assert Averaging.named("local-topk").codec.decay < 1


def test_float32_leaves_nothing_out_and_numbers_that_are_not_finite_stay_what_they_are():
    exact = ErrorFeedback(CODECS["none"](), 4)
    part = torch.tensor([0.1, 0.2, 0.3, 0.4])
    exact.add_to(part, info(part), 0, 8)
    exact.keep(part, 0, 8)
    assert exact.left_out is None
    spoiled, feedback = torch.tensor([1.0, torch.nan]), ErrorFeedback(INT8, 2)
    feedback.add_to(spoiled, info(spoiled), 0, 8)
    assert feedback.left_out.tolist() == [0.0, 0.0], "the reducer leaves this sender out"
