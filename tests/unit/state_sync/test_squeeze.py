"""Squeezed bytes are fewer on the wire, and the same when they arrive."""

import zlib

import numpy as np
import pytest
from hivemind.proto import runtime_pb2

from swarm.protocol.messages import RoundFailed
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


WEIGHTS = squeeze(np.random.default_rng(0).standard_normal(64).astype(np.float32).view(np.uint8)).buffer
DEFLATED_ZEROS = zlib.compress(bytes(10**7), wbits=-15)


@pytest.mark.parametrize(
    ("buffer", "size", "reason"),
    [
        (WEIGHTS, CHUNK_BYTES, "out of bounds"),
        (b"", 64, "out of bounds"),
        (b"\xff" * 256, 64, "cannot be read"),
        (WEIGHTS[:-3], 64, "another size"),
        (bytes(CHUNK_BYTES // 4 * 3) + DEFLATED_ZEROS, CHUNK_BYTES // 4, "another size"),
    ],
    ids=["too many numbers", "no bytes", "no deflated bytes", "cut off", "a bomb"],
)
def test_a_donors_false_bytes_are_refused(buffer, size, reason):
    with pytest.raises(RoundFailed, match=reason):
        unsqueeze(runtime_pb2.Tensor(buffer=buffer, size=[size]))
