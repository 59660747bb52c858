"""The lab: measurements agree with its settings, and nothing of it is left, however it ends."""

import os
import re
import signal
import struct
import subprocess
import sys

import psutil
import pytest

from analysis.wan import sandbox
from analysis.wan.router import Pipe, Route
from analysis.wan.segments import IP, VNET, part, wire_size
from analysis.wan.topology import Path as NetPath
from analysis.wan.topology import Topology, load, shipped_names, uniform
from recipe.errors import InputError
from swarm.runtime.processes import kill
from tests.helpers.cli import wait_until
from tests.helpers.namespaces import needs_namespaces
from tests.helpers.paths import ROOT


def wan(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "analysis", "wan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, **options)


# ---- topologies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_topologies_load(name):
    topology = load(name).with_hosts(6)
    assert [host.name for host in topology.hosts] == ["h1", "h2", "h3", "h4", "h5", "h6"]
    assert Topology.from_json(topology.to_json()) == topology


def test_continents_are_as_far_apart_as_they_were_measured():
    continents = load("continents")
    eu, asia = continents.hosts[1], continents.hosts[2]
    assert continents.path(eu, asia).delay_ms + continents.path(asia, eu).delay_ms == pytest.approx(253.1)
    assert continents.path(asia, eu).bandwidth_mbps == 80


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[hosts]]\nspeed = 3", "unknown entry speed"),
        ('[[hosts]]\nregion = "A"\n[[paths]]\nbetween = ["A", "B"]\nrtt_ms = 3', "no host is in region B"),
        ("[[hosts]]\nup_mbps = -1", "up_mbps of host h1 is -1"),
        ('[[hosts]]\n[[paths]]\nto = "here"\ndelay_ms = 3', "a path needs between"),
        ('[[hosts]]\nregion = "A"\n[[paths]]\nbetween = ["A"]\nrtt_ms = 3', "a path has between = ['A']"),
        ("[[hosts]\n", "is no TOML"),
        ("", "has 0 hosts"),
    ],
)
def test_a_topology_that_cannot_work_is_refused_in_one_sentence(tmp_path, text, problem):
    file = tmp_path / "net.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=re.escape(problem)):
        load(str(file))


# ---- the router's parts ---------------------------------------------------------------------------------------------


def test_a_pipe_sends_one_packet_after_another_and_drops_what_would_wait_too_long():
    pipe = Pipe(mbps=8, queue_ms=2)  # a microsecond a byte
    assert pipe.send(0, 1000) == 1_000_000
    assert pipe.send(0, 1000) == 2_000_000
    assert pipe.send(0, 1000) == 3_000_000
    assert pipe.send(0, 1000) is None, "it would have to wait 3 ms"
    assert pipe.send(2_500_000, 1000) == 4_000_000


def test_losses_are_as_frequent_as_set_and_packets_stay_in_order():
    route = Route(NetPath(delay_ms=10, jitter_ms=5, loss=0.01), queue_ms=100, seed=1)
    lost = sum(len(route.lost(44)) for _ in range(5_000))
    assert lost == pytest.approx(0.01 * 44 * 5_000, rel=0.1)
    arrivals = [route.arrival(now * 100_000) for now in range(1000)]
    assert arrivals == sorted(arrivals)


def test_parts_of_a_large_packet_are_the_segments_that_the_kernel_would_send():
    payload = bytes(range(250)) * 10
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 40 + len(payload), 7, 0, 64, 6, 0, b"\x0a\x4d\0\1", b"\x0a\x4d\0\2")
    tcp = struct.pack(">HHIIBBHHH", 1, 2, 1000, 5, 0x50, 0x19, 100, 0, 0)  # FIN, PSH and ACK
    frame = VNET.pack(1, 1, 54, 1000, 34, 16) + bytes(12) + b"\x08\0" + ip + tcp + payload
    assert wire_size(frame) == (3, 40 + 2500 + 2 * 40)
    first, last = part(frame, 0, 2), part(frame, 2, 3)
    assert VNET.unpack_from(first)[3] == 1000, "still two segments"
    assert VNET.unpack_from(last)[1:4:2] == (0, 0), "one segment is an ordinary packet"
    assert first[IP + 40 :] + last[IP + 40 :] == payload
    assert struct.unpack_from(">I", last, IP + 24)[0] == 3000
    assert (first[IP + 33], last[IP + 33]) == (0x10, 0x19), "FIN and PSH belong to the end"
    for piece in (first, last):
        header = struct.unpack(">10H", piece[IP : IP + 20])
        assert header[1] == len(piece) - IP
        assert sum(header) % 0xFFFF == 0, "the IP checksum is right"


