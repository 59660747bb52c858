"""What a peer costs beside the training: how it is measured, and what the report makes of it."""

import json

import pytest

from analysis.endurance import footprint
from analysis.reporting.fault_sections import footprint_section
from tests.helpers.cli import Program, reaping

pytestmark = pytest.mark.timeout(400)


@pytest.mark.long
def test_a_peer_beside_a_plain_process(tmp_path):
    tiny = ["--recipe", "digits", "--target-batch-size", "256", "--samples-per-second", "200", "--batch-size", "32"]
    with reaping() as programs:
        options = [*tiny, "--seconds", "2", "--repeat", "2", "--output-dir", str(tmp_path), "--averaging", "local"]
        programs.append(program := Program("analysis", ["footprint", *options], tmp_path / "log"))
        assert program.wait(300) == 0, program.output
    found = json.loads((tmp_path / "footprint-2.json").read_text())
    assert found["peer_options"] == ["--averaging", "local"]
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


@pytest.mark.parametrize("bad", [["--peers", "0"], ["--seconds", "0"], ["--recipe", "nothing"], ["--nonsense", "1"]])
def test_what_cannot_work_is_refused(bad, tmp_path, capsys):
    assert footprint.main([*bad, "--output-dir", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err
