"""p2pd as it is when it runs. Hivemind ships it packed by UPX: each one unpacks itself, for a seventh of a second.

The suite starts more than five hundred. So it is unpacked once, into build/, and peers that are forked start that one;
programs that start for real start what people have.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import struct
import subprocess
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tests.helpers.paths import ROOT

_HIVEMIND = Path(importlib.util.find_spec("hivemind").origin).parent  # without its import, which takes seconds
PACKED = _HIVEMIND / "hivemind_cli" / "p2pd"
UNPACKED = ROOT / "build" / f"p2pd-{PACKED.stat().st_size}-{PACKED.stat().st_mtime_ns}" / "p2pd"
"""Under the same name, by which tests find it among processes."""

NRV2E = 8
"""UPX's number of this kind of packing."""
END = 0xFFFFFFFF
FAR = 0x500
"""A repetition of what is further back is a byte longer."""
ELF_OF_64_BITS = b"\x7fELF\x02"
LOADED = 1


def unpack() -> None:
    """Make `UNPACKED`, in six seconds. Nothing, if it is there, or p2pd is packed in another way or not at all."""
    if UNPACKED.exists() or (content := _unpacked(PACKED.read_bytes())) is None:
        return
    UNPACKED.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=UNPACKED.parent, delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o755)
    packed, unpacked = (subprocess.run([path, "-help"], capture_output=True) for path in (PACKED, file.name))
    assert unpacked.returncode == packed.returncode, unpacked
    os.replace(file.name, UNPACKED)


def use_unpacked() -> None:
    """This process, and all that are forked from it, start it from now on, if it is there."""
    from hivemind.p2p import p2p_daemon

    p2p_daemon.path = _path


def _path(package, name: str) -> AbstractContextManager[Path]:
    return nullcontext(UNPACKED) if UNPACKED.exists() else importlib.resources.path(package, name)


def _unpacked(packed: bytes) -> bytes | None:
    """The program, without what only debuggers read; None if it was not packed so."""
    magic = packed.find(b"UPX!", 0, 1024)
    if magic < 0 or not packed.startswith(ELF_OF_64_BITS):
        return None
    begin, blocks = magic + 20, []
    while struct.unpack_from("<I", packed, begin) != (0,):
        size, packed_size, method, how_filtered = struct.unpack_from("<IIBB", packed, begin)
        if method != NRV2E or how_filtered:
            return None
        begin += 12
        block = packed[begin : begin + packed_size]
        blocks.append(_expanded(block) if packed_size < size else block)
        begin += packed_size
    return _placed(b"".join(blocks))


def _placed(content: bytes) -> bytes:
    """Each segment of an ELF file at the place that its header names."""
    (headers,), (number,) = struct.unpack_from("<Q", content, 32), struct.unpack_from("<H", content, 56)
    placed, taken = bytearray(), 0
    for header in range(headers, headers + 56 * number, 56):
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", content, header)
        if kind == LOADED:
            placed += bytes(offset - len(placed)) + content[taken : taken + size]
            taken += size
    return bytes(placed)


def _expanded(packed: bytes) -> bytes:
    """A block of NRV2E: bits say whether the next byte is here, or what further back is repeated."""
    out, place, bits, num_bits, back = bytearray(), 0, 0, 0, 1

    def bit() -> int:
        nonlocal place, bits, num_bits
        if num_bits == 0:
            bits, num_bits = int.from_bytes(packed[place : place + 4], "little"), 32
            place += 4
        num_bits -= 1
        return bits >> num_bits & 1

    while True:
        while bit():
            out.append(packed[place])
            place += 1
        number = 2 + bit()
        while not bit():
            number = 2 * (number - 1) + bit()
            number = 2 * number + bit()
        if number == 2:  # as far back as the last time
            is_short = bit()
        else:
            number = (number - 3) * 256 + packed[place]
            place += 1
            if number == END:
                return bytes(out)
            is_short, back = ~number & 1, (number >> 1) + 1
        size = _size_of_repetition(bit, is_short) + (back > FAR)
        begin = len(out) - back
        for first in range(begin, begin + size, back):  # what is repeated may be repeated as a whole
            out += out[first : min(first + back, begin + size)]


def _size_of_repetition(bit, is_short: int) -> int:
    is_odd = bit()
    if is_short:
        return 2 + is_odd
    if is_odd:
        return 4 + bit()
    size = 2 + bit()
    while not bit():
        size = 2 * size + bit()
    return size + 4