# ---- the lab itself -------------------------------------------------------------------------------------------------


@needs_namespaces
def test_every_host_runs_the_command_with_its_own_values():
    done = wan("run", "--hosts", "2", "--", "echo", "{host} {address} {number} {first_address}")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["h1 | h1 10.77.0.1 1 10.77.0.1", "h2 | h2 10.77.0.2 2 10.77.0.1"]
    assert wan("run", "--hosts", "2", "--", "sh", "-c", "test {number} = 1").returncode == 1, "h2 fails"


TRIES = 3
"""Attempts of a measurement: a machine that is busy with something else makes a line slower, and never faster."""
PROBE = "import analysis.wan.probes as p; print(p.ping('10.77.0.1', 40, 20)['median_ms'])"


@needs_namespaces
@pytest.mark.parametrize("rtt_ms", [0, 100])
def test_round_trip_times_are_as_set(rtt_ms):
    link = ["--hosts", "2", "--rtt-ms", str(rtt_ms), "--bandwidth-mbps", "100"]
    measured = []
    while len(measured) < TRIES and not (measured and min(measured) < rtt_ms + 3):
        done = wan("run", *link, "--", sys.executable, "-c", PROBE)
        assert done.returncode == 0, done.stderr
        measured += [float(line.split("|")[1]) for line in done.stdout.splitlines() if line.startswith("h2")]
    assert rtt_ms - 1 < min(measured) < rtt_ms + 3, "within 1 ms on an idle machine"


TRANSFER = """
import hashlib, os, random, socket, struct, sys, time
data = random.Random(1).randbytes(3_000_000)
if sys.argv[1] == "1":
    with socket.create_server(("", 5000)) as server:
        connection, _ = server.accept()
    begin, received = time.monotonic(), b""
    while part := connection.recv(1 << 20):
        received += part
    assert received == data, "TCP repairs what is lost"
    print(len(data) * 8 / (time.monotonic() - begin) / 1e6)
else:
    for _ in range(100):
        try:
            connection = socket.create_connection(("10.77.0.1", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # until the other side has everything and closes
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    print(struct.unpack("I", information[100:])[0])  # tcpi_total_retrans
"""


@needs_namespaces
@pytest.mark.parametrize("loss", ["0", "0.01"])
def test_transfers_arrive_whole_at_the_rate_of_the_link(loss):
    """It has 2,072 segments. Whether TCP slows down after losses depends on the kernel's congestion control."""
    link = ["--hosts", "2", "--rtt-ms", "4", "--bandwidth-mbps", "20", "--loss", loss]
    for _ in range(TRIES):
        done = wan("run", *link, "--", sys.executable, "-c", TRANSFER, "{number}")
        assert done.returncode == 0, done.stdout
        rate, sent_again = (float(line.split("|")[1]) for line in sorted(done.stdout.splitlines()) if "|" in line)
        assert rate < 20
        if loss != "0" or rate > 16:
            break
    if loss == "0":
        assert rate > 16, "on an idle machine 19"
    else:
        assert sent_again >= 5


@needs_namespaces
@pytest.mark.parametrize("to_all", [False, True], ids=["SIGKILL", "SIGTERM to all, as timeout and systemd send it"])
def test_nothing_is_left_after(to_all):
    lab = subprocess.Popen(
        [sys.executable, "-m", "analysis", "wan", "run", "--hosts", "2", "--", *SLEEP], cwd=ROOT, start_new_session=True
    )
    try:
        wait_until(lambda: len(sleeping()) == 2, 60, "both hosts sleep")
        if to_all:
            os.killpg(lab.pid, signal.SIGTERM)
        else:
            os.kill(lab.pid, signal.SIGKILL)
        lab.wait(20)
        wait_until(lambda: not sleeping(), 20, "the hosts' programs go with the lab")
    finally:
        lab.kill()
        lab.wait(20)
        kill(sleeping())


