"""The doctor against a real DHT: what it finds, how it judges that, and what it tells a person to do."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from recipe.presets import preset
from swarm.cli import checks as checkup
from swarm.cli import doctor
from swarm.cli.checks import Check
from swarm.cli.probe import Traffic, vectors_sent
from swarm.membership.run_manifest import PROTOCOL, RunManifest, publish_manifest, read_manifests
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht, visible_addresses

pytestmark = pytest.mark.timeout(180)
STRANGER = "/ip4/127.0.0.1/tcp/{port}/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a node whose DHT knows two runs, one of them with images that no machine has."""
    pictures = replace(preset("synthetic"), dataset="imagefolder")
    dhts = [start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",)))]
    (first,) = visible_addresses(dhts[0])
    try:
        for run_id, recipe in (("letters", preset("digits")), ("pictures", pictures)):
            dhts.append(start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",), initial_peers=(first,))))
            assert publish_manifest(dhts[-1], RunManifest(PROTOCOL, run_id, recipe))
        yield first
    finally:
        for dht in reversed(dhts):
            stop_dht(dht)


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """Runs the doctor; returns the exit status and the checks by name."""
    monkeypatch.delenv("INITIAL_PEERS", raising=False)

    def run(*arguments: str) -> tuple[int, dict[str, Check]]:
        said: list[str] = []
        folders = ["--output-dir", str(tmp_path / "runs"), "--data-dir", str(tmp_path / "data")]
        status = doctor.main([*arguments, *folders, "--json"], say=said.append)
        report = json.loads("".join(said))
        assert report["can_join"] == (status == 0)
        checks = {check["name"]: Check(**check) for check in report["checks"]}
        assert all(check.fix for check in checks.values() if check.state != "ok"), checks
        return status, checks

    return run


def test_all_is_well(examine, address):
    status, checks = examine("--initial-peers", address, "--run-id", "letters")
    assert status == 0, checks
    assert list(checks) == [
        *("versions", "device", "memory", "open files", "disk", "addresses", "peer 127.0.0.1", "clock"),
        *("inbound port", "run manifest", "traffic", "micro-batch", "shared memory", "data"),
    ]
    assert "answers over TCP port" in checks["peer 127.0.0.1"].found
    assert "server-mode peer" in checks["inbound port"].found
    assert "run letters: vit_tiny_patch16_224 on digits" in checks["run manifest"].found
    assert "1,257 training samples" in checks["data"].found
    measured = checks["micro-batch"].found
    assert re.match(r"\d+ samples?, measured: \d+(\.\d+)? s each", measured), "32, and fewer on a busy machine"


def test_a_swarm_that_answers_slowly_ends_no_check(examine, address, monkeypatch):
    def slow(*_):
        raise TimeoutError

    monkeypatch.setattr("swarm.cli.probe.progress_records", slow)
    status, checks = examine("--initial-peers", address, "--run-id", "letters")
    assert status == 0, checks
    assert checks["traffic"].state == "warning"
    assert checks["data"].state == "ok"


def test_missing_images_are_found_before_joining(examine, address):
    status, checks = examine("--initial-peers", address, "--run-id", "pictures")
    assert status == 1
    assert checks["data"].state == "failed"
    assert "--data-dir" in checks["data"].fix


def test_several_runs_need_a_choice(examine, address):
    status, checks = examine("--initial-peers", address)
    assert status == 1
    assert "--run-id" in checks["run manifest"].found


def test_a_run_of_an_older_version_is_no_empty_swarm(examine, monkeypatch):
    monkeypatch.setattr("swarm.membership.run_manifest.read_manifests", partial(read_manifests, timeout_seconds=0.1))
    dhts = [start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",)))]
    try:
        (first,) = visible_addresses(dhts[0])
        dhts.append(start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",), initial_peers=(first,))))
        assert publish_manifest(dhts[0], RunManifest(PROTOCOL - 1, "letters", preset("digits")))
        status, checks = examine("--initial-peers", first)
    finally:
        for dht in reversed(dhts):
            stop_dht(dht)
    assert status == 1
    assert f"The run speaks protocol {PROTOCOL - 1}, this program {PROTOCOL}" in checks["run manifest"].found
    assert checks["run manifest"].fix == "do what the text says"


def test_a_peer_that_is_gone(examine):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        status, checks = examine("--initial-peers", STRANGER.format(port=unused.getsockname()[1]))
    assert status == 1
    assert "refused" in checks["peer 127.0.0.1"].found
    assert "run manifest" not in checks


def test_a_server_that_is_no_peer(examine):
    with socket.create_server(("127.0.0.1", 0)) as server:
        status, checks = examine("--initial-peers", STRANGER.format(port=server.getsockname()[1]))
    assert status == 1
    assert "no peer with this id" in checks["peer 127.0.0.1"].found


def test_a_malformed_address(examine):
    status, checks = examine("--initial-peers", "192.168.0.5:31337")
    assert status == 1
    assert "lacks the peer id" in checks["addresses"].found


def test_without_an_address_only_the_machine_is_looked_at(examine):
    status, checks = examine()
    assert status == 0
    assert checks["swarm"].state == "warning"


@pytest.mark.parametrize(
    ("ahead", "state", "found"),
    [(0.1, "ok", "0.10 s ahead of"), (-2.0, "warning", "2.00 s behind"), (100.0, "failed", "100.00 s ahead of")],
)
def test_clocks(ahead, state, found):
    check = doctor.clock_check(ahead)
    assert check.state == state
    assert found in check.found


@pytest.mark.parametrize(("parameters", "state"), [(0, "ok"), (10**7, "warning"), (10**9, "failed")])
def test_docker_s_64_mib_of_shared_memory_do_not_hold_every_model(parameters, state, monkeypatch):
    small = shutil.disk_usage("/")._replace(free=2 * 8 * 10**7)
    monkeypatch.setattr(checkup.shutil, "disk_usage", lambda _: small)
    check = checkup.check_shared_memory(parameters)
    assert check.state == state
    assert state == "ok" or "--shm-size" in check.fix


def test_traffic_is_counted_both_ways():
    assert vectors_sent(num_peers=10, num_full=10) == pytest.approx(1.8)
    assert vectors_sent(num_peers=10, num_full=1) == pytest.approx(9), "it averages for nine client-mode peers"
    assert vectors_sent(num_peers=1, num_full=1) == 0
    traffic = Traffic(num_peers=3, samples_per_second=512.0, updates_per_hour=3600.0, bytes_per_update=10**6)
    assert traffic.gigabytes_per_hour == pytest.approx(3.6)
    assert "up to 3.60 GB an hour each way" in str(traffic)
    assert "at the start" not in str(traffic)
    chosen = str(replace(traffic, is_chosen=True))
    assert chosen == f"{traffic}; that is at the start, and less where lines are slow"


def test_the_table_shows_what_to_do(capsys):
    doctor.wide_console().print(doctor.table([Check("disk", "failed", "0.1 GiB free in [x]", "free some space")]))
    assert "free some space" in capsys.readouterr().out
