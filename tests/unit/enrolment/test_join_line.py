"""The join line survives messengers, and whatever is wrong with it is told in one sentence."""

import base64
import hashlib
import os
import subprocess
import sys
import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from recipe.errors import InputError
from swarm.enrolment.join_line import MAX_CONTENT_BYTES, MAX_LINE_LENGTH, SCHEME, JoinLine, is_join_line, whom_to_join
from tests.helpers.paths import ROOT

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADDRESSES = (
    f"/ip4/203.0.113.5/tcp/31337/p2p/{PEER}",
    f"/ip4/192.168.178.25/tcp/31337/p2p/{PEER}",
    f"/dns/train.example.org/tcp/31337/p2p/{PEER}",
)
LINE = JoinLine("vit-tiny-cifar10", bytes(range(32)), ADDRESSES, bytes(range(100, 116)), 31338, bytes(range(16)))


def sealed(body: bytes) -> str:
    """A join line with a right checksum and this body."""
    data = body + hashlib.sha256(body).digest()[:4]
    return SCHEME + base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def packed(content: bytes) -> bytes:
    packer = zlib.compressobj(9, wbits=-15)
    return packer.compress(content) + packer.flush()


def refusal(text: str) -> str:
    with pytest.raises(InputError) as caught:
        JoinLine.parse(text)
    return str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        LINE,
        JoinLine("r", bytes(32), ADDRESSES[:1]),
        JoinLine("a-run.2", os.urandom(32), ADDRESSES, enrolment_port=65535, fingerprint=os.urandom(16)),
        JoinLine("x" * 64, os.urandom(32), tuple(f"/ip4/10.0.0.{i}/udp/1/quic-v1/p2p/{PEER}" for i in range(8))),
        JoinLine("r", bytes(32), (f"{ADDRESSES[0]}/p2p-circuit/p2p/{PEER}",)),
    ],
)
def test_a_line_gives_back_its_fields(line):
    assert JoinLine.parse(str(line)) == line
    assert is_join_line(str(line))


def test_a_line_of_three_addresses_is_short():
    line = JoinLine("vit-tiny-cifar10", os.urandom(32), ADDRESSES, os.urandom(16), 31338, os.urandom(16))
    assert len(str(line)) < 300


def test_the_longest_line_can_be_read():
    hosts = [hashlib.sha512(bytes([number])).hexdigest()[:63] for number in range(16)]
    addresses = tuple(f"/dns/{hosts[2 * i]}.{hosts[2 * i + 1]}/tcp/31337/p2p/{PEER}" for i in range(8))
    line = JoinLine("x" * 64, os.urandom(32), addresses, os.urandom(16), 31338, os.urandom(16))
    assert JoinLine.parse(str(line)) == line


@pytest.mark.parametrize(
    "mangle",
    [
        lambda text: f"  \n{text}\t ",
        lambda text: f"'{text}'",
        lambda text: f"“{text}”",
        lambda text: f"<{text}>",
        lambda text: "\r\n".join(text[i : i + 40] for i in range(0, len(text), 40)),
        lambda text: "\u200b".join(text),
        lambda text: text.replace("/", "/ "),
        lambda text: f"swarm join {text}",
        lambda text: f"Join us: {text}.",
        lambda text: f"swarm join swarm://{text}",
        lambda text: f"swarm join {text} swarm join {text}",
        lambda text: f"[join]({text})",
        lambda text: f"<{text}|{text}>",
        lambda text: f"**{text}**,",
        lambda text: text.replace("swarm:", "Swarm:"),
        lambda text: text.replace("//", "/"),
    ],
)
def test_changes_that_people_and_messengers_make_to_a_line_do_no_harm(mangle):
    assert JoinLine.parse(mangle(str(LINE))) == LINE
    assert is_join_line(mangle(str(LINE)))
    assert whom_to_join(mangle(str(LINE)).split())[1] == LINE


