"""Codecs and what becomes of the part of a number that they leave out."""

import pytest
import torch
from hivemind.compression import CompressionInfo, Float16Compression
from hypothesis import given
from hypothesis import strategies as some

from swarm.averaging.compression import BLOCK, CODECS, BlockwiseInt8, Codec, ErrorFeedback

INT8 = BlockwiseInt8()


def info(tensor: torch.Tensor) -> CompressionInfo:
    return CompressionInfo.from_tensor(tensor)


def travelled(codec, tensor: torch.Tensor) -> torch.Tensor:
    return codec.extract(codec.compress(tensor, info(tensor)))


@pytest.mark.parametrize(("codec", "expected"), [("none", 4), ("fp16", 2), ("int8", 1 + 4 / BLOCK)])
def test_the_expected_traffic_knows_the_codec(codec, expected):
    tensor = torch.randn(16 * BLOCK)
    assert Codec(codec).payload_bytes([(16, BLOCK)]) == pytest.approx(expected * 16 * BLOCK)
    assert len(CODECS[codec]().compress(tensor, info(tensor)).buffer) == pytest.approx(expected * tensor.numel())


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
def test_8_bits_are_off_by_half_a_step_of_their_block(size):
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-6, 6, (size,), generator=generator)
    found = travelled(INT8, numbers)
    for block, decoded in zip(numbers.split(BLOCK), found.split(BLOCK), strict=True):
        step = block.abs().max() / 127
        assert ((block - decoded).abs() <= 0.5001 * step).all()
    assert len(INT8.compress(numbers, info(numbers)).buffer) == size + 4 * -(-size // BLOCK)
    torch.testing.assert_close(travelled(INT8, found), found, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("value", [0.0, 1e-44, -3e38])
def test_8_bits_of_a_block_without_a_range(value):
    found = travelled(INT8, torch.full((BLOCK + 1,), value))
    torch.testing.assert_close(found, torch.full((BLOCK + 1,), value), rtol=1e-6, atol=1e-38)


@given(some.binary(max_size=64), some.lists(some.integers(0, 2**31 - 1), max_size=3))
def test_a_malformed_8_bit_message_is_a_value_error(buffer, size):
    message = INT8.compress(torch.zeros(1), info(torch.zeros(1)))
    message.buffer = buffer
    message.size[:] = size
    try:
        found = INT8.extract(message)
    except ValueError:
        return
    assert found.numel() + 4 * -(-found.numel() // BLOCK) == len(buffer)


def test_fp16_is_decoded_as_hivemind_does_it():
    numbers = torch.randn(4099) * 10.0 ** torch.randint(-9, 7, (4099,))
    message = Float16Compression().compress(numbers, info(numbers))
    assert torch.equal(CODECS["fp16"]().extract(message), Float16Compression().extract(message))


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_nothing_is_lost_between_a_sender_and_a_reducer(name):
    """Whatever was given has arrived in the averages or is still waiting at one of the two."""
    codec, size, generator = CODECS[name](), 2 * BLOCK, torch.Generator().manual_seed(0)
    sender, reducer = ErrorFeedback(codec, size), ErrorFeedback(codec, size)
    given_so_far, arrived = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for samples in (30, 50, 0, 20) * 5:
        own, other = (1e-4 * torch.randn(size, generator=generator) for _ in range(2))
        given_so_far += samples * other.double() + 40 * own.double()
        sender.add_to(other, info(other), 0, samples, travels=True)
        torch.testing.assert_close(travelled(codec, other), other, rtol=1e-6, atol=0.0 if samples else 1e-5)
        reducer.add_to(own, info(own), 0, 40, travels=False)
        average = (samples * other + 40 * own) / (samples + 40)
        encoded = travelled(codec, average)
        reducer.keep(average - encoded, 0, samples + 40)
        arrived += (samples + 40) * encoded.double()
    waiting = sender.left_out + reducer.left_out
    assert waiting.abs().max() > 0
    torch.testing.assert_close(arrived + waiting, given_so_far, rtol=0, atol=1e-6)


def test_float32_leaves_nothing_out_and_numbers_that_are_not_finite_stay_what_they_are():
    exact = ErrorFeedback(CODECS["none"](), 4)
    part = torch.tensor([0.1, 0.2, 0.3, 0.4])
    exact.add_to(part, info(part), 0, 8, travels=True)
    exact.keep(part, 0, 8)
    assert exact.left_out is None
    spoiled, feedback = torch.tensor([1.0, torch.nan]), ErrorFeedback(INT8, 2)
    feedback.add_to(spoiled, info(spoiled), 0, 8, travels=True)
    assert feedback.left_out.tolist() == [0.0, 0.0], "the reducer leaves this sender out"
