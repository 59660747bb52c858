"""Bytes of fp32 numbers on their way, a sixth fewer and none lost: the exponents of weights are much alike.

Of each chunk the bytes that hold sign and exponent go together, Huffman-coded; mantissas are noise and go as they are.
Splitting numbers by bytes is known from Blosc's shuffle filter and from ZipNN (Hershcovitch et al., 2024).
"""

from __future__ import annotations

import zlib

import numpy as np
from hivemind.proto import runtime_pb2

from swarm.protocol.messages import RoundFailed

NUMBER_BYTES = 4
CHUNK_BYTES = 2**16


def squeeze(chunk: np.ndarray) -> runtime_pb2.Tensor:
    """A message of bytes, shape [n], uint8, n at most 65,536; what is not made smaller goes as it is."""
    if len(chunk) % NUMBER_BYTES:
        return runtime_pb2.Tensor(buffer=chunk.tobytes())
    planes = chunk.reshape(-1, NUMBER_BYTES).T
    coder = zlib.compressobj(level=1, wbits=-15, strategy=zlib.Z_HUFFMAN_ONLY)
    exponents = coder.compress(planes[-1].tobytes()) + coder.flush()
    if len(exponents) >= planes.shape[1]:
        return runtime_pb2.Tensor(buffer=chunk.tobytes())
    return runtime_pb2.Tensor(buffer=planes[:-1].tobytes() + exponents, size=[planes.shape[1]])


def unsqueeze(message: runtime_pb2.Tensor) -> bytes:
    """Undo `squeeze`.

    Raises:
        RoundFailed: it is no such message; the sender is not trusted
    """
    if not message.size:
        return message.buffer
    numbers, mantissas = message.size[0], message.size[0] * (NUMBER_BYTES - 1)
    if numbers > CHUNK_BYTES // NUMBER_BYTES or len(message.buffer) < mantissas:
        raise RoundFailed("a part of the state is out of bounds")
    try:
        exponents = zlib.decompressobj(wbits=-15).decompress(message.buffer[mantissas:], numbers + 1)
    except zlib.error as error:
        raise RoundFailed(f"a part of the state cannot be read ({error})") from error
    if len(exponents) != numbers:
        raise RoundFailed("a part of the state has another size than it says")
    planes = np.frombuffer(message.buffer[:mantissas] + exponents, np.uint8).reshape(NUMBER_BYTES, numbers)
    return planes.T.tobytes()
