"""A run by invitation from the command line: peers are admitted, refused, readmitted, and go on without organiser."""

import re
import signal
from pathlib import Path

import pytest

from swarm.cli import identity
from swarm.enrolment.join_line import JoinLine
from swarm.enrolment.organiser_folder import OrganiserFolder
from swarm.ledger.audit import audit
from swarm.network.signed_records import prepare_identity
from swarm.protocol.certificates import EVERYTHING
from swarm.runtime.processes import kill
from tests.helpers.cli import PACED, START_SECONDS, TINY, PeerProgram, Program, reaping

pytestmark = pytest.mark.timeout(300)
OWN = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
ENDLESS = ["--total-steps", "100000", "--validate-every-steps", "100000", *TINY]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The organiser's peer, which trains without end, and the line that it prints."""
    folder = tmp_path_factory.mktemp("invited")
    with reaping() as programs:
        given = ["--by-invitation", "--invite", "1", "--run-id", "live", *ENDLESS, *OWN]
        programs.append(first := PeerProgram(folder, "live", "first", *given, **PACED))
        line = first.wait_until(lambda: re.search(r"swarm://\S+", first.output), "it prints a join line")[0]
        yield first, line, OrganiserFolder(folder, "live"), programs


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda line: line[:-7], "cut or changed on its way"),
        (lambda line: line[:40] + ("B" if line[40] == "A" else "A") + line[41:], "cut or changed on its way"),
        (lambda line: "swarm://", "cut or changed on its way"),
    ],
)
def test_a_damaged_line_is_refused(run, refused, change, says):
    assert says in refused("--initial-peers", change(run[1]))


def test_a_line_of_another_run_than_the_one_that_is_named_is_refused(run, refused):
    assert "is of run live, and --run-id says night-2" in refused("--initial-peers", run[1], "--run-id", "night-2")


def test_a_certificate_without_a_line_or_that_cannot_be_read_is_refused(run, refused):
    assert "--certificate goes with a join line" in refused("--certificate", "AAAA", *OWN)
    assert "The --certificate cannot be read" in refused("--initial-peers", run[1], "--certificate", "AAAA")


def test_the_organisers_peer_has_to_be_reachable(refused):
    said = refused("--by-invitation", "--run-id", "mine", "--client-mode", *TINY)
    assert "The organiser's peer has to be one that others can call" in said


def move(old: Path, new: Path, capsys, monkeypatch) -> str:
    """Move Ada's identity to another folder; returns the line with which she joins from there."""
    monkeypatch.setenv("SWARM_KEY_PASSPHRASE", "correct horse")
    assert identity.main(["export", str(new / "ada.backup"), "--output-dir", str(old), "--public-name", "ada"]) == 0
    assert identity.main(["import", str(new / "ada.backup"), "--output-dir", str(new / "runs")]) == 0
    return re.search(r"swarm join (swarm://\S+) --public-name ada", capsys.readouterr().out)[1]


def test_a_running_peer_keeps_its_identity(run, tmp_path, refused, capsys, monkeypatch):
    monkeypatch.setenv("SWARM_KEY_PASSPHRASE", "correct horse")
    prepare_identity(tmp_path / "identities" / "first.key")
    assert identity.main(["export", str(tmp_path / "other"), "--output-dir", str(tmp_path)]) == 0
    output_dir = run[0].folder.path.parent.parent
    assert identity.main(["import", str(tmp_path / "other"), "--output-dir", str(output_dir), "--overwrite"]) == 2
    assert "A running peer uses" in capsys.readouterr().err


def test_a_member_is_let_in_once_and_comes_back_and_goes_on_without_the_organiser(
    run, refused, tmp_path, tmp_path_factory, capsys, monkeypatch
):
    first, line, organiser, programs = run
    assert "One person can join with this line" in first.output
    programs.append(ada := PeerProgram(tmp_path, "live", "ada", "--initial-peers", line, *OWN, **PACED))
    ada.wait_for_contribution()
    assert [member.name for member in organiser.registry.members()] == ["first", "ada"]

    said = refused("--initial-peers", line, "--public-name", "eve")
    assert "this invitation has been used up: ask the organiser for a new join line" in said
    said = refused("--initial-peers", first.address, "--public-name", "eve", *OWN)
    assert "Run live is by invitation: ask its organiser for a join line" in said

    ada.process.send_signal(signal.SIGINT)
    assert ada.wait(60) == 0, ada.output
    programs.append(ada := PeerProgram(tmp_path, "live", "ada", "--resume", *OWN, **PACED))
    ada.wait_for_contribution()
    assert len(organiser.registry.members()) == 2
    fetched = tmp_path / "fetched"
    programs.append(fetch := Program("swarm", ["ledger", "fetch", line, "--to", str(fetched)], tmp_path / "fetch.log"))
    assert fetch.wait(START_SECONDS) == 0, "a stranger may have the ledgers, too: " + fetch.output
    assert {path.name.partition("-")[0] for path in fetched.rglob("*.jsonl")} == {first.peer_id, ada.peer_id}

    ada.process.send_signal(signal.SIGINT)
    assert ada.wait(60) == 0, ada.output
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    line = move(tmp_path, elsewhere, capsys, monkeypatch)
    programs.append(ada := PeerProgram(elsewhere / "runs", "live", "ada", "--initial-peers", line, *OWN, **PACED))
    ada.wait_for_contribution()
    assert [member.name for member in organiser.registry.members()] == ["first", "ada"], "the same one, from elsewhere"

    invited = str(organiser.join_line(organiser.registry.invite("ben", 1, 1, EVERYTHING)))
    kill(first.alive())
    before = ada.status.step
    ada.wait_until(lambda: ada.status.step >= before + 3, "it goes on alone")
    said = refused("--initial-peers", invited.replace("swarm://", "swarm:// "), "--public-name", "ben")
    assert "None of these peers can be reached" in said or "The enrolment server does not answer" in said

    ada.process.send_signal(signal.SIGINT)
    assert ada.wait(60) == 0, ada.output
    found = audit([first.folder.path, tmp_path, ada.folder.path], "live", JoinLine.parse(line).organiser)
    assert found.findings == [], "of ada there are two ledgers, and a copy of one"
    assert found.updates["confirmed"] > 0
    assert {member["name"] for member in found.members if member["samples"]} == {"first", "ada"}
    names = {credit.name for credit in audit([ada.folder.path]).credits.values()}
    assert names == {"first", "ada"}, "each keeps the certificates of the others"
