"""Changes of a ledger's lines are found: an outsider's by the hash chain, the owner's by what others have signed."""

from __future__ import annotations

import base64
import json
import shutil

import msgspec
import pytest

from recipe.errors import InputError
from swarm.cli.ledger import main
from swarm.ledger.audit import audit
from swarm.ledger.chain import Kind
from swarm.ledger.lines import Certified, Signature, Start, Update, digest_of, read_line, to_line
from swarm.protocol.messages import Group
from swarm.protocol.run_names import key_prefix
from swarm.protocol.signed_lists import REMOVED
from tests.helpers.ledgers.ledger_run import NAMES, RUN, SAMPLES, LedgerRun, owner, signed_again, where
from tests.helpers.owners import DAY_SECONDS, Organiser

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

PLACE = 4
"""The place of the fourth of the ten updates."""


def edited(line: bytes, **changes) -> bytes:
    """A line with other values, as a person could write it with an editor."""
    fields = json.loads(line)
    assert changes.keys() <= fields.keys()
    return json.dumps(fields | changes, separators=(",", ":")).encode()


def with_member(line: bytes, index: int, value: object) -> bytes:
    members = json.loads(line)["members"]
    members[0][index] = value
    return edited(line, members=members)


def with_signature(line: bytes, signer: str) -> bytes:
    read = read_line(line)
    return to_line(
        Signature(read.n, read.before, owner(signer).sign(Signature.text(RUN, read.n, read.before)).decode())
    )


def moved(lines: list[bytes], place: int) -> list[bytes]:
    return [*lines[:place], lines[place + 1], lines[place], *lines[place + 2 :]]


def replaced(lines: list[bytes], place: int, line: bytes) -> list[bytes]:
    return [*lines[:place], line, *lines[place + 1 :]]


def other_run(lines: list[bytes], place: int) -> list[bytes]:
    """Put in the line of this number of the same peer's ledger in another run."""
    there = signed_again([read_line(line) for line in lines], "anna", key_prefix("numbers", "0123abcd"))
    assert where([there[place]]) == [0]
    return replaced(lines, place, edited(there[place], time=1.0))


BY_OUTSIDERS = {
    "samples": (lambda lines, at: replaced(lines, at, with_member(lines[at], 1, 97)), {Kind.FALSE_GROUP: 0}),
    "loss": (lambda lines, at: replaced(lines, at, with_member(lines[at], 2, 0.5)), {Kind.FALSE_GROUP: 0}),
    "member": (
        lambda lines, at: replaced(lines, at, with_member(lines[at], 0, owner("dora").own.to_base58())),
        {Kind.FALSE_GROUP: 0},
    ),
    "flags": (lambda lines, at: replaced(lines, at, with_member(lines[at], 3, 4)), {Kind.FALSE_GROUP: 0}),
    "group": (
        lambda lines, at: replaced(lines, at, edited(lines[at], group=base64.b64encode(bytes(16)).decode())),
        {Kind.FALSE_GROUP: 0},
    ),
    "step": (lambda lines, at: replaced(lines, at, edited(lines[at], step=3)), {Kind.FALSE_GROUP: 0}),
    "time": (lambda lines, at: replaced(lines, at, edited(lines[at], time=1.0)), {Kind.CHANGED: 1}),
    "bound": (lambda lines, at: replaced(lines, at, edited(lines[at], most=7)), {Kind.CHANGED: 1}),
    "removed": (lambda lines, at: [*lines[:at], *lines[at + 1 :]], {Kind.MISSING: 0}),
    "swapped": (moved, {Kind.MISSING: 0, Kind.OUT_OF_ORDER: 1}),
    "repeated": (lambda lines, at: [*lines[: at + 1], *lines[at:]], {Kind.OUT_OF_ORDER: 1}),
    "another run's": (other_run, {Kind.CHANGED: 1}),
    "forged signature": (
        lambda lines, at: replaced(
            lines, at + 1, edited(lines[at + 1], signature=base64.b64encode(bytes(256)).decode())
        ),
        {Kind.FALSE_SIGNATURE: 1},
    ),
    "another signer": (
        lambda lines, at: replaced(lines, at + 1, with_signature(lines[at + 1], "ben")),
        {Kind.FALSE_SIGNATURE: 1},
    ),
    "rubbish": (lambda lines, at: replaced(lines, at, b"\x00\xff" * 40), {Kind.UNREADABLE: 0}),
    "too long": (lambda lines, at: replaced(lines, at, b"[" * 2**20), {Kind.UNREADABLE: 0}),
    "no beginning": (lambda lines, at: lines[at:], {Kind.HEADLESS: -4}),
    "another key": (
        lambda lines, at: replaced(lines, 0, edited(lines[0], key=owner("ben").local_public_key.decode()[7:-1])),
        {Kind.FALSE_SIGNATURE: -3},
    ),
    "an unsound key": (
        lambda lines, at: replaced(lines, 0, edited(lines[0], key="ssh-rsa AAAA")),
        {Kind.FALSE_KEY: -4},
    ),
    "an invented organiser": (
        lambda lines, at: replaced(lines, 0, edited(lines[0], organiser=base64.b64encode(bytes(32)).decode())),
        {Kind.FALSE_ORGANISER: -4},
    ),
}
"""For each attack: the change that makes it, and each kind of finding with its distance in lines from the place."""


