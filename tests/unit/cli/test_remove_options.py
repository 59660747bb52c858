"""`swarm remove`: which member is meant, what is signed, and what is said when no peer hears of it."""

import socket
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID

from swarm.cli.organiser import calling, control, members, remove
from swarm.cli.organiser.remove import main
from swarm.enrolment.organiser_key import make_deputy, make_key
from swarm.membership import progress_store
from swarm.network import dht_options, record_push
from swarm.network.startup_errors import ClockIsOff
from swarm.peer.membership.credentials import organisers_own
from swarm.protocol import certificates
from swarm.protocol.certificates import NotSigned, Removals, Right

DAY = 24 * 3600

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def list_of(her_run) -> dict[int, str]:
    """The removed serial numbers, with reasons, in the signed list of her books."""
    return Removals.read(her_run.folder.registry.removals(), her_run.folder.authority).removed


def ran(arguments: list[str], status: int = 0) -> list[str]:
    said: list[str] = []
    assert main(arguments, said.append) == status
    return said


def test_a_removal_is_signed_and_kept(her_run):
    ada, _ = her_run.add("ada"), her_run.add("ben")
    said = ran(her_run.options("ada", "--why", "sends noise", "--offline"))
    assert said == [
        f"ada (…{str(ada.peer_id)[-8:]}) is removed from run digits: sends noise.",
        "The new list is kept here. Your peer hands it out when it starts, or swarm remove does the next time.",
    ]
    assert list_of(her_run) == {ada.serial: "sends noise"}
    ran(her_run.options(str(ada.serial), "--offline"))
    assert list_of(her_run) == {ada.serial: "sends noise"}, "once more: the reason need not be said again"
    said = ran(her_run.options(str(ada.peer_id), "--restore", "--offline"))
    assert said[0] == f"ada (…{str(ada.peer_id)[-8:]}) may take part in run digits again."
    assert list_of(her_run) == {}


def test_a_list_that_no_peer_gets_is_kept(her_run, capsys):
    ada = her_run.add("ada")
    (sentence,) = ran(her_run.options("ada"), status=1)
    assert sentence.endswith("is removed from run digits: no reason given.")
    error = capsys.readouterr().err
    assert error.startswith("error: No peer has the new list yet. None of these peers can be reached: 127.0.0")
    assert "The list is kept here: your peer hands it out when it starts, or give the same command again." in error
    assert list_of(her_run) == {ada.serial: ""}


def test_peers_that_take_calls_and_say_nothing_are_given_up_before_a_p2pd_is_started(her_run, capsys, monkeypatch):
    """Frozen peers do so."""
    monkeypatch.setattr(dht_options, "start_dht", lambda _: pytest.fail("one was started for them"))
    ada = her_run.add("ada")
    with socket.create_server(("127.0.0.1", 0)) as frozen, socket.create_server(("127.0.0.1", 0)) as another:
        addresses = [NOBODY.replace("/tcp/1/", f"/tcp/{server.getsockname()[1]}/") for server in (frozen, another)]
        ran(her_run.options("ada", "--initial-peers", *addresses), status=1)
    assert capsys.readouterr().err.count("(timed out)") == len(addresses)
    assert list_of(her_run) == {ada.serial: ""}


def clocks_differ(monkeypatch, ahead_seconds: float) -> None:
    """Let a peer at the address answer with a clock that differs by this much."""

    def start_dht(_options):
        raise ClockIsOff(ahead_seconds)

    monkeypatch.setattr(calling, "check_reachable", lambda addresses, *_, **__: list(addresses))
    monkeypatch.setattr(dht_options, "start_dht", start_dht)


def swarm_answers(monkeypatch) -> None:
    """Let the swarm answer with the same clock, and without any peer that trains."""
    nothing = SimpleNamespace(result=lambda _: None)
    dht = SimpleNamespace(get=lambda *_, **__: nothing, newest_list=lambda *_: b"")
    manifest = SimpleNamespace(key_prefix="digits")
    monkeypatch.setattr(remove, "calling", lambda *_: nullcontext((dht, manifest)))
    monkeypatch.setattr(progress_store, "progress_records", lambda *_, **__: {})
    monkeypatch.setattr(record_push, "push_list", lambda *_: 0)


@pytest.mark.parametrize("days", [2, -2])
def test_nothing_is_signed_while_the_clock_is_off(her_run, refusal, monkeypatch, days):
    her_run.add("ada")
    clocks_differ(monkeypatch, days * DAY)
    sentence = refusal(main, her_run.options("ada"))
    assert sentence.startswith("Nothing was signed, because peers refuse a list with a wrong date, and this machine's")
    assert f"172800 s {'ahead of' if days > 0 else 'behind'} the swarm's" in sentence
    assert "switch on NTP" in sentence
    assert her_run.folder.registry.removals() == b""
    assert "172800 s" in refusal(control.main, her_run.options("pause"))


