"""What `swarm doctor` says of a run, without a swarm."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from recipe.presets import preset
from recipe.run_folder import RunFolder
from swarm.cli import doctor, probe
from swarm.cli.checks import Check
from swarm.cli.probe import ProbeResult
from swarm.enrolment.join_line import JoinLine
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from swarm.runtime.threads import POLICY, SPINS
from tests.helpers.records import RECORD

ADDRESS = "/ip6/2001:db8::1/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture(autouse=True)
def a_swarm_that_is_well(monkeypatch):
    monkeypatch.setattr(doctor, "machine_checks", lambda *_: [Check("machine", "ok", "")])
    monkeypatch.setattr(doctor, "reachable", lambda *_: None)
    monkeypatch.setattr(probe, "probe", lambda address: ProbeResult(address, None))
    monkeypatch.setattr(doctor, "check_inbound", lambda *_: Check("inbound port", "ok", ""))
    monkeypatch.setattr(doctor, "check_run", lambda *_: iter(()))
    monkeypatch.setattr(doctor, "connects", lambda *_: None)
    monkeypatch.setenv(SPINS, "1")  # so that pytest puts it back afterwards


def test_it_measures_as_a_peer_does(monkeypatch):
    """Otherwise threads that wait for each other look slow where anything else computes on the same cores."""

    def checks(_options):
        yield Check("threads", "ok", os.environ[SPINS])

    monkeypatch.setattr(doctor, "diagnose", checks)
    monkeypatch.delenv(SPINS)
    monkeypatch.delenv(POLICY, raising=False)
    said: list[str] = []
    assert doctor.main(["--json"], said.append) == 0
    assert '"found": "2000"' in said[0]


def test_the_doctor_sets_the_variable_before_torch_is_imported():
    """torch reads the variable when it is imported."""
    program = "import sys, swarm.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_doctor_shows_an_enrolment_server_with_an_ipv6_address():
    line = JoinLine("run", bytes(32), (ADDRESS,), bytes(16), 31338, bytes(16))
    found = {check.name: check.found for check in doctor.diagnose(doctor.DoctorOptions(addresses=(str(line),)))}
    assert found["enrolment"] == "answers at [2001:db8::1]:31338"


@pytest.mark.parametrize(
    ("token", "is_member", "joins"),
    [(bytes(16), False, False), (bytes(16), True, True), (b"", False, True)],
    ids=["newcomer", "member", "with a certificate"],
)
def test_a_newcomer_cannot_join_where_no_enrolment_server_answers(
    monkeypatch, tmp_path, capsys, token, is_member, joins
):
    monkeypatch.setattr(doctor, "connects", lambda *_: "timed out")
    line = JoinLine("run", bytes(32), (ADDRESS,), token, 31338, bytes(16))
    if is_member:
        RunFolder.create(tmp_path, "run", "ada").membership.touch()
    assert doctor.main([str(line), "--output-dir", str(tmp_path)]) == (0 if joins else 1)
    assert ("This machine can join." in capsys.readouterr().out) == joins


@pytest.mark.parametrize("where", ["variable", "option", "nowhere"])
def test_what_was_checked_is_said_wherever_the_address_came_from(monkeypatch, capsys, where):
    monkeypatch.delenv("INITIAL_PEERS", raising=False)
    if where == "variable":
        monkeypatch.setenv("INITIAL_PEERS", ADDRESS)
    assert doctor.main(["--initial-peers", ADDRESS] if where == "option" else []) == 0
    said = capsys.readouterr().out
    assert ("This machine can join." in said) == (where != "nowhere")
    assert ("To check the connection to a swarm" in said) == (where == "nowhere")


@pytest.mark.parametrize("fragments", [1, 4])
def test_an_update_costs_what_one_fragment_takes(fragments, monkeypatch):
    monkeypatch.setattr(probe, "progress_records", lambda *_: {"anna": RECORD})
    recipe = replace(preset("digits"), averaging="local", codec="none", fragments=fragments)
    traffic = probe.expected_traffic(None, RunManifest(PROTOCOL, "run", recipe), [(100, 40)])
    assert traffic.bytes_per_update == 4 * 4000 / fragments, "two server-mode peers send each other half of it twice"