@pytest.mark.parametrize("how", BY_OUTSIDERS)
def test_an_edit_of_a_line_is_found(run, how, capsys):
    before = run.audit()
    assert before.findings == []
    lines = run.lines("anna")
    place = where(lines)[1]
    assert place == PLACE
    change, expected = BY_OUTSIDERS[how]
    run.write("anna", change(lines, place))
    after = run.audit()
    found = [(finding.kind, finding.place.line) for finding in after.findings]
    for kind, behind in expected.items():
        assert (kind, PLACE + 1 + behind) in found
    assert {finding.place.file for finding in after.findings} == {"anna/ledger.jsonl"}
    assert main(["verify", str(run.folder)]) == 1
    errors = capsys.readouterr().err
    assert f"anna/ledger.jsonl, line {PLACE + 1 + next(iter(expected.values()))}" in errors
    for peer, credit in before.credits.items():
        assert after.credits[peer].samples == credit.samples, "two of three still say what was"


@pytest.mark.parametrize("how", ["an unsound key", "an invented organiser"])
def test_a_false_beginning_is_the_only_fault_that_is_found(run, how):
    change, expected = BY_OUTSIDERS[how]
    run.write("anna", change(run.lines("anna"), PLACE))
    assert [finding.kind for finding in run.audit().findings] == list(expected)


def test_a_file_that_was_cut_off_is_found(run):
    content = run.path("anna").read_bytes()
    run.path("anna").write_bytes(content[:-40])
    (finding,) = run.audit().findings
    assert (finding.kind, finding.place.line) == (Kind.TORN, len(content.splitlines()))


def test_updates_cut_off_before_their_signature_do_not_count(run):
    lines = run.lines("anna")
    run.write("anna", lines[: where(lines)[-1] + 1])
    run.write("ben", run.lines("ben")[: where(run.lines("ben"))[-1] + 1])
    found = run.audit()
    assert found.findings == [], "a peer that stops looks like that"
    assert found.unsigned == 2
    assert found.updates == {"confirmed": 9, "unconfirmed": 1, "alone": 0}


# ---- the owner of a ledger lies, and signs what it likes -------------------------------------------------------------


def only_update(change):
    """A change of a ledger that changes the fourth update alone."""

    def changed(lines):
        (place,) = [place for place, line in enumerate(lines) if isinstance(line, Update) and line.step == 3]
        return [*lines[:place], change(lines[place]), *lines[place + 1 :]]

    return changed


def richer(update: Update, rename: bool) -> Update:
    """The update with ten times the samples for anna."""
    own = owner("anna").own.to_base58()
    claims = tuple(
        msgspec.structs.replace(claim, samples=claim.samples * 10) if claim.peer == own else claim
        for claim in update.members
    )
    update = msgspec.structs.replace(update, members=claims)
    return msgspec.structs.replace(update, group=name_of(update)) if rename else update


def name_of(update: Update) -> bytes:
    peers = tuple(claim.id for claim in update.members)
    tickets = tuple(claim.ticket(update.step, update.lineage, update.orders) for claim in update.members)
    return Group.close(update.nonce, peers, tickets, RUN).group_id


def kinds(found) -> set[Kind]:
    return {finding.kind for finding in found.findings}


def test_an_owner_that_signs_more_than_it_gave_has_another_groups_name(run):
    run.rewrite("anna", only_update(lambda update: richer(update, rename=False)))
    assert kinds(run.audit()) == {Kind.FALSE_GROUP}