def test_a_list_is_kept_where_no_peer_answers_any_more(her_run, monkeypatch, capsys):
    def progress_records(*_, **__):
        raise TimeoutError("no node that may know of the run's peers answers")

    ada = her_run.add("ada")
    swarm_answers(monkeypatch)
    monkeypatch.setattr(progress_store, "progress_records", progress_records)
    ran(her_run.options("ada"), status=1)
    assert "too busy to answer, or none answers any more. The list is kept here" in capsys.readouterr().err
    assert list_of(her_run) == {ada.serial: ""}


def test_an_invitation_is_closed_only_if_the_list_is_signed(her_run, refusal, monkeypatch):
    ada = her_run.add("ada", uses=3)
    registry, arguments = her_run.folder.registry, her_run.options("ada", "--close")
    with monkeypatch.context() as patch:
        clocks_differ(patch, DAY)
        assert refusal(main, arguments).startswith("Nothing was signed")
    assert registry.uses_left_of(ada.serial) == 2
    ran([*arguments, "--offline"])
    assert registry.uses_left_of(ada.serial) == 0


def test_a_clock_that_is_off_by_a_minute_prevents_no_signature(her_run, monkeypatch):
    ada = her_run.add("ada")
    clocks_differ(monkeypatch, 60)
    ran(her_run.options("ada"), status=1)
    assert list_of(her_run) == {ada.serial: ""}


def test_a_list_from_the_future_is_refused(her_run, refusal, monkeypatch, capsys):
    """The list was made while the clock was three days ahead. Now the clock is right."""
    ada, ben = her_run.add("ada"), her_run.add("ben")
    registry = her_run.folder.registry
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "time", SimpleNamespace(time=lambda: time.time() + 3 * DAY))
        registry.remove([ada.serial], "noise", her_run.signer, her_run.folder.authority)
    with pytest.raises(NotSigned, match="in the future"):
        list_of(her_run)
    for words in (["ben", "--offline"], ["ada"]):
        sentence = refusal(main, her_run.options(*words))
        assert sentence == registry.why_peers_refuse_the_list
        assert "in the future, so peers refuse it: set this machine's clock right (NTP); if it is right" in sentence
    assert members.main(her_run.options("--json"), lambda _: None) == 0
    assert capsys.readouterr().err == f"warning: {sentence}\n"
    organisers_own(her_run.folder, her_run.signer, [NOBODY], 31338, PeerID(b"\x12\x20" + bytes(32)), "first")
    assert capsys.readouterr().out == f"warning: {sentence}\n", "her peer says so, too"
    swarm_answers(monkeypatch)
    assert "No peer trains there now" in ran(her_run.options("ben"))[1]
    assert list_of(her_run) == {ada.serial: "noise", ben.serial: ""}
    assert registry.why_peers_refuse_the_list == ""


def test_one_name_of_several_members_is_refused(her_run, refusal):
    first, second = her_run.add("ada"), her_run.add("ada")
    ran(her_run.options(str(first.peer_id), "--offline"))
    assert refusal(main, her_run.options("ada", "--offline")) == (
        f"2 members of run digits are called ada: give a peer id, {first.peer_id} (removed), {second.peer_id}."
    )


def test_a_peer_that_takes_another_peers_name_protects_no_member(her_run):
    ada = her_run.add("ada")
    her_run.add(str(ada.peer_id))
    ran(her_run.options(str(ada.peer_id), "--offline"))
    assert list_of(her_run).keys() == {ada.serial}


def test_a_member_that_a_deputy_has_let_in_elsewhere_is_removed_by_its_number(her_run):
    """A deputy's certificate counts in the swarm, and is in none of the organiser's books."""
    said = ran(her_run.options("1764000000000", "--why", "of Ben", "--offline"))
    assert said[0] == "Member 1764000000000, which is not in your books, is removed from run digits: of Ben."
    assert list_of(her_run) == {1764000000000: "of Ben"}
    ran(her_run.options("1764000000000", "--offline"))
    assert list_of(her_run) == {1764000000000: "of Ben"}, "once more: the reason need not be said again"
    ran(her_run.options("1764000000000", "--restore", "--offline"))
    assert list_of(her_run) == {}


def test_numbers_that_are_no_members_are_refused(her_run, refusal):
    """A serial number is the time when its member enrolled, in milliseconds."""
    now = int(1000 * time.time())
    for number in (7, 10**12 - 1, now + 1000 * (DAY + 60), 2**53 - 1, 10**30):
        sentence = refusal(main, her_run.options(str(number), "--offline"))
        assert sentence.startswith(f"No member of run digits is called '{number}'")
    assert refusal(main, her_run.options("1764000000000", "--restore", "--offline")).startswith("No member of run")
    assert her_run.folder.registry.removals() == b""
    ran(her_run.options(str(now + 1000 * (DAY - 60)), "--offline"))
    her_run.folder.registry.remove([7], "invented by a deputy", her_run.signer, her_run.folder.authority)
    ran(her_run.options("7", "--restore", "--offline"))
    assert 7 not in list_of(her_run)


