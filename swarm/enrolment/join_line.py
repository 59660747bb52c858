"""The one line that a volunteer needs: the run, its organiser, addresses of its peers, and perhaps an invitation.

Nothing here needs hivemind, so a damaged line is refused before the slow imports.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from recipe.errors import InputError
from swarm.network.addresses import VARIABLE, parse_initial_peers
from swarm.network.known_peers import peer_of_address
from swarm.protocol.wire import from_wire, to_wire

SCHEME = "swarm://"
VERSION = 1
ORGANISER_BYTES, TOKEN_BYTES, FINGERPRINT_BYTES = 32, 16, 16
CHECKSUM_BYTES = 4
MAX_ADDRESSES, MAX_ADDRESS_LENGTH = 8, 200
MAX_LINE_LENGTH = 4096
MAX_CONTENT_BYTES = 8192

_WORDS = b"/dns4//dns6//udp/31337/quic-v1/p2p/12D3KooW/dns//ip6//ip4/192.168./tcp/31337/p2p/Qm"
"""Dictionary for zlib: usual pieces of addresses, which keep lines short. A change of it needs another `VERSION`."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The same as in `swarm.protocol.run_names`, which needs hivemind."""
_PART = re.compile(r"[A-Za-z0-9_-]{61,}")
"""A piece of a line that lacks its beginning. It is longer than any peer id, and nothing but a line looks like that."""
_RAW = -15
"""Window size for zlib without its header and checksum: the line has its own checksum."""
_QUOTES = "'\"`<>“”„‘’‚«»"
_BEGINNING = re.compile(r"swarm:/+", re.IGNORECASE)
"""`SCHEME`, as telephones and editors may change it."""
_ADDRESS = re.compile(r"/(p2p|ipfs|ip4|ip6|dns\w*)/")
_BEHIND = f"{_QUOTES}.,;:!?([{{)]}}*|"
"""Characters that may follow a line in a sentence, in a list, or in a link that has the line twice. No line contains
them."""
_INVISIBLE = re.compile("[\\s\u00ad\u200b-\u200d\u2060\ufeff]+")
"""White space, and the characters that messengers put where a long word may be broken."""
_CONTENT = msgspec.msgpack.Decoder(
    tuple[
        str,
        bytes,
        Annotated[list[Annotated[str, Meta(max_length=MAX_ADDRESS_LENGTH)]], Meta(max_length=MAX_ADDRESSES)],
        bytes,
        int,
        bytes,
    ]
)


@dataclass(frozen=True)
class JoinLine:
    """The content of a join line. Anyone with a line that has a token may enrol with it.

    Args:
        run_id: of the run
        organiser: public key of the organiser, 32 bytes
        addresses: multiaddresses of peers, one to eight, those of the organiser's peer first
        token: an invitation, 16 bytes; empty for a line without an invitation
        enrolment_port: TCP port of the enrolment server at the hosts of the first peer; 0 where there is none
        fingerprint: of the enrolment server's TLS certificate, 16 bytes; empty where there is none

    Raises:
        InputError: a field does not have this form
    """

    run_id: str
    organiser: bytes
    addresses: tuple[str, ...]
    token: bytes = b""
    enrolment_port: int = 0
    fingerprint: bytes = b""

    def __post_init__(self):
        if not _RUN_ID.fullmatch(self.run_id):
            raise _unusable(f"{ascii(self.run_id)[:80]} is no run id")
        if len(self.organiser) != ORGANISER_BYTES or len(self.token) not in (0, TOKEN_BYTES):
            raise _unusable("its key or its invitation has the wrong length")
        if not 0 <= self.enrolment_port <= 65535:
            raise _unusable(f"the enrolment port {self.enrolment_port} does not exist")
        if len(self.fingerprint) not in ((FINGERPRINT_BYTES,) if self.enrolment_port else (0, FINGERPRINT_BYTES)):
            raise _unusable("the fingerprint of its enrolment server has the wrong length")
        _check_addresses(self.addresses)

    def __str__(self) -> str:
        content = to_wire(
            self.run_id, self.organiser, self.addresses, self.token, self.enrolment_port, self.fingerprint
        )
        packer = zlib.compressobj(9, wbits=_RAW, zdict=_WORDS)
        body = bytes([VERSION]) + packer.compress(content) + packer.flush()
        return SCHEME + _text(body + _checksum(body))

    @classmethod
    def parse(cls, text: str) -> JoinLine:
        """Read a line as a person has pasted it: with white space, line breaks or quotes, or behind `swarm join`.

        Raises:
            InputError: it is damaged, from a later version, no join line, or more than one
        """
        line = _squeezed(text)
        if not _BEGINNING.search(line):
            raise InputError(
                f"{ascii(line)[:60]} is no join line, which begins with {SCHEME}: paste the line that the organiser "
                "has sent."
            )
        if _ADDRESS.search(line):
            raise InputError("Give a join line, or addresses, not both.")
        # A person may have pasted the whole line behind the scheme of an example, or a command behind itself.
        parts = [part.rstrip(_BEHIND).removesuffix("swarmjoin") for part in _BEGINNING.split(line)[1:]]
        bodies = set(filter(None, parts))
        if len(bodies) > 1:
            raise InputError("Two join lines were given: give one.")
        body = _body(bodies.pop() if bodies else "")
        if body[0] != VERSION:
            raise InputError("This join line was made by a later version of this program: update it, and try again.")
        try:
            run_id, organiser, addresses, token, port, fingerprint = from_wire(
                _CONTENT, _unpacked(body[1:]), MAX_CONTENT_BYTES
            )
        except (ValueError, zlib.error):
            raise _unusable("what stands in it cannot be read") from None
        return cls(run_id, organiser, tuple(addresses), token, port, fingerprint)

    @property
    def server_endpoints(self) -> list[tuple[str, int]]:
        """Hosts and ports where the enrolment server may be: those of the first peer, which is the organiser's.

        The host of a relay is left out.
        """
        hers = [address for address in self.addresses if peer_of_address(address) == peer_of_address(self.addresses[0])]
        hosts = [address.split("/")[2] for address in hers if "/p2p-circuit/" not in address]
        return [(host, self.enrolment_port) for host in dict.fromkeys(hosts)] if self.enrolment_port else []

    @property
    def enrolment_endpoints(self) -> list[tuple[str, int]]:
        """Hosts and ports where a peer can enrol with this line; none without an invitation."""
        return self.server_endpoints if self.token else []


