"""The organiser's books of invitations, members and removals, with several processes that write."""

import hashlib
import multiprocessing
import sqlite3
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.p2p import PeerID

from recipe.errors import InputError
from swarm.enrolment.contact import BOOKS_FILE
from swarm.enrolment.organiser_key import make_deputy
from swarm.enrolment.registry import NO_NAME, NotInvited, Registry
from swarm.protocol import certificates
from swarm.protocol.certificates import (
    EVERYTHING,
    MAX_NAME_LENGTH,
    MAX_REASON_LENGTH,
    MAX_REMOVED,
    MAX_RUN_ID_BYTES,
    Authority,
    Certificate,
    NotSigned,
    Removals,
    Right,
    Role,
    Signer,
)

SIGNER = Signer(Ed25519PrivateKey.generate())
AUTHORITY = Authority("digits", SIGNER.public_key)


def peer(number: int) -> PeerID:
    return PeerID(b"\x12\x20" + hashlib.sha256(str(number).encode()).digest())


def enrolled(registry: Registry, *numbers: int, name: str = "Ana"):
    token = registry.invite("", 1.0, len(numbers), EVERYTHING)
    return [registry.use_invitation(token, peer(number), name) for number in numbers]


def why_not(registry: Registry, token: bytes, number: int = 1) -> str:
    with pytest.raises(NotInvited) as caught:
        registry.use_invitation(token, peer(number), "Ana")
    return str(caught.value)


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "digits")


# ---- invitations ----------------------------------------------------------------------------------------------------


def test_an_invitation_makes_a_member(registry):
    before = time.time()
    token = registry.invite("", 1.0, 1, Role.TRAIN | Role.WATCH)
    assert len(token) == 16
    member = registry.use_invitation(token, peer(1), "Ana")
    assert (member.peer_id, member.name, member.roles) == (peer(1), "Ana", Role.TRAIN | Role.WATCH)
    assert before - 0.001 <= member.serial / 1000 <= time.time()
    assert member.certificate_ends_at == 0
    assert member.why_removed is None
    assert registry.member_of(peer(1)) == member
    assert registry.member_of(peer(2)) is None


def test_the_same_peer_twice_uses_one_use(registry):
    token = registry.invite("", 1.0, 2, EVERYTHING)
    first = registry.use_invitation(token, peer(1), "Ana")
    assert registry.use_invitation(token, peer(1), "another name") == first
    registry.use_invitation(token, peer(2), "Ben")
    assert registry.use_invitation(token, peer(1), "Ana") == first
    assert "used up" in why_not(registry, token, 3)


def test_a_peer_without_a_valid_invitation_is_refused(tmp_path):
    now = [1_700_000_000.0]
    registry = Registry(tmp_path, lambda: now[0])
    token = registry.invite("", 1.0, 1, EVERYTHING)
    assert "not known here" in why_not(registry, bytes(16))
    assert "not known here" in why_not(registry, b"")
    now[0] += 24 * 3600 + 1
    assert "expired" in why_not(registry, token)
    assert registry.members() == []


def test_a_run_has_a_bounded_number_of_members(registry, monkeypatch):
    monkeypatch.setattr("swarm.enrolment.registry.MAX_MEMBERS", 2)
    token = registry.invite("", 1.0, 2, EVERYTHING)
    enrolled(registry, 1, 2)
    assert "more cannot be kept" in why_not(registry, token, 3)


def test_the_name_is_the_organisers_or_else_the_volunteers_own(registry):
    for given, own, name in (
        ("Lab 3", "Ana", "Lab 3"),
        ("", "Ana", "Ana"),
        ("", " \n\x1b[31mAna\u202e ", "[31mAna"),
        ("", "\n", NO_NAME),
        ("", "ü" * 100, "ü" * MAX_NAME_LENGTH),
    ):
        token = registry.invite(given, 1.0, 1, EVERYTHING)
        number = len(registry.members())
        assert registry.use_invitation(token, peer(number), own).name == name