def test_a_member_with_a_number_as_its_name_protects_no_member_with_that_number(her_run, refusal):
    eve = her_run.add("1764000000000")
    by_number, by_peer_id = (
        her_run.options("1764000000000", "--offline"),
        her_run.options(str(eve.peer_id), "--offline"),
    )
    assert refusal(main, by_number) == (
        "1764000000000 is the name of a member in your books, and may be the serial number of another one. For the "
        f"named member, give its peer id: {eve.peer_id}. For the number, give 1764000000000 again when that one is "
        "removed."
    )
    ran(by_peer_id)
    ran(by_number)
    assert list_of(her_run).keys() == {eve.serial, 1764000000000}
    assert "again when that one is restored." in refusal(main, [*by_number, "--restore"])
    ran([*by_peer_id, "--restore"])
    ran([*by_number, "--restore"])
    assert list_of(her_run) == {}


def test_the_invitation_of_a_member_that_a_deputy_has_let_in_is_closed_in_the_deputys_books(her_run):
    elsewhere = "Another machine keeps the invitation of this member: close it there (swarm invite --close)."
    ada = her_run.add("ada")
    assert ran(her_run.options("1764000000000", "--close", "--offline"))[-1] == elsewhere
    assert elsewhere not in ran(her_run.options("1764000000000", "--offline"))
    assert elsewhere not in ran(her_run.options(str(ada.serial), "--close", "--offline"))


def test_a_name_that_no_member_has_is_refused(her_run, refusal):
    assert refusal(main, her_run.options("eve")) == ("No member of run digits is called 'eve': it has no members yet.")
    for number in range(23):
        her_run.add(f"peer-{number:02}")
    sentence = refusal(main, her_run.options("\x1b[31meve"))
    assert sentence.startswith("No member of run digits is called '\\x1b[31meve': give one of peer-00, peer-01,")
    assert sentence.endswith("peer-19 and 3 more.")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ada", "--restore", "--why", "sorry"], "--why is the reason of a removal"),
        (["ada", "--offline", "--initial-peers", NOBODY], "With --offline no peer is called"),
        (["ada", "--initial-peers", "127.0.0.1:31337"], "`127.0.0.1:31337` cannot be used, it is host:port"),
        (["ada", "--why", "a" * 121], "--why has to be one line of at most 120 letters"),
        (["ada", "--why", "a\nb"], "--why has to be one line"),
        (["ada", "--run-id", "letters"], "No run letters of yours is in"),
        (["ada", "--organiser-key", "no.key"], "The organiser's key no.key is not there"),
    ],
)
def test_bad_input_is_refused(her_run, refusal, arguments, sentence):
    her_run.add("ada")
    assert refusal(main, her_run.options(*arguments)).startswith(sentence)
    assert her_run.folder.registry.removals() == b""


def test_a_missing_key_is_refused(her_run, refusal):
    her_run.add("ada")
    her_run.folder.key.unlink()
    sentence = refusal(main, her_run.options("ada", "--offline"))
    assert sentence.endswith(
        "if it is lost, restore it from a copy, or start another run with --start-from CHECKPOINT "
        "and send new join lines."
    )


def test_keys_that_cannot_sign_are_refused(her_run, refusal, tmp_path):
    her_run.add("ada")
    make_key(tmp_path / "other.key", None)
    make_deputy(her_run.signer, "digits", Right.ENROL, 1, tmp_path / "deputy.key", None)
    for name in ("other.key", "deputy.key"):
        sentence = refusal(main, her_run.options("ada", "--organiser-key", str(tmp_path / name)))
        assert sentence.startswith("This key cannot be used for run digits")
    assert her_run.folder.registry.removals() == b""


def test_a_deputy_that_knows_no_list_of_its_time_has_to_ask_peers(her_run, refusal, tmp_path):
    her_run.add("ada")
    make_deputy(her_run.signer, "digits", Right.REMOVE, 1, tmp_path / "ben.key", None)
    arguments = her_run.options("ada", "--organiser-key", str(tmp_path / "ben.key"))
    for given in (arguments, [*arguments, "--offline"]):
        sentence = refusal(main, given)
        assert sentence.startswith("No list was signed: ")
        assert sentence.endswith("Give the command again without --offline while peers train.")
    assert her_run.folder.registry.removals() == b""


def test_a_key_with_a_passphrase_signs(her_run, refusal, monkeypatch):
    monkeypatch.setenv("SWARM_KEY_PASSPHRASE", "open sesame")
    locked = her_run.another("locked")
    ada = locked.add("ada")
    arguments = locked.options("ada", "--run-id", "locked", "--offline")
    monkeypatch.setenv("SWARM_KEY_PASSPHRASE", "open barley")
    assert "is wrong: try again" in refusal(main, arguments)
    monkeypatch.delenv("SWARM_KEY_PASSPHRASE")
    assert "The key needs a passphrase" in refusal(main, arguments)
    monkeypatch.setenv("SWARM_KEY_PASSPHRASE", "open sesame")
    ran(arguments)
    assert list_of(locked) == {ada.serial: ""}
