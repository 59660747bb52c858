"""Statements that an organiser signs count, and all others are refused."""

import time
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as some

from swarm.network.signed_records import peer_of
from swarm.protocol.certificates import (
    CERTIFICATE,
    EVERYTHING,
    MAX_CERTIFICATE_BYTES,
    MAX_REMOVALS_BYTES,
    MAX_REMOVED,
    REMOVALS,
    Authority,
    Certificate,
    NotSigned,
    Removals,
    Right,
    Role,
    Signer,
    warrant,
)
from swarm.protocol.run_names import authority_in, signed_content
from tests.helpers.owners import DAY_SECONDS, Organiser, subkey_of

ADA, BOB = (peer_of(subkey_of(name)) for name in ("ada", "bob"))
ORGANISER = Organiser("night-1")


def read(data: bytes, authority: Authority = ORGANISER.authority) -> Certificate:
    found = Certificate.read(data, authority)
    found.check_time()
    return found


def deputy(rights: Right, begin: float = -1, end: float = DAY_SECONDS, run_id: str = "night-1") -> Signer:
    key = Ed25519PrivateKey.generate()
    public, now = key.public_key().public_bytes_raw(), time.time()
    allowed = warrant(ORGANISER.signer, run_id, public, rights, int(now + begin), int(now + end))
    return Signer(key, allowed)


def test_a_certificate_names_a_member():
    organiser = Organiser("night-1")
    found = read(organiser.certificate(ADA, Role.TRAIN, name="Ada"), organiser.authority)
    assert (found.peer_id, found.name, found.roles, found.run_id) == (ADA, "Ada", Role.TRAIN, "night-1")
    assert found.member_since == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda: Organiser("night-1").certificate(ADA), "not signed by the organiser"),
        (lambda: ORGANISER.certificate(ADA, end=-5), "has ended"),
        (lambda: ORGANISER.certificate(ADA, begin=3600), "are both clocks right"),
        (lambda: ORGANISER.certificate(ADA, name="a\x1b[31m"), "not printable"),
        (lambda: ORGANISER.certificate(ADA, name="a" * 65), "cannot be read"),
        (lambda: ORGANISER.certificate(ADA)[:-1], "cannot be read"),
        (lambda: b"", "cannot be read"),
        (lambda: ORGANISER.remove(), "not signed by"),
    ],
)
def test_bytes_that_are_no_certificate_are_refused(what, said):
    with pytest.raises(NotSigned, match=said):
        read(what())


def test_a_certificate_of_another_run_of_the_same_organiser_is_refused():
    other = Authority("night-2", ORGANISER.signer.public_key)
    with pytest.raises(NotSigned, match="is for run 'night-1', not for 'night-2'"):
        read(ORGANISER.certificate(ADA), other)


def test_a_deputy_signs_what_it_has_the_right_to():
    assert read(ORGANISER.certificate(ADA, signer=deputy(Right.ENROL))).peer_id == ADA
    list_of = Removals("night-1", int(1000 * time.time()), {3: "why"})
    assert Removals.read(list_of.signed_by(deputy(Right.REMOVE)), ORGANISER.authority) == list_of


@pytest.mark.parametrize(
    ("signer", "said"),
    [
        (lambda: deputy(Right.REMOVE), "no right to"),
        (lambda: deputy(Right.ENROL, end=-1), "has ended"),
        (lambda: deputy(Right.ENROL, begin=900), "begins on"),
        (lambda: deputy(Right.ENROL, run_id="night-2"), "is for run 'night-2'"),
        (lambda: Signer(Ed25519PrivateKey.generate(), deputy(Right.ENROL).warrant), "not signed by"),
        (lambda: Signer(Ed25519PrivateKey.generate(), b"no warrant"), "cannot be read"),
    ],
)
def test_a_key_that_is_no_such_deputy_signs_nothing(signer, said):
    with pytest.raises(NotSigned, match=said):
        read(ORGANISER.certificate(ADA, signer=signer()))


def test_a_removal_list_counts_for_good_and_none_comes_from_the_future():
    """Otherwise the removed members would be back as soon as the deputy's time is over."""
    now = int(1000 * time.time())
    former = deputy(Right.REMOVE, begin=-100, end=-50)
    then = Removals("night-1", now - 75_000, {3: "why"})
    assert Removals.read(then.signed_by(former), ORGANISER.authority) == then
    for number in (now, 2**53 - 1):
        with pytest.raises(NotSigned):
            Removals.read(Removals("night-1", number, {}).signed_by(former), ORGANISER.authority)
    with pytest.raises(NotSigned, match="in the future"):
        Removals.read(Removals("night-1", 2**53 - 1, {}).signed_by(ORGANISER.signer), ORGANISER.authority)


