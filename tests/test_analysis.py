"""Experiments and reports: grids, gates, measurements and the model, against values worked out by hand."""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import __main__ as analysis
from analysis.archive import read
from analysis.campaign import Campaign
from analysis.cells import Cell, load_grid, shipped_grids
from analysis.figures import part_rows
from analysis.measure import measure, measured_rounds, problems, rounds_of
from analysis.report import write_report
from analysis.results import Experiment, doubling, interval, limits, payload_bytes, ratios, transfer_seconds
from analysis.round_model import Measured, RoundCosts, Swarm, fit, simulate, wire_seconds
from analysis.systems import SYSTEMS, system_of
from analysis.tables import agreement_table, quality_table
from recipe.errors import InputError
from recipe.run_folder import write_json

# ---- grids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_grids())
def test_shipped_experiments_have_cells_that_can_run(name):
    cells = list(load_grid(name).cells(repeat=3))
    assert len({cell.name for cell in cells}) == len(cells)
    assert [cell.repetition for cell in cells] == sorted(cell.repetition for cell in cells), "interleaved"
    for cell in cells:
        assert Cell.from_json(cell.to_json()) == cell
        if cell.kill_at_step is None:
            assert system_of(cell) is SYSTEMS[cell.system]


def test_what_is_no_setting_of_a_cell_belongs_to_the_recipe(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text('[cell]\nrecipe = "digits"\n[grid]\nlearning_rate = [0.1, 0.2]\nsystem = ["ddp"]')
    rates = [cell.full_recipe().learning_rate for cell in load_grid(str(file)).cells()]
    assert rates == [0.1, 0.2]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[grid]\nsystem = ["ddp"]\nspeed = [1]', "A cell has no setting speed"),
        ('[grid]\nsystem = ["ddp"]\nsteps = [2]', "leave nothing of 2 steps"),
        ("[cell]\npeers = 2", "system"),
        ("[experiment]", "unknown entry experiment"),
    ],
)
def test_a_grid_that_cannot_work_is_refused(tmp_path, text, problem):
    file = tmp_path / "grid.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=problem):
        load_grid(str(file))


def test_commands_are_those_of_a_user(tmp_path):
    cell = Cell("ddp-every-micro-batch", recipe="digits", batch_size=32, warm_up_steps=1, steps=2)
    first, second = cell.network().hosts
    words = SYSTEMS[cell.system].command(SYSTEMS[cell.system], cell, second, first, tmp_path, ())
    assert words[words.index("--master-addr") + 1] == first.address
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--target-batch-size") + 1] == "64"
    assert words[words.index("--max-steps") + 1] == "16", "as many samples as two updates of 512"
    swarm = SYSTEMS["swarm"].command(SYSTEMS["swarm"], replace(cell, system="swarm"), second, first, tmp_path, ("A",))
    assert swarm[-2:] == ["--initial-peers", "A"]
    assert "--recipe" not in swarm, "the recipe comes from the swarm"


# ---- measurements ---------------------------------------------------------------------------------------------------


def write_run(
    folder: Path,
    cell: Cell,
    seconds: float = 2.0,
    received: float = 1.0,
    busy: float = 1.0,
    waiting: float = 0.0,
    rate: int = 10_000_000,
) -> None:
    """The files of a swarm whose updates of 512 samples took `seconds` each, 1.5 of them computing.

    Each host sends `rate` bytes a second.
    """
    lines, watched, router = [], [], []
    for step in range(1, cell.steps + 1):
        at = 1000 + seconds * step
        line = {"time": at, "step": step, "swarm/samples": 512, "swarm/peers": cell.peers}
        line |= {"perf/swarm_samples_per_second": 512 / seconds, "round/compute_seconds": 1.5}
        line |= {"round/meeting_seconds": 0.1, "round/exchange_seconds": seconds - 1.7}
        line |= {"round/blocked_seconds": waiting}
        lines.append(line | {"round/parts_received_fraction": received})
    for second in range(int(seconds * cell.steps) + 1):
        traffic = {f"h{n + 1}": [second * rate, second * rate] for n in range(cell.peers)}
        watched.append({"time": 1000 + second, "busy": busy, "lab": busy, "traffic": traffic})
        counts = {"sent": 100, "late": 0, "very_late": 0, "late_max_ms": 0.4, "overflows": 0, "queue_drops": 0}
        router.append({"time": 1000 + second, "cpu_seconds": second * 0.1, **counts})
    files = {"runs/run/h1/metrics.jsonl": lines, "watch.jsonl": watched, "router.jsonl": router}
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in content))
    (folder / "cell.json").write_text(cell.to_json())
    result = measure(folder, cell, rounds_of(folder, cell)) | {"backend": "router", "seconds": 60.0}
    write_json(folder / "result.json", result)