@pytest.mark.parametrize(
    ("days", "uses", "roles"),
    [(0, 1, EVERYTHING), (float("nan"), 1, EVERYTHING), (1e9, 1, EVERYTHING), (1, 0, EVERYTHING), (1, 1, Role(0))],
)
def test_invitations_that_cannot_be_made(registry, days, uses, roles):
    with pytest.raises(InputError, match=r"An invitation .*: give"):
        registry.invite("", days, uses, roles)


def test_tokens_are_not_in_the_file(registry):
    token = registry.invite("", 1.0, 1, EVERYTHING)
    registry.use_invitation(token, peer(1), "Ana")
    assert all(token not in path.read_bytes() for path in registry.folder.iterdir())


# ---- members --------------------------------------------------------------------------------------------------------


def test_members_are_found_by_name_peer_id_or_serial(registry):
    ana, ben, other_ana = (
        enrolled(registry, number, name=name)[0] for number, name in enumerate(("Ana", "Ben", "Ana"))
    )
    assert registry.members() == [ana, ben, other_ana]
    assert registry.find("Ana") == [ana, other_ana]
    assert registry.find(ben.peer_id.to_base58()) == registry.find(str(ben.serial)) == [ben]
    for nobody in ("ana", "", "0", "'; DROP TABLE members; --", "\ud800"):
        assert registry.find(nobody) == []


def test_serials_differ_even_when_the_clock_stands_still(tmp_path):
    registry = Registry(tmp_path, lambda: 1_700_000_000.0)
    serials = [member.serial for member in enrolled(registry, 1, 2, 3)]
    assert serials == [1_700_000_000_000 + number for number in range(3)]


def test_the_end_of_a_certificate_is_noted(registry):
    (member,) = enrolled(registry, 1)
    registry.note_certificate(member.serial, 1_800_000_000)
    registry.note_certificate(member.serial, 1_700_000_000)
    assert registry.member_of(peer(1)).certificate_ends_at == 1_800_000_000, "the longer one counts as well"


def test_a_deputy_s_certificate_ends_with_the_warrant(registry, tmp_path):
    (member,) = enrolled(registry, 1)
    deputy = make_deputy(SIGNER, "digits", Right.ENROL, 3.0, tmp_path / "ben.key", None)
    signed = registry.certify(member, deputy, AUTHORITY, 30.0)
    end = Certificate.read(signed, AUTHORITY).end
    assert end == AUTHORITY.end_of(deputy) == registry.member_of(peer(1)).certificate_ends_at
    signed = registry.certify(member, deputy, AUTHORITY, 1.0)
    assert Certificate.read(signed, AUTHORITY).end < end


@pytest.mark.parametrize(
    "method",
    [
        lambda registry, _: registry.invite("", 1.0, 1, EVERYTHING),
        lambda registry, _: registry.close_invitations(),
        lambda registry, ana: registry.close_invitation_of(ana.serial),
        lambda registry, ana: registry.certify(ana, SIGNER, AUTHORITY, 1.0),
        lambda registry, ana: registry.remove([ana.serial], "spoils rounds", SIGNER, AUTHORITY),
        lambda registry, ana: registry.restore([ana.serial], SIGNER, AUTHORITY),
    ],
    ids=["invite", "close_invitations", "close_invitation_of", "certify", "remove", "restore"],
)
def test_each_method_is_one_transaction(registry, monkeypatch, method):
    (ana,) = enrolled(registry, 1)
    opened, connect = [], sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **options: opened.append(1) or connect(*given, **options))
    method(registry, ana)
    assert len(opened) == 1, "each connection is for one transaction"


# ---- removals -------------------------------------------------------------------------------------------------------