def test_an_owner_that_renames_the_group_too_is_alone_with_it(run):
    before = run.audit().credits
    run.rewrite("anna", only_update(lambda update: richer(update, rename=True)))
    after = run.audit()
    assert after.findings == []
    assert after.updates == {"confirmed": 10, "unconfirmed": 1, "alone": 0}
    for peer, credit in before.items():
        assert after.credits[peer].samples == credit.samples


def test_an_owner_that_raises_the_bound_is_outvoted_and_named(run):
    before = run.audit().credits
    run.rewrite("anna", only_update(lambda update: msgspec.structs.replace(update, most=10**6)))
    after = run.audit()
    (finding,) = after.findings
    assert (finding.kind, finding.peer) == (Kind.CONTRADICTS, owner("anna").own.to_base58())
    assert {peer: credit.samples for peer, credit in after.credits.items()} == {
        peer: credit.samples for peer, credit in before.items()
    }


def test_an_owner_that_counts_a_round_twice_is_found(run):
    def twice(lines):
        place = where(map(to_line, lines))[3]
        return [*lines[: place + 1], lines[place], *lines[place + 1 :]]

    run.rewrite("anna", twice)
    assert kinds(run.audit()) == {Kind.TWO_ROUNDS}


def test_an_owner_that_says_two_things_of_one_round_is_found(run):
    def two_versions(lines):
        place = where(map(to_line, lines))[3]
        return [*lines[: place + 1], richer(lines[place], rename=True), *lines[place + 1 :]]

    run.rewrite("anna", two_versions)
    assert kinds(run.audit()) == {Kind.TWO_ROUNDS}


def test_rounds_that_two_peers_have_invented_together_leave_a_trace(run, capsys):
    """The two peers confirm each other. No line is false, but these steps had a group already."""
    run.start("anna", "ben")
    run.step, run.lineage = 3, b"invented lineage"
    for _ in range(2):
        run.update({"anna": 96, "ben": 96})
    run.close()
    found = run.audit()
    assert found.findings == []
    assert found.forked_steps == 2
    assert main(["verify", str(run.folder)]) == 0
    assert "At 2 steps there are confirmed updates of more than one group" in capsys.readouterr().out


def test_a_peer_that_was_not_in_a_group_cannot_confirm_it(run, tmp_path):
    run.start("dora")
    group = run.update()
    run.note("dora", group)
    run.close()
    found = run.audit()
    assert kinds(found) == {Kind.NOT_IN_GROUP}
    assert owner("dora").own.to_base58() not in found.credits


def test_an_owner_that_shows_two_histories_is_found(run, tmp_path):
    shutil.copytree(run.folder, tmp_path / "copy")
    run.start("anna")
    for _ in range(3):
        run.update(written_by=["anna"])
    run.close()
    assert run.audit(tmp_path / "copy").findings == [], "one is only shorter"
    other = LedgerRun(tmp_path / "copy")
    other.lineage, other.step = run.lineage, run.step
    other.start("anna")
    other.update(written_by=["anna"])
    other.close()
    assert kinds(run.audit(tmp_path / "copy")) == {Kind.TWO_HISTORIES}


def test_an_owner_that_says_something_else_in_a_second_ledger_is_found(run, tmp_path):
    lines = [read_line(line) for line in run.lines("anna")]
    start = msgspec.structs.replace(lines[0], time=lines[0].time + 1)
    other = [
        start,
        *(msgspec.structs.replace(line, most=7) if isinstance(line, Update) else line for line in lines[1:]),
    ]
    (tmp_path / "ledger-1.jsonl").write_bytes(b"".join(line + b"\n" for line in signed_again(other, "anna")))
    assert Kind.TWO_VERSIONS in kinds(run.audit(tmp_path / "ledger-1.jsonl"))


def test_a_second_ledger_that_says_the_same_counts_once(run, tmp_path):
    """Such a peer has lost its folder, and found it again."""
    lines = [read_line(line) for line in run.lines("anna")]
    start = msgspec.structs.replace(lines[0], time=lines[0].time + 1)
    written = signed_again([start, *lines[1:]], "anna")
    (tmp_path / "ledger-1.jsonl").write_bytes(b"".join(line + b"\n" for line in written))
    before, after = run.audit(), run.audit(tmp_path / "ledger-1.jsonl")
    assert after.findings == []
    assert after.credits == before.credits


def test_a_line_of_another_run_is_found_even_if_its_owner_signs_it(run):
    def of_two_runs(lines):
        return [*lines[:4], msgspec.structs.replace(lines[0], run=key_prefix("numbers", "0123abcd")), *lines[4:]]

    run.rewrite("anna", of_two_runs)
    assert Kind.OTHER_RUN in kinds(run.audit())