def whom_to_join(values: Sequence[str] | None) -> tuple[list[str], JoinLine | None]:
    """Return the addresses that a person gave, as `parse_initial_peers` does, and the join line if one was given.

    Args:
        values: of `--initial-peers`; None if that was not given

    Raises:
        InputError: the line, or an address, is malformed
    """
    text = os.environ.get(VARIABLE, "") if values is None else " ".join(values)
    if not is_join_line(text):
        if _PART.fullmatch(_INVISIBLE.sub("", text[: 2 * MAX_LINE_LENGTH]).strip(_QUOTES)):
            raise InputError(
                f"That is only a part of a join line: paste the whole line, from {SCHEME} to its end, or ask for it "
                "again."
            )
        return parse_initial_peers(values), None
    line = JoinLine.parse(text)
    return list(line.addresses), line


def is_join_line(text: str) -> bool:
    """Whether the text is meant as a join line; `JoinLine.parse` says whether it is sound."""
    return bool(_BEGINNING.search(_INVISIBLE.sub("", text[:MAX_LINE_LENGTH])))


def _squeezed(text: str) -> str:
    """Return the text without what mails and messengers have put into it."""
    if len(text) > MAX_LINE_LENGTH:
        raise InputError(
            f"That is longer than any join line: paste only the line, from {SCHEME} to its end, and nothing else."
        )
    return _INVISIBLE.sub("", text).strip(_QUOTES)


def _body(text: str) -> bytes:
    """Decode the text and check its checksum, which is left out. Encoding again has to give exactly the same text."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        data = b""
    body, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if not body or _text(data) != text or checksum != _checksum(body):
        raise InputError(
            "This join line was cut or changed on its way: ask for it again, and paste the whole line from "
            f"{SCHEME} to its end."
        )
    return body


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:CHECKSUM_BYTES]


def _unpacked(data: bytes) -> bytes:
    """Raises ValueError: it is too long, or has no end"""
    unpacker = zlib.decompressobj(wbits=_RAW, zdict=_WORDS)
    content = unpacker.decompress(data, MAX_CONTENT_BYTES)
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it has no end, or goes on after it")
    return content


def _check_addresses(addresses: tuple[str, ...]) -> None:
    if not 1 <= len(addresses) <= MAX_ADDRESSES or any(len(address) > MAX_ADDRESS_LENGTH for address in addresses):
        raise _unusable(f"it needs 1 to {MAX_ADDRESSES} addresses of at most {MAX_ADDRESS_LENGTH} characters")
    for address in addresses:
        try:
            usable = parse_initial_peers([address])
        except InputError:
            usable = []
        if usable != [address]:  # an address that would have to be corrected is refused, too
            raise _unusable(f"{address!a} is no address of a peer")


def _unusable(why: str) -> InputError:
    return InputError(f"This join line cannot be used, {why}: ask the organiser for a new one.")
