"""Campaigns: one in a folder at a time, and what they remember of each cell."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from analysis import __main__ as analysis
from analysis.campaigns import cell
from analysis.campaigns.campaign import Campaign, outcome
from analysis.campaigns.cells import load_grid
from analysis.campaigns.measure import (
    failed_by_itself,
    measure,
    problems_of_broken,
    rounds_of,
    runs_failed_by_themselves,
    tries_of,
)
from analysis.wan import sandbox
from recipe.errors import InputError
from tests.helpers.measured_cells import CELL, write_run


def test_a_folder_runs_one_campaign_at_a_time(tmp_path, monkeypatch):
    some = ["--again", "--systems", "ddp", "swarm", "--repeat", "2"]
    monkeypatch.setattr(sys, "argv", ["analysis", "run", "delay", "--output-dir", str(tmp_path), *some])
    grid = load_grid("delay")
    first = Campaign(grid, list(grid.cells())[:1], tmp_path)
    with pytest.raises(InputError, match="in use by another run"):
        Campaign(grid, list(grid.cells())[:1], tmp_path)
    assert first.cells
    command = json.loads((tmp_path / "grid.json").read_text())["command"]
    assert command == ["run", "delay", "--repeat", "2"], "a report is read on other machines"


def test_the_settings_that_a_command_gave_are_noted_for_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "wrapped", lambda _: ["false"])
    assert analysis.main(["run", "slow_line", "--steps", "4", "--output-dir", str(tmp_path)]) == 1, (
        "no cell has a result"
    )
    assert json.loads((tmp_path / "slow_line" / "grid.json").read_text())["changes"] == {"steps": 4}


def test_a_cell_that_ran_again_keeps_its_history(tmp_path, monkeypatch):
    write_run(tmp_path / "good", CELL)
    write_run(tmp_path / "grid" / CELL.name, CELL, busy=float(os.cpu_count()))
    (reason,) = json.loads((tmp_path / "grid" / CELL.name / "result.json").read_text())["problems"]
    grid = load_grid("delay")
    copy = ["cp", str(tmp_path / "good" / "result.json")]
    for command, ended in ((["false"], "status 1"), (copy, "256.0 samples/s")):
        monkeypatch.setattr(sandbox, "wrapped", lambda cell, command=command: [*command, *cell[-1:]])
        console = Console(record=True, width=150)
        campaign = Campaign(grid, [CELL], tmp_path / "grid", again=True)
        assert campaign.run(console) == (command == ["false"])
        assert ended in console.export_text()
        campaign.lock.close()
    assert json.loads((tmp_path / "grid" / cell.EARLIER).read_text()) == {CELL.name: [reason]}


def run_without_a_lab(folder: Path, monkeypatch, run: Callable[[], None]) -> dict:
    """Run a cell in this process, where `run` stands for its peers: it writes their files, or fails."""
    lab = SimpleNamespace(backend="router", congestion_control_in_use=lambda: "cubic")
    monkeypatch.setattr(cell, "Lab", lambda *_, **__: nullcontext(lab))
    monkeypatch.setattr(cell, "Watch", lambda *_: nullcontext())
    monkeypatch.setattr(cell, "CellRun", lambda *_: SimpleNamespace(run=run))
    monkeypatch.setattr(cell, "machine_gflops", lambda: 1.0)
    cell.run_cell(folder)
    return json.loads((folder / "result.json").read_text())


def test_a_cell_that_runs_again_without_a_campaign_keeps_its_history(tmp_path, monkeypatch):
    def fail() -> None:
        raise cell.RunError("not done after 900 s")

    write_run(folder := tmp_path / "grid" / CELL.name, CELL, received=0.5)
    broken = run_without_a_lab(folder, monkeypatch, fail)
    assert broken["problems"] == ["the machine was not watched meanwhile", "not done after 900 s"]
    fine = run_without_a_lab(folder, monkeypatch, lambda: write_run(folder, CELL))
    assert fine["problems"] == []
    partial = "an average was partial: 50.0% of its parts arrived"
    assert fine["earlier_problems"] == [partial, "; ".join(broken["problems"])]
    assert (tries_of(fine), runs_failed_by_themselves(fine)) == (3, 1)


def test_a_cell_without_enough_bytes_is_invalid_at_once(tmp_path, monkeypatch):
    write_run(folder := tmp_path / "grid" / CELL.name, CELL)
    result = run_without_a_lab(folder, monkeypatch, lambda: write_run(folder, CELL, rate=1000))
    assert outcome(result).startswith("failed by itself: averages were partial")
    assert "earlier_problems" not in result, "it was valid before"


def test_a_run_against_the_clock_that_is_repeated_has_not_failed_by_itself(tmp_path):
    """Problems of the machine come first, because a campaign notes those of an earlier run as one text."""
    write_run(tmp_path, CELL, received=0.5)
    file = tmp_path / "runs/run/h1/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line | {"perf/swarm_samples_per_second": 512}) + "\n" for line in lines))
    found = measure(tmp_path, CELL, rounds_of(tmp_path, CELL))["problems"]
    assert [problem.partition(" ")[0] for problem in found] == ["by", "an"]
    assert not failed_by_itself(found)
    assert runs_failed_by_themselves({"problems": [], "earlier_problems": ["; ".join(found)]}) == 0


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_run_that_broke_off_on_a_busy_machine_has_not_failed_by_itself(tmp_path, is_busy):
    write_run(tmp_path, CELL, busy=float(os.cpu_count()) if is_busy else 0.5)
    found = problems_of_broken(tmp_path, CELL, 0.0, "not done after 900 s")
    assert found[-1] == "not done after 900 s"
    assert failed_by_itself(found) == (not is_busy)


def test_a_run_that_failed_by_itself_is_not_repeated_until_it_succeeds(tmp_path, monkeypatch):
    write_run(tmp_path / "good", CELL)
    copy = ["cp", str(tmp_path / "good" / "result.json")]
    monkeypatch.setattr(sandbox, "wrapped", lambda cell: [*copy, *cell[-1:]])
    result = tmp_path / "grid" / CELL.name / "result.json"
    write_run(result.parent, CELL, received=0.5)
    for problems, runs_again in (
        (["an average was partial: 50.0% of its parts arrived"], False),
        (["h2 ended with status 1: error: the router was late"], False),
        (["only 1 of 2 peers took part in an update", "the first peer was not there in 1 updates"], False),
        (["the router was late: 1.4% of its packets by more than 5 ms"], True),
        (["other programs, or other machines, used 0.5 cores", "an average was partial: 50.0% arrived"], True),
    ):
        result.write_text(json.dumps({"problems": problems}))
        campaign = Campaign(load_grid("delay"), [CELL], tmp_path / "grid", again=True)
        assert campaign.run(Console(record=True, width=150)) == (not runs_again), problems
        campaign.lock.close()
        assert (json.loads(result.read_text())["problems"] == []) == runs_again, problems