# ---- a run with an organiser -----------------------------------------------------------------------------------------


@pytest.fixture
def organiser() -> Organiser:
    return Organiser("letters")


@pytest.fixture
def members(tmp_path, organiser) -> LedgerRun:
    """As `run`, but by invitation. The members have shown each other their certificates."""
    admissions = {name: organiser.admission(owner(name).own, name=name.title()) for name in NAMES}
    for here in admissions.values():
        for name, other in admissions.items():
            here.admit(other.show(b""), owner(name).own)
    run = LedgerRun(tmp_path / "letters", organiser_run(organiser), admissions)
    run.start(*NAMES)
    for _ in range(10):
        run.update()
    run.close()
    return run


def organiser_run(organiser: Organiser, name: str = "letters") -> str:
    return key_prefix(name, "0123abcd", organiser.authority.organiser, begun=1_760_000_000)


def test_credit_goes_to_members(members):
    found = members.audit()
    assert found.findings == []
    assert [(member["name"], member["samples"], member["updates"]) for member in found.members] == [
        (name.title(), 10 * SAMPLES[name], 10) for name in NAMES
    ]
    assert found.as_json()["members"] == found.members


def test_one_ledger_names_all_members(members):
    for name in ("ben", "cleo"):
        members.path(name).unlink()
    found = members.audit()
    assert sorted(credit.name for credit in found.credits.values()) == ["Anna", "Ben", "Cleo"]
    assert found.updates["unconfirmed"] == 10, "one of three is not enough"


def test_a_member_that_has_made_no_update_yet_is_no_stranger(members, organiser):
    members.admissions["dora"] = organiser.admission(owner("dora").own, name="Dora")
    members.start("dora")
    assert members.audit().findings == []
    members.write("dora", signed_again([read_line(members.lines("dora")[0])], "dora", members.run))
    assert members.audit().findings == [], "nor before it has shown its certificate"


def test_a_removed_member_keeps_what_it_gave(members, organiser):
    before = members.audit().credits
    list_of_removed = organiser.remove(members.admissions["cleo"])
    for name in ("anna", "ben"):
        members.admissions[name].lists.take(REMOVED, list_of_removed)
    members.start("anna", "ben")
    members.update({"anna": 96, "ben": 64})
    members.close()
    after = members.audit()
    assert after.findings == []
    assert after.credits[owner("cleo").own.to_base58()] == before[owner("cleo").own.to_base58()]


def test_a_peer_that_is_no_member_cannot_confirm_updates(members, organiser):
    members.admissions["dora"] = organiser.admission(owner("dora").own)
    members.start("dora")
    members.update({"anna": 96, "dora": 1000})
    members.close()
    lines = [line for line in members.lines("dora") if not isinstance(read_line(line), Certified)]
    members.write("dora", signed_again(map(read_line, lines), "dora", members.run))
    members.write("anna", [line for line in members.lines("anna")][:-3])
    found = members.audit()
    assert kinds(found) == {Kind.UNKNOWN_PEER}
    assert owner("dora").own.to_base58() not in found.credits


def certified(run: LedgerRun, name: str) -> int:
    """Number of certificates in this peer's ledger."""
    return sum(isinstance(read_line(line), Certified) for line in run.lines(name))


def test_a_member_that_renews_all_the_time_fills_no_other_ledger(members, organiser):
    here, ben = members.admissions["anna"], owner("ben").own
    members.start("anna")
    members.update(written_by=["anna"])
    before = certified(members, "anna")
    for hour in range(1, 24):  # of the 48 hours of each certificate
        times = {"begin": 3600 * hour - DAY_SECONDS, "end": 3600 * hour + DAY_SECONDS}
        here.admit(organiser.admission(ben, name="Ben", **times).show(b""), ben)
        members.update(written_by=["anna"])
    assert certified(members, "anna") == before + 1, "after a quarter of its time"


def test_a_certificate_for_which_there_was_no_room_is_written_later(members, organiser):
    dora, path = owner("dora").own, members.path("anna")
    members.start("anna")
    members.admissions["anna"].admit(organiser.admission(dora, name="Dora").show(b""), dora)
    before, aside = certified(members, "anna"), path.with_name("aside")
    path.rename(aside)
    path.mkdir()  # nothing can be written there, even by root
    members.update({"anna": 96, "dora": 32}, written_by=["anna"])
    path.rmdir()
    aside.rename(path)
    members.update({"anna": 96, "dora": 32}, written_by=["anna"])
    assert certified(members, "anna") == before + 1
    members.close()
    assert {credit.name for credit in members.audit().credits.values()} == {"Anna", "Ben", "Cleo", "Dora"}


