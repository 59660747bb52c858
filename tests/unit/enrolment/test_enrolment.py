"""Volunteers enrol at a real server on this machine, and members get new certificates there."""

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from recipe.errors import InputError
from swarm.enrolment import tls
from swarm.enrolment.client import Refused, TryLater, enrol, renew
from swarm.enrolment.messages import subkey_of
from swarm.enrolment.organiser_key import make_deputy
from swarm.enrolment.registry import Registry
from swarm.enrolment.removed import Removed
from swarm.enrolment.server import CallLimits, EnrolmentServer
from swarm.network.signed_records import peer_of
from swarm.protocol.certificates import EVERYTHING, MAX_NAME_LENGTH, Certificate, Removals, Right, Role

DAY = 24 * 3600


def read(answer, organiser) -> Certificate:
    certificate = Certificate.read(answer.certificate, organiser.authority)
    certificate.check_time()
    return certificate


def refusal(ask, *arguments) -> str:
    with pytest.raises(Refused) as caught:
        ask(*arguments)
    return str(caught.value)


# ---- enrolling ------------------------------------------------------------------------------------------------------


def test_a_volunteer_enrols(organiser, key):
    line = organiser.invite(organiser.serve(), roles=Role.TRAIN)
    answer = enrol(line, key, "Ana")
    certificate = read(answer, organiser)
    assert certificate.peer_id == peer_of(subkey_of(key))
    assert (certificate.name, certificate.roles) == ("Ana", Role.TRAIN)
    assert certificate.end - time.time() == pytest.approx(7 * DAY, abs=60)
    assert answer.removals == b""
    (member,) = organiser.registry.members()
    assert (member.serial, member.certificate_ends_at) == (certificate.serial, certificate.end)


def test_the_same_peer_enrols_twice_for_one_use(organiser, key, other_key):
    line = organiser.invite(organiser.serve())
    first, again = (read(enrol(line, key, "Ana"), organiser) for _ in range(2))
    assert again.serial == first.serial
    sentence = refusal(enrol, line, other_key, "Ben")
    assert sentence == (
        "The organiser's server refuses: this invitation has been used up: ask the organiser for a new join line."
    )


def test_a_server_with_a_clock_that_was_ahead_when_it_was_made_is_named(organiser, key, monkeypatch):
    """This machine's clock is right, so its user cannot mend it alone."""
    later = datetime.now(UTC) + timedelta(days=5)
    with monkeypatch.context() as patch:
        patch.setattr(tls, "datetime", SimpleNamespace(now=lambda _: later))
        line = organiser.invite(organiser.serve())
    with pytest.raises(InputError, match=r"If it is right, the organiser's clock was wrong.* delete tls\.pem") as error:
        enrol(line, key, "Ana")
    assert f"counts from {later - timedelta(days=1):%Y-%m-%d} to" in str(error.value)


def test_an_expired_invitation(organiser, key):
    line = organiser.invite(organiser.serve())
    organiser.clock.ahead_days = 2
    assert "this invitation has expired" in refusal(enrol, line, key, "Ana")


def test_a_tampered_invitation(organiser, key):
    line = organiser.invite(organiser.serve())
    tampered = replace(line, token=bytes([line.token[0] ^ 1]) + line.token[1:])
    assert "this invitation is not known here" in refusal(enrol, tampered, key, "Ana")


def test_a_removed_peer_enrols_no_more(organiser, key):
    line = organiser.invite(organiser.serve(), uses=5)
    certificate = enrol(line, key, "Ana").certificate
    serial = organiser.registry.members()[0].serial
    organiser.registry.remove([serial], "spoils rounds", organiser.signer, organiser.authority)
    for ask, arguments in ((enrol, (line, key, "Ana")), (renew, (line, key, "Ana", certificate))):
        with pytest.raises(Removed, match="the organiser has removed this peer: spoils rounds"):
            ask(*arguments)
    organiser.registry.restore([serial], organiser.signer, organiser.authority)
    answer = enrol(line, key, "Ana")
    assert read(answer, organiser).serial == serial
    assert Removals.read(answer.removals, organiser.authority).removed == {}


def test_a_peer_that_is_removed_while_it_renews_gets_no_certificate(organiser, key, monkeypatch):
    line = organiser.serve()
    certificate = enrol(organiser.invite(line), key, "Ana").certificate
    certify = organiser.registry.certify

    def removed_meanwhile(member, *arguments) -> bytes:
        organiser.registry.remove([member.serial], "spoils rounds", organiser.signer, organiser.authority)
        return certify(member, *arguments)

    monkeypatch.setattr(organiser.registry, "certify", removed_meanwhile)
    with pytest.raises(Removed, match="the organiser has removed this peer: spoils rounds"):
        renew(line, key, "Ana", certificate)


