"""What volunteers and the enrolment server send each other survives the wire, and nonsense is refused."""

from dataclasses import replace

import msgspec
import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hypothesis import given, settings
from hypothesis import strategies as some

from swarm.enrolment.messages import (
    MAX_REQUEST_BYTES,
    EnrolAnswer,
    EnrolRequest,
    Server,
    printable,
    subkey_of,
)
from swarm.network.signed_records import peer_of
from swarm.protocol.certificates import MAX_CERTIFICATE_BYTES, MAX_NAME_LENGTH, MAX_REMOVALS_BYTES

SERVER, TOKEN = Server(bytes(range(32)), bytes(range(16))), bytes(range(50, 66))


@pytest.fixture(scope="module")
def request_(keys) -> EnrolRequest:
    return EnrolRequest.signed(keys[0], SERVER, TOKEN, "Ana", b"old certificate")


def test_a_request_survives_the_wire_and_names_its_peer(request_, keys):
    read = EnrolRequest.from_bytes(request_.to_bytes())
    assert read == request_
    assert read.subkey == subkey_of(keys[0]) == RSASignatureValidator(keys[0]).local_public_key
    assert read.check(SERVER) == peer_of(read.subkey)


def test_the_longest_request_fits(keys):
    longest = EnrolRequest.signed(keys[0], SERVER, TOKEN, "𝄞" * MAX_NAME_LENGTH, bytes(MAX_CERTIFICATE_BYTES))
    longest = replace(longest, subkey=longest.subkey + b"x" * 350, signature=longest.signature * 2)  # of 4,096 bits
    assert len(longest.to_bytes()) <= MAX_REQUEST_BYTES
    assert EnrolRequest.from_bytes(longest.to_bytes()) == longest


def test_a_request_counts_only_as_it_was_signed(request_, keys):
    for other in (
        replace(request_, token=bytes(16)),
        replace(request_, token=b""),
        replace(request_, name="Ben"),
        replace(request_, certificate=b"another"),
        replace(request_, signature=request_.signature[:-4]),
        replace(request_, signature=b""),
        replace(request_, signature=b"\xff" * 344),
        replace(request_, subkey=subkey_of(keys[1])),
        replace(request_, subkey=b""),
        replace(request_, subkey=b"[owner:ssh-rsa " + b"A" * 300 + b"]"),
    ):
        with pytest.raises(ValueError, match=r"names no peer|was not signed by that peer for this run"):
            other.check(SERVER)


@pytest.mark.parametrize("server", [replace(SERVER, organiser=bytes(32)), replace(SERVER, fingerprint=bytes(16))])
def test_a_request_cannot_be_handed_on_to_another_server(request_, server):
    with pytest.raises(ValueError, match="was not signed by that peer for this run"):
        request_.check(server)


@pytest.mark.parametrize(
    "fields",
    [
        (TOKEN, b"key", "Ana", b"", b"", b"more"),
        (TOKEN, b"key", "Ana", b""),
        (TOKEN[:5], b"key", "Ana", b"", b""),
        (TOKEN + b"x", b"key", "Ana", b"", b""),
        (TOKEN, b"k" * 2001, "Ana", b"", b""),
        (TOKEN, b"key", "a" * 65, b"", b""),
        (TOKEN, b"key", b"Ana", b"", b""),
        (TOKEN, b"key", "Ana", bytes(MAX_CERTIFICATE_BYTES + 1), b""),
        (TOKEN, b"key", "Ana", b"", bytes(701)),
    ],
)
def test_requests_out_of_bounds(fields):
    with pytest.raises(ValueError, match=r"."):
        EnrolRequest.from_bytes(msgspec.msgpack.encode(fields))


def test_an_answer_survives_the_wire():
    answer = EnrolAnswer(bytes(MAX_CERTIFICATE_BYTES), bytes(MAX_REMOVALS_BYTES))
    assert EnrolAnswer.from_bytes(answer.to_bytes()) == answer
    for too_long in (
        EnrolAnswer(bytes(MAX_CERTIFICATE_BYTES + 1), b""),
        EnrolAnswer(b"", bytes(MAX_REMOVALS_BYTES + 1)),
    ):
        with pytest.raises(ValueError, match=r"."):
            EnrolAnswer.from_bytes(too_long.to_bytes())


@pytest.mark.slow
@settings(max_examples=200)
@given(some.text())
def test_names_can_be_shown(name):
    shown = printable(name)
    assert shown.isprintable()
    assert len(shown) <= MAX_NAME_LENGTH
    assert printable(shown) == shown
