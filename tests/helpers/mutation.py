"""Mutations of messages, such as a stranger may send."""

import random


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with up to four of them changed, inserted, removed or cut off; now and then something random."""
    if chance.random() < 0.2:
        return chance.randbytes(chance.randrange(300))
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        position = chance.randrange(len(changed) + 1)
        kind = chance.randrange(4)
        if kind == 0 and position < len(changed):
            changed[position] = chance.randrange(256)
        elif kind == 1:
            changed.insert(position, chance.randrange(256))
        elif kind == 2:
            del changed[position : position + 1]
        else:
            del changed[max(1, position) :]
    return bytes(changed)