def test_members_are_removed_and_restored(registry):
    ana, ben = enrolled(registry, 1, 2)
    assert registry.removals() == b""
    signed = registry.remove([ana.serial], "spoils rounds", SIGNER, AUTHORITY)
    assert registry.removals() == signed
    first = Removals.read(signed, AUTHORITY)
    assert first.removed == {ana.serial: "spoils rounds"}
    assert registry.member_of(peer(1)).why_removed == "spoils rounds"
    token = registry.invite("", 1.0, 1, EVERYTHING)
    assert why_not(registry, token) == "the organiser has removed this peer: spoils rounds"

    second = Removals.read(registry.remove([ben.serial], "", SIGNER, AUTHORITY), AUTHORITY)
    assert second.removed == {ana.serial: "spoils rounds", ben.serial: ""}
    assert why_not(registry, token, 2) == "the organiser has removed this peer: no reason given"

    third = Removals.read(registry.restore([ana.serial], SIGNER, AUTHORITY), AUTHORITY)
    assert third.removed == {ben.serial: ""}
    assert first.number < second.number < third.number
    assert registry.use_invitation(token, peer(1), "Ana").serial == ana.serial
    assert [member.why_removed for member in registry.members()] == [None, ""]


def test_a_newer_list_from_elsewhere_is_kept(registry):
    ana, ben = enrolled(registry, 1, 2)
    old = Removals.read(registry.remove([ana.serial], "here", SIGNER, AUTHORITY), AUTHORITY)
    new = old.with_removed([ben.serial, 7], "elsewhere").without([ana.serial])
    assert registry.keep_removals(new.signed_by(SIGNER), AUTHORITY)
    assert not registry.keep_removals(new.signed_by(SIGNER), AUTHORITY)
    assert not registry.keep_removals(old.signed_by(SIGNER), AUTHORITY)
    why = [member.why_removed for member in registry.members()]
    assert why == ["here", "elsewhere"], "the signer elsewhere may not have known of it"
    next_ = Removals.read(registry.remove([8], "", SIGNER, AUTHORITY), AUTHORITY).removed
    assert next_.keys() == {ana.serial, ben.serial, 7, 8}


def test_a_list_that_is_signed_without_a_look_takes_no_place_and_is_brought_together(registry):
    ana, ben = enrolled(registry, 1, 2)
    old = Removals("digits", int(1000 * time.time()) - 3_600_000, {7: ""})
    assert registry.keep_removals(old.signed_by(SIGNER), AUTHORITY)
    elsewhere = Removals("digits", old.number + 60_000, {7: "", ben.serial: "elsewhere"})
    signed = registry.remove([ana.serial], "here", SIGNER, AUTHORITY, has_looked=False)
    assert old.number < Removals.read(signed, AUTHORITY).number < elsewhere.number
    both = registry.merged(elsewhere.signed_by(SIGNER), SIGNER, AUTHORITY)
    assert Removals.read(both, AUTHORITY).removed == {7: "", ben.serial: "elsewhere", ana.serial: "here"}
    assert Removals.read(both, AUTHORITY).number > elsewhere.number
    assert registry.merged(both, SIGNER, AUTHORITY) == both == registry.removals()
    assert registry.merged(old.signed_by(SIGNER), SIGNER, AUTHORITY) == both


def test_a_later_list_of_a_signer_that_did_not_know_is_signed_anew(registry):
    (ana,) = enrolled(registry, 1)
    mine = Removals.read(registry.remove([ana.serial], "here", SIGNER, AUTHORITY, has_looked=False), AUTHORITY)
    later = Removals("digits", mine.number + 60_000, {7: "elsewhere"})
    both = registry.merged(later.signed_by(SIGNER), SIGNER, AUTHORITY)
    assert Removals.read(both, AUTHORITY).removed == {ana.serial: "here", 7: "elsewhere"}
    restores = Removals("digits", Removals.read(both, AUTHORITY).number + 60_000, {ana.serial: "here"})
    signed = restores.signed_by(SIGNER)
    assert registry.merged(signed, SIGNER, AUTHORITY) == signed, "a signer elsewhere takes back what it has done"


