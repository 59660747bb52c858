"""What a peer costs beside the training: how it is measured, and how the report shows it."""

import contextlib
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from analysis.endurance import footprint
from analysis.endurance.footprint import FootprintOptions
from analysis.reporting.fault_sections import footprint_section
from tests.helpers.cli import Program, reaping

pytestmark = pytest.mark.timeout(400)

ENVIRONMENT = {"started_at": "today", "git_commit": "abc", "cores": 2, "cpu": "a CPU", "memory_gib": 23.5}


@pytest.mark.long
def test_a_peer_beside_a_plain_process(tmp_path):
    tiny = ["--recipe", "digits", "--target-batch-size", "256", "--samples-per-second", "200", "--batch-size", "32"]
    with reaping() as programs:
        options = [*tiny, "--seconds", "2", "--repeat", "2", "--output-dir", str(tmp_path), "--averaging", "local"]
        programs.append(program := Program("analysis", ["footprint", *options], tmp_path / "log"))
        assert program.wait(300) == 0, program.output
    found = json.loads((tmp_path / "footprint-2.json").read_text())
    assert found["peer_options"] == ["--averaging", "local"]
    assert found["environment"]["git_commit"]
    assert str(tmp_path) not in json.dumps(found)
    rows = {row["process"]: row for row in found["rows"]}
    assert list(rows)[-3:] == ["all", "plain process", "beside the training"]
    assert rows.keys() >= {"training", "DHT", "p2pd", "averaging"}
    for figure in ("cores", "mb"):
        own = [row[figure] for name, row in list(rows.items())[:-3]]
        assert sum(own) == pytest.approx(rows["all"][figure])
        assert rows["all"][figure] - rows["plain process"][figure] == pytest.approx(rows["beside the training"][figure])
    assert 0 < rows["plain process"]["cores"] < 1.5
    for name in ("plain process", "all"):  # a peer imports less than the plain process, and may well take less
        assert 100 < rows[name]["mb"] < 2000
    (tmp_path / "report").mkdir()
    section = footprint_section(tmp_path / "footprint-2.json", tmp_path / "report")
    assert len(section["tables"][0][1]) == len(rows)
    assert (tmp_path / "report" / "footprint-2.json").exists()


class FakeProcess:
    """A process with some processor seconds and megabytes."""

    def __init__(self, cpu_seconds: float = 0.0, megabytes: float = 0.0) -> None:
        self.cpu_seconds, self.megabytes = cpu_seconds, megabytes

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.cpu_seconds, system=0.0)

    def memory_maps(self, grouped: bool) -> list[SimpleNamespace]:
        return [SimpleNamespace(path="[heap]", pss=self.megabytes * 1e6)]


class FakePeer:
    """A peer whose processes change while it is measured.

    Args:
        looks: its processes at the beginning and the end of each window.
    """

    def __init__(self, *looks: dict[str, FakeProcess]) -> None:
        self.looks = iter(looks)

    def children(self) -> list[str]:
        return ["a process"]


def test_processes_that_are_not_always_there_count_where_they_are(tmp_path, monkeypatch):
    """In the first of two windows the first peer starts git, which has ended in the second window."""
    old, new = {"training": FakeProcess(10.0, 100.0)}, {"training": FakeProcess(14.0, 100.0)}
    git = {"git": FakeProcess(2.0, 50.0)}
    peers = [FakePeer(old, new | git, old, new), FakePeer(old, new, old, new)]
    processes = {1: SimpleNamespace(children=lambda: peers), 2: FakePeer(old, old, old, old)}
    pids = iter(processes)
    clock = iter([0.0, 0.0, 1.0, 1.0, 2.0])
    monkeypatch.setattr(footprint, "started", lambda *_: contextlib.nullcontext(SimpleNamespace(pid=next(pids))))
    monkeypatch.setattr(footprint, "steps_done", lambda folder: 99)
    monkeypatch.setattr(footprint, "has_ended", lambda process, seconds: False)
    monkeypatch.setattr(footprint, "parts", lambda peer: next(peer.looks).items())
    monkeypatch.setattr(footprint, "psutil", SimpleNamespace(Process=processes.get, NoSuchProcess=ProcessLookupError))
    monkeypatch.setattr(footprint, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = footprint.measure(FootprintOptions(repeat=2, output_dir=tmp_path), [], Console(quiet=True))
    rows = {row["process"]: (row["cores"], row["mb"]) for row in found["rows"]}
    assert rows == {
        "training": (4.0, 100.0),
        "git": (0.5, 12.5),
        "all": (4.5, 112.5),
        "plain process": (0.0, 100.0),
        "beside the training": (4.5, 12.5),
    }
    assert list(rows)[-3:] == ["all", "plain process", "beside the training"]


def test_windows_of_one_run_have_no_interval(tmp_path):
    options = {"peers": 2, "samples_per_second": 40.0, "target_batch_size": 1024, "repeat": 3, "seconds": 45.0}
    older = {"process": "all", "cores": 0.166, "cores_half_width": 0.009, "mb": 1308.0, "mb_half_width": 45.0, "n": 3}
    spans = {"cores_least": 0.16, "cores_most": 0.17, "mb_least": 1290.0, "mb_most": 1330.0}
    newer = {"process": "all", "cores": 0.166, "mb": 1308.0, "windows": 3} | spans
    shown, said = [], []
    for row in (older, newer):
        file = tmp_path / "footprint-2.json"
        environment = {"environment": ENVIRONMENT} if row is newer else {}
        file.write_text(json.dumps({"options": options, "peer_options": [], "rows": [row]} | environment))
        (tmp_path / "report").mkdir(exist_ok=True)
        section = footprint_section(file, tmp_path / "report")
        assert "Windows are no repetitions" in section["text"][0]
        said.append(section["text"][1])
        shown += section["tables"][0][1].to_numpy().tolist()
    assert shown == [["all", "0.166", "1308"], ["all", "0.166 (0.160 to 0.170)", "1308 (1290 to 1330)"]]
    assert said == ["Commit and machine were not recorded.", "Begun today, commit abc, on 2 cores of a CPU, 23.5 GiB."]


@pytest.mark.parametrize("bad", [["--peers", "0"], ["--seconds", "0"], ["--recipe", "nothing"], ["--nonsense", "1"]])
def test_what_cannot_work_is_refused(bad, tmp_path, capsys):
    assert footprint.main([*bad, "--output-dir", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err