def test_a_certificate_that_another_key_has_signed_is_found(members):
    forged = Organiser("letters").certificate(owner("dora").own)

    def with_it(lines):
        return [*lines[:2], Certified(0, b"", forged), *lines[2:]]

    members.rewrite("anna", with_it)
    assert kinds(members.audit()) == {Kind.FALSE_CERTIFICATE}


def test_a_certificate_of_another_run_of_the_same_organiser_is_found(members, organiser):
    other = Organiser("numbers")
    other.signer = organiser.signer

    def with_it(lines):
        return [*lines[:2], Certified(0, b"", other.certificate(owner("dora").own)), *lines[2:]]

    members.rewrite("anna", with_it)
    assert kinds(members.audit()) == {Kind.FALSE_CERTIFICATE}


# ---- impossible arguments --------------------------------------------------------------------------------------------


def test_ledgers_of_two_runs_are_refused(run, members, tmp_path, capsys):
    other = LedgerRun(tmp_path / "numbers", key_prefix("numbers", "0123abcd"))
    other.start("anna")
    assert main(["verify", str(tmp_path)]) == 2
    assert "several runs" in capsys.readouterr().err


def test_the_ledger_of_an_earlier_run_that_was_set_aside_is_left_out_of_a_folder(tmp_path, capsys):
    """A run was begun anew in the same folder: each peer keeps its ledger of before under another name."""
    for run_id in ("letters", "numbers"):
        run = LedgerRun(tmp_path, key_prefix(run_id, "0123abcd"))
        run.start("anna")
        run.update({"anna": 3})
        run.close()
    assert run.path("anna").with_name("ledger-1.jsonl").exists()
    assert main(["verify", str(tmp_path)]) == 0
    assert "numbers" in capsys.readouterr().out


@pytest.mark.parametrize("of_a_stranger", ["x\x1b[2J\x1b[1;31mall is well", "letters-0123abcd\n", "letters", ""])
def test_a_strangers_name_of_its_run_moves_no_terminal(of_a_stranger, tmp_path, capsys):
    """Neither does the name of a folder that the stranger hands over."""
    LedgerRun(tmp_path, run=of_a_stranger).start("\x1b]0;anna\x07")
    LedgerRun(tmp_path).start("ben")
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert not {*said.out, *said.err} & {"\x1b", "\x07"}
    assert "]0;anna/ledger.jsonl, line 1: it is not a ledger line" in said.err
    assert f"run {RUN}" in said.out


def test_the_ledger_of_another_run_is_refused(run):
    with pytest.raises(InputError, match="another run"):
        audit([run.folder], "numbers")
    assert audit([run.folder], "letters").updates["confirmed"] == 10
    with pytest.raises(InputError, match="another run"):
        audit([run.folder], "letters", bytes(32))


@pytest.mark.parametrize("given", [[], ["no-such-file"], ["empty"]])
def test_where_there_is_no_ledger_one_sentence_says_so(tmp_path, monkeypatch, capsys, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["verify", *given]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["fetch"], "No address was given: swarm ledger fetch ADDRESS"),
        (["fetch", "nonsense"], "nonsense"),
        (["verify", ".", "--of", "nonsense"], "no join line"),
        (["fetch", "swarm://damaged"], "cut or changed"),
        (
            ["fetch", ADDRESS, "--to", "file/ledger"],
            "file/ledger cannot be written (Not a directory): name another --to.",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(arguments, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INITIAL_PEERS", raising=False)
    (tmp_path / "file").touch()
    assert main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert why in error


def test_a_claim_far_beyond_everything_counts_for_two_updates(run, capsys):
    run.start(*NAMES)
    run.update({"anna": 10**9, "ben": 64, "cleo": 32}, loss=1e308)
    run.close()
    found = run.audit()
    assert found.findings == []
    assert found.credits[owner("anna").own.to_base58()].samples == 10 * 96 + 2 * 96
    assert main(["verify", str(run.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["updates"]["confirmed"] == 11


def test_written_lines_are_read_back_unchanged(run):
    for line in run.lines("anna"):
        assert to_line(read_line(line)) == line
    first = read_line(run.lines("anna")[0])
    assert isinstance(first, Start)
    assert first.peer == owner("anna").own
    assert read_line(run.lines("anna")[1]).before == digest_of(run.lines("anna")[0])