@pytest.mark.parametrize(
    "words",
    [
        [ADDRESSES[0], str(LINE)],
        [str(LINE), ADDRESSES[0]],
        [ADDRESSES[0].replace("/p2p/", "/ipfs/"), str(LINE)],
        ["/ip4/198.51.100.9/tcp/31337", str(LINE)],
    ],
)
def test_a_line_and_an_address_are_not_taken_together(words):
    """Otherwise one of them would be dropped without a message."""
    with pytest.raises(InputError, match="Give a join line, or addresses, not both"):
        whom_to_join(words)


def test_of_two_lines_none_is_taken():
    other = str(JoinLine("another-run", bytes(32), ADDRESSES[:1]))
    for words in ([str(LINE), other], [other, str(LINE)], ["swarm", "join", other, "swarm", "join", str(LINE)]):
        with pytest.raises(InputError, match="Two join lines were given: give one"):
            whom_to_join(words)
    assert whom_to_join([str(LINE), str(LINE)])[1] == LINE, "it is one, pasted twice"


def test_a_line_that_was_cut_is_refused():
    text = str(LINE)
    for end in range(len(text)):
        sentence = refusal(text[:end])
        if end >= len(SCHEME):
            assert f"ask for it again, and paste the whole line from {SCHEME} to its end" in sentence


@pytest.mark.parametrize("letter", ["A", "z", "-", "=", "é", " ", '"', "\n", "\ud800"])
def test_a_line_that_was_changed_is_refused(letter):
    text = str(LINE)
    for position in range(len(SCHEME), len(text)):
        if text[position] != letter:
            refusal(text[:position] + letter + text[position + 1 :])


def test_every_bit_of_the_last_letter_counts():
    """Base64 would overlook some."""
    for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_":
        for line in (LINE, JoinLine("r1", bytes(32), ADDRESSES), JoinLine("r12", bytes(32), ADDRESSES[:2])):
            text = str(line)
            if letter != text[-1]:
                refusal(text[:-1] + letter)


def test_a_later_version_asks_for_an_update():
    assert "made by a later version of this program: update it" in refusal(sealed(b"\x02anything"))


@pytest.mark.parametrize(
    "text", ["", "hello", "/ip4/203.0.113.5/tcp/31337/p2p/" + PEER, "https://swarm", str(LINE)[1:], str(LINE)[:5]]
)
def test_other_texts_are_no_join_lines(text):
    assert "no join line, which begins with swarm://" in refusal(text)
    assert not is_join_line(text)


def test_long_texts_are_not_looked_at():
    text = SCHEME + "A" * MAX_LINE_LENGTH
    assert "longer than any join line" in refusal(text)
    with pytest.raises(InputError, match="longer than any join line: paste only the line"):
        whom_to_join([text])