def test_a_removal_that_is_taken_back_elsewhere_is_over_here_as_well(registry):
    ana, ben = enrolled(registry, 1, 2)
    number = int(1000 * time.time())
    removes = Removals("digits", number, {ana.serial: "elsewhere"}).signed_by(SIGNER)
    assert registry.merged(removes, SIGNER, AUTHORITY) == removes
    assert registry.member_of(peer(1)).why_removed == "elsewhere"
    registry.remove([ben.serial], "here", SIGNER, AUTHORITY)
    number = Removals.read(registry.removals(), AUTHORITY).number + 1
    restores = Removals("digits", number, {ben.serial: "here"}).signed_by(SIGNER)
    assert registry.merged(restores, SIGNER, AUTHORITY) == restores
    assert [member.why_removed for member in registry.members()] == [None, "here"]
    assert Removals.read(registry.remove([8], "", SIGNER, AUTHORITY), AUTHORITY).removed.keys() == {ben.serial, 8}


def test_a_member_that_is_restored_without_a_look_stays_so_until_a_later_list(registry):
    ana, ben = enrolled(registry, 1, 2)
    old = Removals("digits", int(1000 * time.time()) - 3_600_000, {ana.serial: "early"})
    assert registry.keep_removals(old.signed_by(SIGNER), AUTHORITY)
    elsewhere = Removals("digits", old.number + 60_000, {ana.serial: "early", ben.serial: "elsewhere"})
    signed = registry.restore([ana.serial], SIGNER, AUTHORITY, has_looked=False)
    assert Removals.read(signed, AUTHORITY).removed == {}
    both = Removals.read(registry.merged(elsewhere.signed_by(SIGNER), SIGNER, AUTHORITY), AUTHORITY)
    assert both.removed == {ben.serial: "elsewhere"}
    again = both.with_removed([ana.serial], "again").signed_by(SIGNER)
    assert registry.merged(again, SIGNER, AUTHORITY) == again
    assert registry.member_of(peer(1)).why_removed == "again"


@pytest.mark.parametrize("begins_anew", [False, True])
def test_a_member_that_was_restored_by_a_clock_that_was_ahead_can_be_removed(tmp_path, monkeypatch, begins_anew):
    clock = SimpleNamespace(seconds=time.time())
    began, hour = clock.seconds, 3600
    monkeypatch.setattr(certificates, "time", SimpleNamespace(time=lambda: clock.seconds))
    registry = Registry(tmp_path / "digits", lambda: clock.seconds)
    (ana,) = enrolled(registry, 1)
    clock.seconds = began + hour
    registry.restore([ana.serial], SIGNER, AUTHORITY, has_looked=False)
    clock.seconds = began
    if begins_anew:
        registry.begin_list_anew()
        clock.seconds = began + 2 * hour
    removes = Removals("digits", int(1000 * (clock.seconds - 1.5 * hour * begins_anew)), {ana.serial: "noise"})
    assert registry.merged(removes.signed_by(SIGNER), SIGNER, AUTHORITY) == removes.signed_by(SIGNER)
    assert registry.member_of(peer(1)).why_removed == "noise"


def test_a_list_is_not_signed_anew_for_a_member_for_which_it_has_no_room(registry, monkeypatch):
    monkeypatch.setattr("swarm.enrolment.removal_books.MAX_REMOVED", 2)
    (ana,) = enrolled(registry, 1)
    registry.note_certificate(ana.serial, int(time.time() - 1000))
    mine = Removals.read(registry.remove([ana.serial], "", SIGNER, AUTHORITY), AUTHORITY)
    full = Removals("digits", mine.number + 1, {7: "", 8: ""}).signed_by(SIGNER)
    assert registry.merged(full, SIGNER, AUTHORITY) == full


