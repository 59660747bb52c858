"""A peer's memory over many rounds: how it is measured, and how the report shows it."""

import json
import subprocess
import sys

import pytest

from analysis.endurance import memory
from analysis.reporting.fault_sections import memory_section
from tests.helpers.cli import Program, reaping

pytestmark = pytest.mark.timeout(400)


def test_growth_is_told_from_noise():
    def samples(growth: float) -> list[dict]:
        noise = [1.0, -1.0, 0.5, -0.5]
        return [
            {"step": n, "pss_mb": {"a": {"x": 100, "y": 200 + growth * n + noise[n // 10 % 4]}}, "rss_mb": {"a": {}}}
            for n in range(0, 2000, 10)
        ]

    for growth in (0.0, 0.02):
        assert memory.trend(samples(growth), "a", "x")["growth_mb"] == pytest.approx(0, abs=1e-6)
        found = memory.trend(samples(growth), "a")
        assert found["growth_mb"] == pytest.approx(1000 * growth, abs=0.1)
        assert 0.5 < found["noise_mb"] < 1.0
        assert found["resident_growth_mb"] == pytest.approx(0, abs=1e-6)


@pytest.mark.long
def test_memory_over_some_rounds(tmp_path):
    with reaping() as programs:
        options = ["--rounds", "50", "--output-dir", str(tmp_path)]
        programs.append(program := Program("analysis", ["memory", *options], tmp_path / "log"))
        assert program.wait(300) == 0, program.output
    found = json.loads((tmp_path / "memory.json").read_text())
    assert {row["process"] for row in found["rows"]} >= {"training", "DHT", "p2pd", "averaging", "all"}
    assert all(100 < row["mb"] < 2000 for row in found["rows"] if row["process"] == "all")
    assert found["environment"]["git_commit"]
    (tmp_path / "report").mkdir()
    section = memory_section(tmp_path / "memory.json", tmp_path / "report")
    assert [file.exists() for _, file in section["figures"]] == [True]


def test_the_measuring_process_describes_the_machine_without_torch():
    """The pages of torch would be shared with the peers, whose memory would look smaller."""
    code = "import sys; from analysis.endurance import memory; found = memory.environment_from_outside(); "
    code += "print(found['cores'] > 0, 'command_line' in found, 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert said.split() == ["True", "False", "False"]


def test_too_few_rounds_are_refused(capsys):
    assert memory.main(["--rounds", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: --rounds")