@pytest.mark.parametrize("words", [1, 3], ids=["in one piece", "broken again"])
def test_the_second_half_of_a_line_is_no_address(words):
    half = str(LINE)[len(str(LINE)) // 2 :]
    pieces = [half[start::words] for start in range(words)]
    with pytest.raises(InputError, match="only a part of a join line: paste the whole line, from swarm://"):
        whom_to_join(pieces)
    with pytest.raises(InputError, match="is a peer id without the host"):
        whom_to_join([PEER])


@pytest.mark.parametrize(
    "body",
    [
        b"\x01",
        b"\x01" + bytes(40),
        b"\x01" + packed(bytes(MAX_CONTENT_BYTES + 1)),
        b"\x01" + packed(b"x") + b"more",
        b"\x01" + packed(b"\x93" * 8000),
        b"\x01" + packed(msgspec.msgpack.encode(("run", bytes(32), [], b"", 0))),
        b"\x01" + packed(msgspec.msgpack.encode(("run", bytes(32), ADDRESSES * 3, b"", 0, b""))),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(body):
    assert "what stands in it cannot be read: ask the organiser for a new one" in refusal(sealed(body))


@pytest.mark.parametrize(
    "fields",
    [
        ("../etc", bytes(32), ADDRESSES, b"", 0, b""),
        ("run", bytes(31), ADDRESSES, b"", 0, b""),
        ("run", bytes(32), (), b"", 0, b""),
        ("run", bytes(32), ("/ip4/0.0.0.0/tcp/1/p2p/" + PEER,), b"", 0, b""),
        ("run", bytes(32), (f"{ADDRESSES[0]} {ADDRESSES[1]}",), b"", 0, b""),
        ("run", bytes(32), ("--initial-peers",), b"", 0, b""),
        ("run", bytes(32), ADDRESSES, b"short", 0, b""),
        ("run", bytes(32), ADDRESSES, bytes(16), 65536, bytes(16)),
        ("run", bytes(32), ADDRESSES, bytes(16), -1, bytes(16)),
        ("run", bytes(32), ADDRESSES, bytes(16), 31338, b""),
    ],
)
def test_fields_out_of_bounds_are_refused(fields):
    assert "This join line cannot be used" in refusal(sealed(b"\x01" + packed(msgspec.msgpack.encode(fields))))
    with pytest.raises(InputError, match="This join line cannot be used"):
        JoinLine(*fields)


@settings(max_examples=300)
@given(
    some.one_of(
        some.text(max_size=200),
        some.text("ABCabc019-_= \n'", max_size=200).map(lambda text: SCHEME + text),
        some.binary(max_size=200).map(sealed),
        some.binary(max_size=200).map(lambda body: sealed(b"\x01" + body)),
        some.binary(max_size=200).map(lambda content: sealed(b"\x01" + packed(content))),
        some.tuples(
            some.text(max_size=3),
            some.binary(max_size=33),
            some.lists(some.text(max_size=9), max_size=9),
            some.binary(max_size=17),
            some.integers(-(2**63), 2**64 - 1),
            some.binary(max_size=17),
        ).map(lambda fields: sealed(b"\x01" + packed(msgspec.msgpack.encode(fields)))),
    )
)
def test_parsing_raises_no_other_error_than_its_own(text):
    is_join_line(text)
    refusal(text)


def test_endpoints_are_the_hosts_of_the_addresses_with_the_enrolment_port():
    hosts = ["/ip4/203.0.113.5", "/ip6/2001:db8::1", "/dns4/a.example.org", "/ip4/203.0.113.5"]
    direct = [f"{host}/tcp/{port}/p2p/{PEER}" for port, host in enumerate(hosts, 1)]
    relayed = f"/ip4/198.51.100.9/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}"
    line = JoinLine("run", bytes(32), (relayed, *direct), bytes(16), 31338, bytes(16))
    endpoints = [("203.0.113.5", 31338), ("2001:db8::1", 31338), ("a.example.org", 31338)]
    assert line.enrolment_endpoints == line.server_endpoints == endpoints


def test_no_peer_enrols_at_the_hosts_of_other_members():
    other = ADDRESSES[0].replace("203.0.113.5", "198.51.100.7").replace(PEER, f"{PEER[:-1]}P")
    line = JoinLine("run", bytes(32), (*ADDRESSES[:1], other), bytes(16), 31338, bytes(16))
    assert JoinLine.parse(str(line)).addresses == (ADDRESSES[0], other)
    assert line.enrolment_endpoints == [("203.0.113.5", 31338)]


def test_no_peer_enrols_without_a_port_or_an_invitation():
    without_port = JoinLine("run", bytes(32), ADDRESSES, bytes(16))
    assert without_port.enrolment_endpoints == without_port.server_endpoints == []
    without_token = JoinLine("run", bytes(32), ADDRESSES, b"", 31338, bytes(16))
    assert without_token.enrolment_endpoints == []
    assert len(without_token.server_endpoints) == 3


def test_the_join_line_is_read_before_the_slow_imports():
    code = "import sys, swarm.enrolment.join_line; sys.exit(bool({'hivemind', 'torch', 'grpc'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