SLEEP = ["sleep", str(10**9 + os.getpid())]
"""No other program sleeps for so long."""


def sleeping() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == SLEEP]


@needs_namespaces
def test_works_through_a_user_namespace(monkeypatch):
    """Without root privileges, this process may not make namespaces directly."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    try:
        command = sandbox.wrapped([sys.executable, "-m", "analysis", "wan", "run", "--hosts", "2", "--", "true"])
    except InputError as error:
        pytest.skip(str(error))
    assert "--map-root-user" in command
    assert subprocess.run(command, env=sandbox.environment(), cwd=ROOT, timeout=30).returncode == 0


_HOME = """
import sys
from pathlib import Path
from analysis.wan.check import HOME_DOWN, HOME_DOWN_MBPS, HOME_UP, HOME_UP_MBPS, Row, measure
rows = [Row(20, HOME_DOWN_MBPS, link=HOME_DOWN), Row(20, HOME_UP_MBPS, link=HOME_UP)]
for row in measure(rows, Path(sys.argv[1]), "router", None, 1.5):
    print(row.goodput_mbps / row.bandwidth_mbps)
"""


@needs_namespaces
def test_a_link_at_home_has_two_rates_and_two_senders_share_one_of_them(tmp_path):
    command = sandbox.wrapped([sys.executable, "-c", _HOME, str(tmp_path)])
    done = subprocess.run(command, env=sandbox.environment(), cwd=ROOT, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(0.5 < float(share) <= 1.0 for share in done.stdout.split()), done.stdout
    assert len(done.stdout.split()) == 2


_AFTER_A_FAILURE = """
import sys
from pathlib import Path
from analysis.wan.lab import Lab
from analysis.wan.topology import uniform
from recipe.errors import InputError
try:
    with Lab(uniform(2, 0, 100), Path(sys.argv[1]), congestion_control="nonsense"):
        pass
except InputError:
    with Lab(uniform(2, 0, 100), Path(sys.argv[1])) as lab:
        sys.exit(lab.start(lab.hosts[0], ["true"]).wait())
sys.exit("it was not refused")
"""


@needs_namespaces
def test_a_lab_that_could_not_be_made_is_in_no_other_ones_way(tmp_path):
    command = sandbox.wrapped([sys.executable, "-c", _AFTER_A_FAILURE, str(tmp_path)])
    done = subprocess.run(command, env=sandbox.environment(), cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


_MOUNTS = """
import sys
from pathlib import Path
from analysis.wan.lab import Lab
from analysis.wan.topology import uniform
mounts = Path("/proc/self/mounts")
before = mounts.read_text()
with Lab(uniform(2, 0, 100), Path(sys.argv[1])) as lab:
    Path("/dev/shm/of-a-killed-process").touch()
    assert mounts.read_text() != before
assert mounts.read_text() == before, mounts.read_text()
assert not Path("/dev/shm/of-a-killed-process").exists()
"""


@needs_namespaces
def test_no_mount_of_a_lab_is_left(tmp_path):
    command = sandbox.wrapped([sys.executable, "-c", _MOUNTS, str(tmp_path)])
    done = subprocess.run(command, env=sandbox.environment(), cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_cannot_work_is_said_in_one_sentence():
    for arguments, problem in [
        (["run", "--hosts", "2"], "There is no command"),
        (["run", "--topology", "moon", "--", "true"], "There is no topology moon: give campus"),
        (["run", "--topology", "home", "--rtt-ms", "3", "--", "true"], "A topology has its own delays"),
        (["run", "--loss", "3", "--", "true"], "loss of a path is 3"),
    ]:
        done = wan(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert problem in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_uniform_network_is_symmetric():
    network = uniform(3, rtt_ms=100, bandwidth_mbps=50)
    assert {network.path(a, b).delay_ms for a in network.hosts for b in network.hosts} == {50}
