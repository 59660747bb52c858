"""Bytes on the wire are fewer, and the same when they arrive."""

import random

import numpy as np
import pytest
from hivemind.proto.runtime_pb2 import Tensor

from swarm.protocol.messages import RoundFailed
from swarm.state_sync.squeeze import CHUNK_BYTES, squeeze, unsqueeze
from tests.helpers.mutation import mutated


@pytest.mark.parametrize("size", [0, 1, 4, 4097, CHUNK_BYTES])
def test_squeezed_bytes_come_back(size):
    chance = np.random.default_rng(0)
    for content in (chance.standard_normal(size // 4 + 1).astype(np.float32).view(np.uint8), chance.bytes(size + 4)):
        chunk = np.frombuffer(bytes(content), np.uint8)[:size]
        assert unsqueeze(squeeze(chunk)) == chunk.tobytes()


def test_weights_take_a_sixth_fewer_bytes_and_noise_no_more():
    weights = np.random.default_rng(0).standard_normal(CHUNK_BYTES // 4).astype(np.float32)
    assert len(squeeze(weights.view(np.uint8)).buffer) < 0.86 * CHUNK_BYTES
    noise = np.frombuffer(np.random.default_rng(0).bytes(CHUNK_BYTES), np.uint8)
    assert len(squeeze(noise).buffer) <= CHUNK_BYTES


def test_mutated_messages_are_bytes_or_refused():
    chance = random.Random(0)
    weights = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    good = squeeze(weights.view(np.uint8))
    for _ in range(10_000):
        sizes = [chance.choice([256, 255, 0, 2**14, 2**14 + 1, 2**32 - 1])][: chance.randrange(2)]
        message = Tensor(buffer=mutated(good.buffer, chance), size=sizes)
        try:
            assert len(unsqueeze(message)) <= max(CHUNK_BYTES, len(message.buffer))
        except RoundFailed:
            pass