def test_a_deputy_signs_no_list_without_a_look_if_the_last_known_one_is_older_than_the_warrant(registry, tmp_path):
    deputy = make_deputy(SIGNER, "digits", Right.REMOVE, 1, tmp_path / "ben.pem", None)
    with pytest.raises(InputError, match="none that is known here is newer than this deputy's warrant"):
        registry.remove([7], "", deputy, AUTHORITY, has_looked=False)
    assert registry.removals() == b""
    old = Removals("digits", int(1000 * time.time()) - 3_600_000, {})
    assert registry.keep_removals(old.signed_by(SIGNER), AUTHORITY)
    for change in (registry.restore, lambda serials, *keys: registry.remove(serials, "", *keys)):
        with pytest.raises(InputError, match="Give the command again without --offline while peers train"):
            change([7], deputy, AUTHORITY, False)
    elsewhere = replace(old, number=old.number + 60_000, removed={8: "elsewhere"})
    assert registry.keep_removals(elsewhere.signed_by(SIGNER), AUTHORITY), "no list has taken its place"
    looked = registry.remove([9], "", deputy, AUTHORITY)
    assert Removals.read(looked, AUTHORITY).removed == {8: "elsewhere", 9: ""}
    signed = registry.remove([7], "", deputy, AUTHORITY, has_looked=False)
    assert Removals.read(signed, AUTHORITY).removed == {8: "elsewhere", 9: "", 7: ""}
    assert Removals.read(signed, AUTHORITY).number > Removals.read(looked, AUTHORITY).number


def test_a_full_list_restores_no_member(registry):
    (ana,) = enrolled(registry, 1)
    old = Removals.read(registry.remove([ana.serial], "early", SIGNER, AUTHORITY), AUTHORITY)
    full = Removals("digits", old.number + 1, dict.fromkeys(range(MAX_REMOVED), "late"))
    assert registry.keep_removals(full.signed_by(SIGNER), AUTHORITY)
    assert registry.member_of(peer(1)).why_removed == "early"


def test_a_full_list_forgets_members_with_ended_certificates(registry):
    ana, ben, cleo = enrolled(registry, 1, 2, 3)
    for member in (ana, cleo):
        registry.note_certificate(member.serial, int(time.time() + 1000))
    registry.note_certificate(ben.serial, int(time.time() - 1000))
    others = dict.fromkeys(range(MAX_REMOVED - 2), "long ago")  # the books do not know these numbers
    before = Removals("digits", int(1000 * time.time()), {ana.serial: "", ben.serial: "", **others})
    registry.keep_removals(before.signed_by(SIGNER), AUTHORITY)
    after = Removals.read(registry.remove([cleo.serial], "", SIGNER, AUTHORITY), AUTHORITY).removed
    assert ana.serial in after
    assert ben.serial not in after


def test_a_full_list_of_members_takes_no_more(registry, monkeypatch):
    monkeypatch.setattr("swarm.enrolment.removal_books.MAX_REMOVED", 2)
    members = enrolled(registry, 1, 2, 3)
    for member in members:
        registry.note_certificate(member.serial, int(time.time() + 1000))
    with pytest.raises(InputError, match="has no room for more"):
        registry.remove([member.serial for member in members], "", SIGNER, AUTHORITY)


def test_a_deputy_that_fills_the_list_with_inventions_prevents_no_removal(registry, tmp_path):
    eve, ben = enrolled(registry, 1, 2)
    for member in (eve, ben):
        registry.note_certificate(member.serial, int(time.time() + 1000))
    deputy = make_deputy(SIGNER, "digits", Right.REMOVE, 1, tmp_path / "bad.pem", None)
    invented = Removals("digits", int(1000 * time.time()), dict.fromkeys(range(MAX_REMOVED), ""))
    assert registry.keep_removals(invented.signed_by(deputy), AUTHORITY)
    for member in (eve, ben):
        after = Removals.read(registry.remove([member.serial], "", SIGNER, AUTHORITY), AUTHORITY).removed
        assert len(after) == MAX_REMOVED
        assert member.serial in after
    assert list(after)[:-2] == list(range(2, MAX_REMOVED)), "the latest stay, in case that they are true"


def test_a_member_that_a_deputy_has_let_in_stays_removed_whatever_numbers_it_invents(registry, tmp_path):
    """The organiser's books know none of these numbers."""
    deputy = make_deputy(SIGNER, "digits", Right.REMOVE, 1, tmp_path / "bad.pem", None)
    registry.remove([7], "let in by the deputy", SIGNER, AUTHORITY)
    for first in (1000, 2000):
        invented = dict.fromkeys(range(first, first + MAX_REMOVED), "")
        number = Removals.read(registry.removals(), AUTHORITY).number + 1
        assert registry.keep_removals(Removals("digits", number, invented).signed_by(deputy), AUTHORITY)
        again = Removals.read(registry.remove([7], "once more", SIGNER, AUTHORITY), AUTHORITY).removed
        assert (len(again), list(again)[-1], again[7]) == (MAX_REMOVED, 7, "once more")
        other = Removals.read(registry.remove([first], "another", SIGNER, AUTHORITY), AUTHORITY).removed
        assert again[7] == other[7], "before what the deputy says, also about other members"
    assert other.keys() >= {7, 1000, 2000}


