"""Squeezed bytes are fewer on the wire, and the same when they arrive."""

import numpy as np
import pytest

from swarm.state_sync.squeeze import CHUNK_BYTES, squeeze, unsqueeze


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