def test_a_deputy_appoints_no_deputy():
    first, key = deputy(Right.ENROL | Right.REMOVE), Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    second = Signer(key, warrant(first, "night-1", public, Right.ENROL, int(time.time() - 1), int(time.time() + 60)))
    with pytest.raises(NotSigned, match="the deputy of a deputy"):
        read(ORGANISER.certificate(ADA, signer=second))


def test_a_signature_counts_for_nothing_else():
    """The bytes of a list that was signed as a list are no certificate, even if they can be read as one."""
    certificate = ORGANISER.certificate(ADA)
    content = ORGANISER.authority.read(CERTIFICATE, certificate, MAX_CERTIFICATE_BYTES, Right.ENROL).content
    with pytest.raises(NotSigned, match="not signed by"):
        read(ORGANISER.signer.sign(REMOVALS, content))


def test_a_signed_list_can_be_written_in_one_way_only():
    """Otherwise any peer could pass a list on in other ways, and peers would take each for another list."""
    signed = Removals("night-1", 7, {}).signed_by(ORGANISER.signer)
    assert Removals.read(signed, ORGANISER.authority).number == 7
    with pytest.raises(NotSigned, match="written in another way"):
        Removals.read(b"\xdc\x00\x03" + signed[1:], ORGANISER.authority)


def test_the_removal_list_grows_and_stays_small():
    removals = Removals("night-1", 0, {})
    for serial in range(MAX_REMOVED):
        removals = removals.with_removed([serial], "x" * 500)
    signed = removals.signed_by(ORGANISER.signer)
    found = Removals.read(signed, ORGANISER.authority)
    assert len(signed) <= MAX_REMOVALS_BYTES
    assert len(found.removed) == MAX_REMOVED
    assert found.number == removals.number
    back = found.without([7])
    assert back.number > found.number
    assert 7 not in back.removed
    with pytest.raises(ValueError, match="more than 400"):
        removals.with_removed([MAX_REMOVED], "").signed_by(ORGANISER.signer)
    with pytest.raises(ValueError, match="bytes, more than 65536"):
        removals.with_removed(range(MAX_REMOVED), "\u5149" * 60).signed_by(ORGANISER.signer)


def test_a_member_that_is_removed_again_is_the_latest():
    removals = Removals("night-1", 0, {3: "why", 4: ""}).with_removed(iter([3]), "again")
    assert list(removals.removed.items()) == [(4, ""), (3, "again")]


SIGNED = ORGANISER.certificate(ADA)


@given(some.integers(0, len(SIGNED) - 1), some.integers(1, 255))
def test_a_certificate_that_was_changed_in_one_byte_is_refused(place, change):
    changed = bytearray(SIGNED)
    changed[place] ^= change
    with pytest.raises(NotSigned):
        read(bytes(changed))


def test_a_run_is_what_its_organiser_has_signed():
    content = signed_content({"run_id": "night-1", "recipe": {"lr": 0.1, "z": [1, 2]}}, ORGANISER.signer)
    assert authority_in(dict(reversed(content.items()))) == replace(ORGANISER.authority, run="")
    assert authority_in({"run_id": "open"}) is None
    for name, value in (("run_id", "night-2"), ("recipe", {"lr": 0.2, "z": [1, 2]}), ("organiser", "00" * 32)):
        with pytest.raises(NotSigned):
            authority_in({**content, name: value})
    for name in ("signature", "run_id"):
        with pytest.raises(NotSigned):
            authority_in({key: value for key, value in content.items() if key != name})
    with pytest.raises(NotSigned):
        authority_in({**content, "extra": 1})


def test_a_deputy_does_not_say_what_is_trained():
    content = {"run_id": "night-1"}
    signed = signed_content(content, deputy(Right.ENROL | Right.REMOVE))
    with pytest.raises(NotSigned):
        authority_in({**signed, "organiser": ORGANISER.signer.public_key.hex()})


def test_everything_is_all_roles():
    assert set(EVERYTHING) == set(Role)