CELL = Cell("swarm", recipe="digits", steps=10, warm_up_steps=2, paced_samples_per_second=200.0)


def test_numbers_of_a_cell_are_those_worked_out_by_hand(tmp_path):
    write_run(tmp_path, CELL, rate=1_000)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["problems"] == []
    assert found["samples_per_second"] == pytest.approx(256)
    assert found["rounds"] == 8, "two of ten updates are warm-up"
    assert found["bytes_per_sample"] == pytest.approx(2 * 16_000 / (8 * 512)), (
        "two hosts, 16 s, 1,000 bytes each second"
    )
    assert found["all_rounds"][3]["bytes_sent"] == pytest.approx(2 * 2_000)
    assert found["router_cores"] == pytest.approx(0.1)


def test_lines_of_ddp_that_were_written_late_are_put_on_time(tmp_path):
    cell = replace(CELL, system="ddp")
    file = tmp_path / "runs/run/h1/metrics.jsonl"
    file.parent.mkdir(parents=True)
    common = {"perf/step_seconds": 10.0, "perf/samples_per_second": 51.2}
    lines = [{"time": 1000 + min(10 * step + 10, 30), "step": step, **common} for step in (1, 2, 3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [item.ended_at for item in rounds_of(tmp_path, cell)] == [1010, 1020, 1030]


@pytest.mark.parametrize(
    ("change", "numbers", "problem"),
    [
        ({}, {"received": 0.5}, "an average was partial: 50.0%"),
        ({}, {"busy": 1e3}, "the machine was saturated"),
    ],
)
def test_cells_that_measured_something_else_are_invalid(tmp_path, change, numbers, problem):
    write_run(tmp_path, replace(CELL, **change), **numbers)
    found = json.loads((tmp_path / "result.json").read_text())
    assert any(text.startswith(problem) for text in found["problems"]), found["problems"]


def test_an_average_that_was_too_small_for_its_bytes_is_invalid(tmp_path):
    for rtt, rate in ((0, 100_000), (20, 10_000_000)):
        cell = replace(CELL, rtt_ms=rtt)
        write_run(tmp_path / "bytes" / cell.name, cell, rate=rate)
    cells = Experiment(read(tmp_path / "bytes")).cells.set_index("rtt_ms")
    assert cells.loc[20, "problems"] == []
    (problem,) = cells.loc[0, "problems"]
    needed = 2 * payload_bytes(CELL) * 9 / 1e6  # of ten updates, one may be on its way
    assert problem == f"averages were partial: 4.0 of {needed:.1f} MB crossed the network"


def test_gates_name_the_machine_the_router_and_missing_peers(tmp_path):
    write_run(tmp_path, CELL)
    kept = measured_rounds(CELL, rounds_of(tmp_path, CELL))
    fine = {"busy_cores": 0.5, "lab_cores": 0.5, "late_share": 0.0, "overflows": 0, "received": 1.0}
    assert problems(CELL, kept, fine) == []
    assert "used 0.30 cores" in problems(CELL, kept, fine | {"lab_cores": 0.2})[0]
    assert "the router was late: 2.0%" in problems(CELL, kept, fine | {"late_share": 0.02})[0]
    assert "only 2 of 3 peers" in problems(replace(CELL, peers=3), kept, fine)[0]
    assert problems(replace(CELL, peers=3, kill_at_step=4), kept, fine) == [], "one of them was killed"
    assert "computed on" in problems(replace(CELL, peers=99, paced_samples_per_second=None), kept, fine)[0]


def test_an_interval_is_students():
    mean, half_width, n = interval([10.0, 12.0, 14.0])
    assert (mean, n) == (12.0, 3)
    assert half_width == pytest.approx(4.303 * 2 / math.sqrt(3), rel=1e-3)
    assert math.isnan(interval([1.0])[1])


def test_limits_are_bytes_over_bandwidth_and_one_round_trip():
    assert transfer_seconds(12.5e6, peers=2, bandwidth_mbps=100) == pytest.approx(1.0)
    found = limits(samples=1000, compute=4.0, payload=12.5e6, peers=2, rtt_ms=100, mbps=100)
    assert found["synchronous"] == pytest.approx(1000 / 5.1)
    assert found["overlapped"] == pytest.approx(250)
    assert doubling(compute=4.0, communication=1.0) == pytest.approx(5 / 3)
    assert doubling(compute=4.0, communication=0.0, hidden=1.5) == pytest.approx(2.0)
    assert doubling(compute=4.0, communication=0.0, hidden=3.0) == pytest.approx(4 / 3)


# ---- the model ------------------------------------------------------------------------------------------------------

SWARM = Swarm(2, 1024, 80, 16, payload_bytes=5.4e6, rtt_ms=100, up_mbps=100)


def test_the_model_finds_the_costs_that_made_its_cells():
    true = RoundCosts(0.2, 2.0, 0.3, 4.0, 0.1)
    cells = []
    for rtt in (0, 50, 200):
        swarm = replace(SWARM, rtt_ms=rtt)
        cells.append(Measured(swarm, true.meeting_seconds(rtt), true.exchange_seconds(swarm, 2), true.other, 0.0))
    found = fit(cells)
    assert vars(found) == pytest.approx(vars(true))


def test_a_simulated_swarm_is_as_fast_as_its_parts_allow():
    free = RoundCosts(0, 0, 0, 0, 0)
    alone = replace(SWARM, peers=1)
    assert simulate(alone, free) == pytest.approx(80)
    step = (512 + 16) / 80 + wire_seconds(SWARM, 2) + 1.0
    one_more = "one peer has begun a further micro-batch when the other's completes the update"
    assert simulate(SWARM, replace(free, meeting=1.0)) == pytest.approx((1024 + 16) / step), one_more
    assert simulate(replace(SWARM, overlaps=True), free) == pytest.approx(160, rel=0.03)
    unstable = replace(SWARM, peers=8, lifetime_seconds=60, rejoin_seconds=60)
    assert simulate(unstable, free, updates=200) == pytest.approx(simulate(replace(SWARM, peers=4), free), rel=0.25)


# ---- the report -----------------------------------------------------------------------------------------------------


@pytest.fixture
def experiment(tmp_path) -> Path:
    folder = tmp_path / "delay"
    for repetition in (1, 2, 3):
        for rtt, seconds in ((0, 1.9), (50, 2.15), (100, 2.4)):
            cell = replace(CELL, rtt_ms=rtt, repetition=repetition)
            write_run(folder / cell.name, cell, seconds + 0.01 * repetition)
    write_run(folder / "broken", replace(CELL, rtt_ms=100, repetition=4), 0.9 + 1, received=0.5)
    write_json(
        folder / "grid.json", {"name": "delay", "question": "What does delay cost?", "command": ["run", "delay"]}
    )
    return folder


def test_a_report_holds_the_answer_its_figures_and_what_was_left_out(experiment, tmp_path):
    page = write_report([experiment], tmp_path / "report")
    html, text = page.read_text(), (tmp_path / "report" / "report.md").read_text()
    assert "PACED" in text
    asked = len(list(load_grid("delay").cells(repeat=4)))
    assert f"Get it again: python -m analysis run delay. It runs {asked} cells; {asked} of them are not in this" in text
    assert "Left out: 1 of 10 cells" in text
    assert "211.6 ± 2.2 (n = 3)" in text, "512 samples in 2.42 s"
    assert html.count("data:image/png;base64,") == 4
    assert not re.search(r'(src|href)="http', html), "nothing is fetched"
    parts = part_rows(Experiment(read(experiment)))
    assert parts["compute"].tolist() == [1.5, 1.5, 1.5]
    again = write_report([tmp_path / "report" / "delay.jsonl"], tmp_path / "again")
    assert again.read_text() == html, "a report is made again from what it kept"


def test_ratios_are_taken_within_a_repetition(tmp_path):
    for repetition, slower in ((1, 1.0), (2, 1.5), (3, 2.0)):  # the machine is slower each time
        for system, seconds in (("swarm", 2.0), ("swarm-overlap", 1.6)):
            cell = replace(CELL, system=system, rtt_ms=50 * (repetition % 2), repetition=repetition)
            write_run(tmp_path / "drift" / cell.name, cell, seconds * slower)
    found = ratios(Experiment(read(tmp_path / "drift")), "swarm-overlap", "swarm")
    assert [len(values) for values in found] == [1, 2]
    assert [value for values in found for value in values] == pytest.approx([1.25] * 3)


def test_the_same_experiment_twice(tmp_path):
    for run, seconds in (("earlier", 2.0), ("now", 2.02)):
        for repetition in (1, 2, 3):
            for rtt, slower in ((0, 1.0), (100, 1.5 if run == "now" else 1.0)):
                cell = replace(CELL, rtt_ms=rtt, repetition=repetition)
                write_run(tmp_path / run / "delay" / cell.name, cell, (seconds + 0.02 * repetition) * slower)
    both = [Experiment(read(tmp_path / run / "delay")) for run in ("now", "earlier")]
    assert both[0].axes == ["rtt_ms"]
    assert agreement_table(*both)["agree"].tolist() == ["yes", "no"]
    page = write_report([tmp_path / "now" / "delay"], tmp_path / "report", [tmp_path / "earlier" / "delay"])
    assert "delay, run twice" in page.read_text()


def test_communication_beside_computing_is_not_counted_twice(tmp_path):
    for rtt in (0, 100):
        cell = replace(CELL, system="swarm-overlap", rtt_ms=rtt)
        write_run(tmp_path / "hidden" / cell.name, cell, seconds=2.0, waiting=0.1)
    (part, _) = part_rows(Experiment(read(tmp_path / "hidden"))).to_dict("records")
    assert (part["compute"], part["meeting"], part["exchange"]) == pytest.approx((1.9, 0, 0))
    assert part["hidden"] == pytest.approx(0.1 + 0.3 - 0.1), "matchmaking and transfer, but for the wait"
    assert part["other"] == pytest.approx(0.1)


def test_quality_is_shown_where_compute_was_true(tmp_path):
    for rate in (1e-3, 3e-3):
        cell = replace(CELL, paced_samples_per_second=None, target_accuracy=0.5, changes={"learning_rate": rate})
        folder = tmp_path / "rates" / cell.name
        write_run(folder, cell)
        metrics = folder / "runs/run/h1/metrics.jsonl"
        validation = {f"val/{name}": 0.9 for name in ("top1", "macro_f1", "precision", "recall")}
        validation["val/loss"] = rate
        with metrics.open("a") as file:
            file.write(json.dumps({"time": 1021, "step": 10, **validation}) + "\n")
        write_json(folder / "result.json", measure(folder, cell, rounds_of(folder, cell)))
    experiment = Experiment(read(tmp_path / "rates"))
    assert experiment.axes == ["learning_rate"], "the validation's loss is no setting, a packet's is"
    table = quality_table(experiment)
    assert table["learning_rate"].tolist() == [1e-3, 3e-3]
    assert table["accuracy"].tolist() == table["macro_f1"].tolist() == ["0.9000", "0.9000"]
    assert float(table["epoch, s"][0]) == pytest.approx(1797 * 0.7 / 256, rel=0.3), (
        "most of 1,797 digits are for training"
    )


def test_folders_without_results_are_refused_in_one_sentence(tmp_path, capsys):
    assert analysis.main(["report", str(tmp_path), "-o", str(tmp_path / "out")]) == 2
    assert "holds no finished cells" in capsys.readouterr().err
    assert analysis.main(["run", "everything"]) == 2
    assert "There is no experiment everything: give averaging" in capsys.readouterr().err


def test_a_folder_runs_one_campaign_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["analysis", "run", "delay", "--output-dir", str(tmp_path), "--repeat", "2"])
    grid = load_grid("delay")
    first = Campaign(grid, list(grid.cells())[:1], tmp_path)
    with pytest.raises(InputError, match="in use by another run"):
        Campaign(grid, list(grid.cells())[:1], tmp_path)
    assert first.cells
    command = json.loads((tmp_path / "grid.json").read_text())["command"]
    assert command == ["run", "delay", "--repeat", "2"], "a report is read on other machines"