def test_a_restored_member_is_not_taken_for_one_that_the_organiser_has_removed(registry, tmp_path):
    deputy = make_deputy(SIGNER, "digits", Right.REMOVE, 1, tmp_path / "bad.pem", None)
    registry.remove([7], "", SIGNER, AUTHORITY)
    number = Removals.read(registry.restore([7], SIGNER, AUTHORITY), AUTHORITY).number + 1
    invented = Removals("digits", number, dict.fromkeys([7, *range(1000, 1000 + MAX_REMOVED - 1)], ""))
    assert registry.keep_removals(invented.signed_by(deputy), AUTHORITY)
    assert 7 not in Removals.read(registry.remove([8], "", SIGNER, AUTHORITY), AUTHORITY).removed


def test_reasons_that_are_too_long_together_prevent_no_removal(registry, tmp_path):
    """Peers accept each of a deputy's three lists. In the organiser's books they become one list of 190 kB."""
    (ana,) = enrolled(registry, 1)
    registry.note_certificate(ana.serial, int(time.time() + 1000))
    deputy = make_deputy(SIGNER, "digits", Right.REMOVE, 1, tmp_path / "bad.pem", None)
    invented: dict[int, str] = {}
    for first in (1000, 2000, 3000):
        new = dict.fromkeys(range(first, first + 130), "\U0001f600" * MAX_REASON_LENGTH)
        invented = dict.fromkeys(invented, "") | new
        list_ = Removals("digits", int(1000 * time.time()) + first, invented)
        assert registry.keep_removals(list_.signed_by(deputy), AUTHORITY)
    signed = registry.remove([ana.serial], "\u5149" * MAX_REASON_LENGTH, SIGNER, AUTHORITY)
    after = Removals.read(signed, AUTHORITY).removed
    assert (len(after), after[ana.serial]) == (391, "\u5149" * MAX_REASON_LENGTH)
    assert after[1000] == ""
    assert after[3129] == invented[3129], "of as many as have room"
    assert Removals.read(registry.remove([1000], "", SIGNER, AUTHORITY), AUTHORITY).removed.keys() == after.keys()


def test_the_longest_list_is_one_that_peers_take(registry, tmp_path):
    authority = Authority("d" * MAX_RUN_ID_BYTES, SIGNER.public_key)
    deputy = make_deputy(SIGNER, authority.run_id, Right.REMOVE, 1, tmp_path / "ben.pem", None)
    serials = range(2**53 - MAX_REMOVED, 2**53)
    signed = registry.remove(serials, "\u5149" * 45, deputy, authority)
    assert Removals.read(signed, authority).removed == dict.fromkeys(serials, "\u5149" * 45)
    signed = registry.remove(serials, "\u5149" * 47, deputy, authority)
    assert list(Removals.read(signed, authority).removed.values()).count("") < 10, "they are too long, and few go"


def test_a_list_without_reasons_takes_none_out_of_the_books(registry):
    (ana,) = enrolled(registry, 1)
    old = Removals.read(registry.remove([ana.serial], "noise", SIGNER, AUTHORITY), AUTHORITY)
    assert registry.keep_removals(old.with_removed([ana.serial], "").signed_by(SIGNER), AUTHORITY)
    assert registry.member_of(peer(1)).why_removed == "noise"


def test_the_reason_of_a_deputy_moves_no_terminal(registry, tmp_path):
    (ana,) = enrolled(registry, 1)
    deputy = make_deputy(SIGNER, "digits", Right.REMOVE, 1, tmp_path / "bad.pem", None)
    list_ = Removals("digits", int(1000 * time.time()), {ana.serial: "\x1b]0;mine\x07noise\x1b[2J"})
    assert registry.keep_removals(list_.signed_by(deputy), AUTHORITY)
    assert registry.member_of(peer(1)).why_removed == "]0;minenoise[2J"


