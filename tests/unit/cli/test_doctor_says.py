"""What `swarm doctor` says of a run, without a swarm."""

from swarm.cli import doctor
from swarm.cli.checks import Check
from swarm.cli.probe import ProbeResult
from swarm.enrolment.join_line import JoinLine

ADDRESS = "/ip6/2001:db8::1/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_an_enrolment_server_with_an_ipv6_address(monkeypatch):
    line = JoinLine("run", bytes(32), (ADDRESS,), bytes(16), 31338, bytes(16))
    monkeypatch.setattr(doctor, "machine_checks", lambda *_: [Check("machine", "ok", "")])
    monkeypatch.setattr(doctor, "_probed", lambda address: ProbeResult(address, None))
    monkeypatch.setattr(doctor, "_inbound", lambda *_: Check("inbound port", "ok", ""))
    monkeypatch.setattr(doctor, "_run", lambda *_: iter(()))
    monkeypatch.setattr(doctor, "connects", lambda *_: None)
    found = {check.name: check.found for check in doctor.diagnose(doctor.DoctorOptions(addresses=(str(line),)))}
    assert found["enrolment"] == "answers at [2001:db8::1]:31338"
