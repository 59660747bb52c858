"""A peer's own ledger goes on where it was, loses no more than a line to a crash, and never stops the training."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest

from swarm.ledger.ledger import LedgerFile
from swarm.ledger.lines import MAX_LINE_BYTES, Claim, Signature, Start, Update, read_line, to_line
from swarm.protocol.attestation import Attestation
from swarm.protocol.auto_mode import Pace, Plan
from swarm.protocol.messages import MAX_GROUP_SIZE, MAX_LINE_KBPS, TICKET_NONCE_BYTES, Group, Ticket
from swarm.protocol.orders import DIGEST_BYTES
from swarm.protocol.run_names import key_prefix
from swarm.protocol.wire import LINEAGE_BYTES, MAX_SAMPLES, MAX_SKETCH, MAX_STEP
from tests.helpers.ledgers.ledger_run import NAMES, RUN, LedgerRun, owner


def test_the_ledger_has_what_the_rounds_have_said(run):
    found = run.audit()
    assert found.updates == {"confirmed": 10, "unconfirmed": 0, "alone": 0}
    assert {credit.name: (credit.samples, credit.updates) for credit in found.credits.values()} == {
        "anna": (960, 10),
        "ben": (640, 10),
        "cleo": (320, 10),
    }
    assert [credit.name for _, credit in found.ranked] == list(NAMES), "the peer that has given most comes first"


def test_a_peer_that_comes_back_goes_on_with_its_ledger(run):
    run.start("anna", "ben")
    run.update({"anna": 96, "ben": 64})
    run.close()
    lines = [read_line(line) for line in run.lines("anna")]
    assert [line.n for line in lines] == list(range(len(lines)))
    assert sum(isinstance(line, Start) for line in lines) == 2
    found = run.audit()
    assert found.findings == []
    assert found.updates["confirmed"] == 11


@pytest.mark.parametrize("lost_bytes", [1, 2, 100, 700])
def test_a_crash_in_the_middle_of_a_line_loses_no_more_than_it(run, lost_bytes):
    """The cut is in the last two lines, the signature and the update, or in what is left of them."""
    content = run.path("anna").read_bytes()
    run.path("anna").write_bytes(content[:-lost_bytes])
    whole = content[:-lost_bytes].rpartition(b"\n")[0]
    run.start("anna")
    assert run.path("anna").read_bytes().startswith(whole + b"\n")
    run.update({"anna": 96, "ben": 64})
    run.close()
    found = run.audit()
    assert found.findings == []
    assert found.updates == {"confirmed": 11, "unconfirmed": 0, "alone": 0}


@pytest.mark.parametrize("rubbish", [b"\0" * 3000, b"{}\n", b'{"kind":', b"\n\n", b"\xff" * (3 * MAX_LINE_BYTES)])
def test_rubbish_that_a_power_failure_has_left_is_cut_off(run, rubbish):
    content = run.path("anna").read_bytes()
    run.path("anna").write_bytes(content + rubbish)
    file = LedgerFile(run.path("anna"))
    assert file.size == len(content)
    assert run.path("anna").read_bytes() == content


def test_a_file_of_nothing_but_rubbish_begins_anew(run):
    run.path("anna").write_bytes(b"\0" * 3000)
    run.start("anna")
    run.update({"anna": 96, "ben": 64})
    run.close()
    assert read_line(run.lines("anna")[0]).n == 0
    assert run.audit().findings == []


@pytest.mark.parametrize("num_lines", [0, 3])
def test_a_ledger_of_another_version_is_kept_and_a_new_one_begins(run, caplog, num_lines):
    """None of the lines can be read, or the first three cannot."""
    lines = run.lines("anna")
    other = [line.replace(b'"n":', b'"new":1,"n":') for line in lines[num_lines:]]
    content = b"".join(line + b"\n" for line in (*lines[:num_lines], *other))
    run.path("anna").write_bytes(content)
    run.start("anna")
    run.close()
    assert run.path("anna").with_name("ledger-1.jsonl").read_bytes() == content
    assert read_line(run.lines("anna")[0]).n == 0
    assert [record.getMessage() for record in caplog.records if "it is kept as ledger-1.jsonl" in record.getMessage()]


def test_a_ledger_of_another_protocol_is_kept_and_a_new_one_begins(run, caplog):
    """Its lines can be read here. But rounds may be named in another way, so they would look like changed ones."""
    content = run.path("anna").read_bytes()
    run.protocol += 1
    run.start("anna")
    run.close()
    assert run.path("anna").with_name("ledger-1.jsonl").read_bytes() == content
    assert read_line(run.lines("anna")[0]).protocol == run.protocol
    assert [record.getMessage() for record in caplog.records if "it is kept as ledger-1.jsonl" in record.getMessage()]
    run.start("anna")
    assert not run.path("anna").with_name("ledger-2.jsonl").exists(), "on its own lines it goes on"


def test_lines_that_a_crash_has_left_unsigned_are_signed_at_the_next_start(tmp_path):
    run = LedgerRun(tmp_path, sign_seconds=math.inf)
    run.start(*NAMES)
    for _ in range(5):
        run.update()
    found = run.audit()
    assert found.unsigned == 15
    assert found.updates == {"confirmed": 0, "unconfirmed": 5, "alone": 0}, "only signed words count"
    run.start(*NAMES)
    found = run.audit()
    assert (found.unsigned, found.updates["confirmed"]) == (0, 5)
    assert found.findings == []


def test_another_identity_or_run_begins_another_file(run):
    for name, prefix in (("anna", key_prefix("letters", "ffffffff")), ("ben", run.run)):
        changed = LedgerRun(run.folder, prefix)
        changed.path("cleo").replace(changed.path(name))
        changed.start(name)
        changed.close()
        first = read_line(changed.lines(name)[0])
        assert (first.peer, first.run) == (owner(name).own, prefix)
        assert changed.path(name).with_name("ledger-1.jsonl").exists()
        run.start("cleo")


def test_updates_that_a_peer_makes_alone_are_no_credit(run):
    run.start("anna")
    run.alone("anna", 500)
    run.close()
    found = run.audit()
    credit = found.credits[owner("anna").own.to_base58()]
    assert (credit.samples, credit.alone_samples, credit.alone_updates) == (960, 500, 1)
    assert found.findings == []


@pytest.mark.parametrize(("signers", "confirmed"), [(1, 0), (2, 1), (3, 1)])
def test_two_thirds_of_the_members_have_to_confirm_an_update(tmp_path, signers, confirmed):
    run = LedgerRun(tmp_path)
    run.start(*NAMES)
    run.update(written_by=NAMES[:signers])
    run.close()
    found = run.audit()
    assert found.updates == {"confirmed": confirmed, "unconfirmed": 1 - confirmed, "alone": 0}
    credit = found.credits[owner("cleo").own.to_base58()]
    assert (credit.samples, credit.unconfirmed_samples) == ((32, 0) if confirmed else (0, 32))


def test_a_state_that_several_members_have_taken_a_digest_of_is_compared(tmp_path):
    run = LedgerRun(tmp_path)
    run.start(*NAMES)
    group = run.group({name: 32 for name in NAMES})
    for name, digest in zip(NAMES, (b"a" * 16, b"a" * 16, b"b" * 16), strict=True):
        attested = Attestation(7, bytes(16), digest, ())
        for step in (0, 1):  # each step once
            run.note(name, group if step == 0 else run.group({name: 32}), attested)
    run.close()
    found = run.audit()
    assert (found.equal_states, found.different_states) == (0, 1)
    assert found.findings == [], "other hardware rounds otherwise"


def test_a_disk_without_room_stops_nothing(tmp_path):
    run = LedgerRun(tmp_path)
    run.path("anna").mkdir(parents=True)  # nothing can be written there, even by root
    run.start("anna")
    for _ in range(3):
        run.update({"anna": 96})
    run.path("anna").rmdir()
    run.update({"anna": 96})
    run.close()
    assert run.audit().updates["alone"] == 1, "there is room again"


def test_a_shortened_ledger_gets_no_hole(run, caplog):
    """Its peer trains on.

    A reader finds no line of zeros, which would look as if the peer had changed its own ledger.
    """
    content = run.path("anna").read_bytes()
    run.start("anna")
    run.path("anna").write_bytes(content)
    for _ in range(2):
        run.update({"anna": 96, "ben": 64}, written_by=["anna"])
    assert run.path("anna").read_bytes() == content
    (said,) = (record.getMessage() for record in caplog.records if "cannot be written any more" in record.getMessage())
    assert said.endswith("(another program has shortened it): training goes on without it."), "room would not help"


def test_the_longest_line_fits():
    """The line has a whole group, with everything that a ticket can hold."""
    ticket = Ticket(
        MAX_STEP,
        MAX_SAMPLES,
        True,
        -1.2345678901234567e-300,
        b"\xff" * 16,
        (-1.2345678901234567e-300,) * MAX_SKETCH,
        True,
        b"\xff" * DIGEST_BYTES,
        b"\xff" * LINEAGE_BYTES,
        b"\xff" * LINEAGE_BYTES,
        MAX_STEP,
        Pace(Plan(2, 1, MAX_STEP // 4, MAX_STEP), 10**9, 10**9),
        MAX_LINE_KBPS,
        b"\xff" * LINEAGE_BYTES,
        b"\xff" * LINEAGE_BYTES,
        b"\xff" * TICKET_NONCE_BYTES,
    )
    claims = tuple(Claim.of(owner("anna").own, ticket) for _ in range(MAX_GROUP_SIZE))
    group = bytes(16), bytes(16), bytes(16)
    update = Update(2**40 - 1, bytes(32), 1e9, MAX_STEP, *group, MAX_SAMPLES, claims, None, ticket.orders)
    assert len(to_line(update)) < MAX_LINE_BYTES


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-320, 3.0])
def test_a_groups_name_is_made_again_from_its_line(loss):
    peers = tuple(sorted((owner(name).own for name in NAMES), key=lambda peer: peer.to_bytes()))
    tickets = (
        Ticket(7, 3, False, loss, b"L" * 16, (0.25, math.pi), True, b"7 orders", b"R" * 16),
        Ticket.of_listener(7, True, b"7 orders"),
        Ticket(7, 0, True, loss, b"L" * 16, (math.nan,), False, b"7 orders", b"r" * 16, b"A" * 16),
    )
    group = Group.close(os.urandom(16), peers, tickets, RUN)
    line = read_line(to_line(Update.of(1, bytes(32), 1.0, group)))
    assert line.is_named_rightly(RUN)
    assert not line.is_named_rightly(f"{RUN}0"), "the run is a part of it"
    assert [claim.peer for claim in line.members] == [peer.to_base58() for peer in peers]


def test_a_signature_stands_behind_many_updates_that_come_fast(tmp_path):
    run = LedgerRun(tmp_path, sign_seconds=1000.0)
    run.start(*NAMES)
    for _ in range(50):
        run.update()
    run.close()
    signatures = [line for line in map(read_line, run.lines("anna")) if isinstance(line, Signature)]
    assert len(signatures) == 2, "at the beginning and at the end"
    assert run.audit().updates["confirmed"] == 50


def test_every_field_of_a_ticket_is_in_the_line():
    """The group's name is made of all of them. Without one of them it could not be made again."""
    rest = b"7 orders", b"R" * 16, b"A" * 16, 5, Pace(None, 7), 9000
    ticket = Ticket(7, 3, True, 1.5, b"L" * 16, (0.25,), True, *rest)
    ticket = replace(ticket, work=b"W" * 16, doubts=b"D" * 16, nonce=b"8 bytes.")
    assert all(vars(ticket).values())
    assert Claim.of(owner("anna").own, ticket).ticket(7, b"L" * 16, b"7 orders") == ticket