def test_a_newcomer_gets_the_list_of_removed_members(organiser, key):
    line = organiser.invite(organiser.serve())
    signed = organiser.registry.remove([7], "spoils rounds", organiser.signer, organiser.authority)
    assert enrol(line, key, "Ana").removals == signed


def test_a_line_without_an_invitation(organiser, key):
    with pytest.raises(InputError, match="carries no invitation: ask the organiser for one that does"):
        enrol(organiser.serve(), key, "Ana")


@pytest.mark.parametrize(("name", "known_as"), [("", "unnamed"), ("\ud800\x1b[31m", "[31m"), ("𝄞" * 99, "𝄞" * 64)])
def test_a_volunteer_may_have_any_name(organiser, key, name, known_as):
    line = organiser.invite(organiser.serve())
    assert read(enrol(line, key, name), organiser).name == known_as


# ---- renewing -------------------------------------------------------------------------------------------------------


def test_a_certificate_is_renewed(organiser, key):
    line = organiser.serve(certificate_days=3)
    first = enrol(organiser.invite(line, "Lab 3"), key, "Ana")
    renewed = read(renew(line, key, "another name", first.certificate), organiser)
    before = read(first, organiser)
    assert (renewed.serial, renewed.name, renewed.roles) == (before.serial, "Lab 3", EVERYTHING)
    assert renewed.end >= before.end


def test_a_certificate_is_renewed_up_to_a_month_after_its_end(organiser, key):
    line = organiser.serve(certificate_days=1)
    certificate = enrol(organiser.invite(line), key, "Ana").certificate
    organiser.clock.ahead_days = 30.5
    with pytest.raises(InputError, match="clock and the organiser's differ"):  # as far as this machine knows
        renew(line, key, "Ana", certificate)
    organiser.clock.ahead_days = 31.5
    assert "the certificate ended too long ago" in refusal(renew, line, key, "Ana", certificate)


def test_certificates_that_are_not_renewed(organiser, another_organiser, key, other_key, tmp_path):
    line = organiser.serve()
    certificate = enrol(organiser.invite(line), key, "Ana").certificate
    foreign = enrol(another_organiser.invite(another_organiser.serve()), key, "Ana").certificate
    assert "the certificate is of another peer" in refusal(renew, line, other_key, "Ben", certificate)
    assert "the certificate was not signed by the organiser of this run" in refusal(renew, line, key, "Ana", foreign)
    for garbage in (b"", b"garbage"):
        assert "the certificate cannot be read" in refusal(renew, line, key, "Ana", garbage)
    new_books = EnrolmentServer(Registry(tmp_path / "new"), organiser.signer, organiser.authority, "127.0.0.1", 0)
    elsewhere = replace(line, enrolment_port=new_books.start(), fingerprint=new_books.fingerprint)
    try:
        assert "this server does not know the peer" in refusal(renew, elsewhere, key, "Ana", certificate)
    finally:
        new_books.stop()


def test_a_line_without_a_server(organiser, key):
    line = replace(organiser.serve(), enrolment_port=0)
    with pytest.raises(InputError, match="names no enrolment server: ask the organiser"):
        renew(line, key, "Ana", b"certificate")


# ---- deputies -------------------------------------------------------------------------------------------------------


def test_a_deputys_certificates_count(organiser, key, tmp_path):
    deputy = make_deputy(organiser.signer, "digits", Right.ENROL, 1, tmp_path / "deputy.pem", None)
    line = organiser.serve(deputy)
    first = enrol(organiser.invite(line, "n" * MAX_NAME_LENGTH), key, "")
    assert read(renew(line, key, "", first.certificate), organiser).serial == read(first, organiser).serial


def test_a_deputy_without_the_right_serves_no_volunteer(organiser, tmp_path):
    deputy = make_deputy(organiser.signer, "digits", Right.REMOVE, 1, tmp_path / "deputy.pem", None)
    with pytest.raises(InputError, match="was signed by a deputy who has no right to"):
        organiser.serve(deputy)


def test_a_deputys_time_ends_while_the_server_runs(organiser, key, tmp_path):
    deputy = make_deputy(organiser.signer, "digits", Right.ENROL, 0.5, tmp_path / "deputy.pem", None)
    line = organiser.invite(organiser.serve(deputy))
    organiser.clock.ahead_days = 0.6
    with pytest.raises(TryLater, match=r"has failed \(its own files or its key cannot be used\): tell the organiser"):
        enrol(line, key, "Ana")