def test_lists_of_other_runs_and_signers_are_not_kept(registry):
    for signer, run in ((Signer(Ed25519PrivateKey.generate()), "digits"), (SIGNER, "other")):
        with pytest.raises(NotSigned):
            registry.keep_removals(Removals(run, 5, {1: ""}).signed_by(signer), AUTHORITY)
    with pytest.raises(NotSigned):
        registry.keep_removals(b"garbage", AUTHORITY)
    assert registry.removals() == b""


def test_only_a_signer_with_the_right_removes(registry, tmp_path):
    (ana,) = enrolled(registry, 1)
    may = make_deputy(SIGNER, "digits", Right.REMOVE, 1, tmp_path / "may.pem", None)
    may_not = make_deputy(SIGNER, "digits", Right.ENROL, 1, tmp_path / "may_not.pem", None)
    with pytest.raises(InputError, match="was signed by a deputy who has no right to"):
        registry.remove([ana.serial], "", may_not, AUTHORITY)
    with pytest.raises(InputError, match="was not signed by the organiser"):
        registry.remove([ana.serial], "", Signer(Ed25519PrivateKey.generate()), AUTHORITY)
    assert registry.removals() == b""
    assert ana.serial in Removals.read(registry.remove([ana.serial], "", may, AUTHORITY), AUTHORITY).removed


# ---- the file -------------------------------------------------------------------------------------------------------


def test_only_this_user_can_read_it(registry):
    enrolled(registry, 1)
    assert stat.S_IMODE(registry.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in registry.folder.iterdir()} == {0o600}


def test_it_is_there_after_a_restart(registry):
    (member,) = enrolled(registry, 1)
    assert Registry(registry.folder).members() == [member]


def test_damaged_books(registry, tmp_path):
    for path in registry.folder.iterdir():
        path.unlink()
    with pytest.raises(InputError, match=r"cannot be used .*: see that the file is there"):
        registry.members()
    (registry.folder / BOOKS_FILE).write_bytes(b"no database at all " * 100)
    for use in (lambda: Registry(registry.folder), registry.members, registry.removals):
        with pytest.raises(InputError, match=r"are damaged .*: restore the file from a copy"):
            use()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="see that this user may read and write there"):
        Registry(tmp_path / "file")


def test_books_of_a_later_version(registry, monkeypatch):
    monkeypatch.setattr("swarm.enrolment.registry.VERSION", 0)
    with pytest.raises(InputError, match="were written by a later version of this program: update it"):
        Registry(registry.folder)


def test_many_threads_use_up_an_invitation_exactly(tmp_path):
    token = Registry(tmp_path).invite("", 1.0, 10, EVERYTHING)
    together = threading.Barrier(8, timeout=20)

    def enrol(lane: int) -> int:
        together.wait()
        registry, members = Registry(tmp_path), 0
        for number in range(lane * 4, lane * 4 + 4):
            try:
                members += registry.use_invitation(token, peer(number), "Ana") is not None
            except NotInvited:
                pass
        return members

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(enrol, range(8))) == 10
    assert len({member.serial for member in Registry(tmp_path).members()}) == 10


def test_two_processes_write_at_the_same_time(tmp_path):
    folder, fork = tmp_path / "run", multiprocessing.get_context("fork")  # a new interpreter takes seconds

    def work(lane: int) -> None:
        registry = Registry(folder)
        for number in range(10):
            (member,) = enrolled(registry, 10 * lane + number)
            registry.remove([member.serial], f"lane {lane}", SIGNER, AUTHORITY)

    workers = [fork.Process(target=work, args=(lane,), daemon=True) for lane in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    members = Registry(folder).members()
    assert len(members) == 20
    signed = Removals.read(Registry(folder).removals(), AUTHORITY)
    assert signed.removed == {member.serial: member.why_removed for member in members}