# ---- the right server -----------------------------------------------------------------------------------------------


def test_an_enrolment_server_that_does_not_answer_is_named(organiser, key):
    line = organiser.invite(organiser.serve())
    organiser.stop()
    where = rf"127\.0\.0\.1:{line.enrolment_port} \(connection refused\)"
    with pytest.raises(TryLater, match=f"The enrolment server does not answer: {where}; ask the organiser whether"):
        enrol(line, key, "Ana")


def test_the_first_endpoint_that_answers_is_taken(organiser, key):
    line = organiser.invite(organiser.serve())
    hosts = ("/ip4/127.0.0.9", "/dns/no-such-host.invalid", "/ip4/127.0.0.1", "/ip6/::1")
    peer = line.addresses[0].rpartition("/p2p/")[2]
    line = replace(line, addresses=tuple(f"{host}/tcp/1/p2p/{peer}" for host in hosts))
    assert read(enrol(line, key, "Ana"), organiser).name == "Ana"


def test_another_server_than_the_lines(organiser, another_organiser, key):
    line, other = organiser.invite(organiser.serve()), another_organiser.serve()
    for wrong in (
        replace(line, fingerprint=bytes(16)),
        replace(line, enrolment_port=other.enrolment_port),
    ):
        with pytest.raises(InputError, match="not the one of this join line: the line is of another run, or the"):
            enrol(wrong, key, "Ana")
    assert organiser.registry.members() == another_organiser.registry.members() == []


def test_another_organisers_key_in_the_line(organiser, another_organiser, key):
    line = replace(organiser.invite(organiser.serve()), organiser=another_organiser.signer.public_key)
    assert "it was not signed by that peer for this run" in refusal(enrol, line, key, "Ana")
    assert organiser.registry.members() == []


def test_another_run_in_the_line(organiser, key):
    line = replace(organiser.invite(organiser.serve()), run_id="other")
    with pytest.raises(InputError, match="The new certificate is for run 'digits', not for 'other'"):
        enrol(line, key, "Ana")


def test_a_port_that_is_taken(organiser):
    line = organiser.serve()
    server = EnrolmentServer(
        organiser.registry, organiser.signer, organiser.authority, "127.0.0.1", line.enrolment_port
    )
    with pytest.raises(InputError, match=rf"cannot listen on 127\.0\.0\.1 at port {line.enrolment_port}: choose anoth"):
        server.start()
    server.stop()


@pytest.mark.parametrize("days", [0, -1, 1000, float("nan")])
def test_certificates_for_an_impossible_time(organiser, days):
    with pytest.raises(InputError, match=r"Certificates for .* days cannot be made"):
        organiser.serve(certificate_days=days)


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_too_many_calls(organiser, key):
    line = organiser.invite(organiser.serve(limits=CallLimits(per_minute=1)))
    enrol(line, key, "Ana")
    with pytest.raises(
        TryLater, match="The organiser's server is busy: too many peers are enrolling at this moment: try"
    ):
        enrol(line, key, "Ana")


def test_one_host_may_make_fewer_calls_than_all_together():
    limits = CallLimits()
    assert [limits.may_call("ipv4:203.0.113.5:1000") for _ in range(12)] == [True] * 10 + [False] * 2
    assert not limits.may_call("ipv6:%5B::ffff:203.0.113.5%5D:1000")
    assert [limits.may_call(f"ipv6:%5B2001:db8::{port:x}%5D:{port}") for port in range(1, 12)] == [True] * 10 + [False]
    assert limits.may_call("ipv6:%5B2001:db8:0:1::1%5D:1")
    assert [limits.may_call("ipv4:127.0.0.1:1000") for _ in range(40)] == [True] * 39 + [False]


def test_callers_without_an_address_share_a_limit():
    limits = CallLimits()
    callers = ["unix:", "", "ipv4:999.1.1.1:1", "ipv6:%5Bfe80::1%25eth0%5D"] * 3
    assert sum(map(limits.may_call, callers)) == 10


def test_enrolments_and_refusals_are_told_once(organiser, key, other_key, caplog):
    line = organiser.invite(organiser.serve())
    with caplog.at_level("INFO"):
        for _ in range(3):
            enrol(line, key, "Ana")
            refusal(enrol, line, other_key, "Ben")
    assert caplog.text.count("has been used up") == 1
    assert f"Ana has enrolled: {peer_of(subkey_of(key))}" in caplog.text
