"""Reports: their statements about cells, valid and failed, against values worked out by hand."""

import itertools
import json
import re
import shutil
import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from analysis import __main__ as analysis
from analysis.campaigns.cells import load_grid
from analysis.campaigns.measure import measure, rounds_of
from analysis.campaigns.systems import SYSTEMS
from analysis.reporting import captions
from analysis.reporting.archive import read
from analysis.reporting.figures import COLOURS, part_rows
from analysis.reporting.opening import comparisons, details_section, opening_section
from analysis.reporting.provenance import machine_section
from analysis.reporting.published import distance
from analysis.reporting.report import agreement_section, experiment_section, write_report
from analysis.reporting.results import Experiment, experiments_in, ratios
from analysis.reporting.scaling import measured_setting, predict, transfers
from analysis.reporting.tables import (
    agreement_table,
    communication_table,
    equivalence_table,
    kept_table,
    quality_table,
    ratio_table,
    survivors_table,
    throughput_table,
)
from analysis.reporting.words import (
    answer,
    lost_shares,
    lost_warm_up,
    order_of_runs,
    reproduction,
    results_table,
    time_to_accuracy,
)
from analysis.wan.topology import SHIPPED
from recipe.registry import DIGITS_FOLDS
from recipe.run_folder import write_json
from tests.helpers.measured_cells import CELL, write_run
from tests.helpers.paths import ROOT


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
    assert "Get it again: python -m analysis run delay (these cells took 0.2 hours)" in text
    assert f"It runs {asked} cells now; {asked} of them were not" in text
    assert "Failed by themselves: 1 of 10 cells" in text
    assert "1 of 10 runs failed by themselves, on a machine that was fit for them: 1 of 10 of our swarm" in text
    assert "Of our swarm, synchronous, 1 of 10 runs failed by themselves." in text
    assert "(n = 3); efficiency 0.53; 1 of 4 runs failed by themselves" in text, "at 100 ms"
    assert "211.6 ± 2.2 (n = 3)" in text, "512 samples in 2.42 s"
    assert html.count("data:image/png;base64,") == html.count("<figcaption>") == 3
    caption = (
        "Samples per second, paced: a large dot is the mean of 3 runs, with its 95 % interval; small dots are runs."
    )
    assert f"![Samples per second, paced](delay-throughput.png)\n\n*{caption}" in text
    assert caption in html
    assert "means of 3 runs. Behind the name of a system stands: round-trip time, ms." in text
    assert re.search(r"^- \[.*\]\(#.*\) \(delay\)$", text, re.MULTILINE), "the answer calls it by its name"
    links, titles = set(re.findall(r'href="#(.*?)"', html)), set(re.findall(r'id="(.*?)"', html))
    assert links == titles - {"the-answer"}
    assert not re.search(r'(src|href)="http', html), "nothing is fetched"
    parts = part_rows(Experiment(read(experiment)))
    assert parts["compute"].tolist() == [1.5, 1.5, 1.5]
    again = write_report([tmp_path / "report" / "delay.jsonl"], tmp_path / "again")
    assert again.read_text() == html, "a report is made again from what it kept"


def test_what_is_said_comes_with_intervals(tmp_path):
    """At 0 ms neither is faster for sure, at 100 ms the swarm is."""
    for repetition, noise in ((1, 0.9), (2, 1.0), (3, 1.12)):
        for rtt, swarm, ddp in ((0, 2.0, 2.0 * noise), (100, 2.0, 2.5 + 0.1 * noise)):
            for system, seconds in (("swarm", swarm), ("ddp", ddp)):
                cell = replace(CELL, system=system, rtt_ms=rtt, repetition=repetition)
                write_run(tmp_path / "said" / cell.name, cell, seconds)
    said = Experiment(read(tmp_path / "said"))
    speeds_near, near, speeds_far, far = answer(said)
    assert speeds_near.startswith("At round-trip time, ms = 0: ")
    assert speeds_far.startswith("At round-trip time, ms = 100: our swarm, synchronous 256.0 ± 0.0 samples/s, 0.500")
    assert near.count("times the updates/s (not shown) and 1.01 ± 0.27 times the samples/s (not shown) of DDP") == 1
    assert (
        "made 1.30 ± 0.01 times the updates/s and 1.30 ± 0.01 times the samples/s of DDP, accumulated (n = 3)." in far
    )
    (row,) = results_table([said]).to_dict("records")
    assert row["DDP, accumulated: samples/s"].endswith("shown to be faster in 1 of 2 settings, slower in 0")
    assert row["DDP, accumulated: updates/s"].startswith("1.01 to 1.30; shown")


def test_ratios_are_in_updates_as_well_as_in_samples(tmp_path):
    """But not where an update of one is asked to have several times as many samples as an update of the other."""
    for repetition, (system, seconds, samples) in product(
        (1, 2, 3),
        (("swarm", 2.2, 600), ("swarm-local", 8.0, 2048), ("ddp", 2.0, 512), ("ddp-every-micro-batch", 0.5, 32)),
    ):
        cell = replace(CELL, system=system, repetition=repetition)
        write_run(tmp_path / "rates" / cell.name, cell, seconds, samples=samples)
    rates = Experiment(read(tmp_path / "rates"))
    table = ratio_table(rates)
    columns = ["system", "in", "DDP, accumulated", "DDP, an update every micro-batch"]
    assert table[columns].fillna("–").to_numpy().tolist() == [
        ["our swarm, synchronous", "samples/s", "1.07 ± 0.00 (n = 3)", "4.26 ± 0.00 (n = 3)"],
        ["our swarm, synchronous", "updates/s", "0.91 ± 0.00 (n = 3)", "–"],
        ["our swarm, 4 local steps", "samples/s", "1.00 ± 0.00 (n = 3)", "4.00 ± 0.00 (n = 3)"],
    ]
    speeds, compared = answer(rates)
    assert "our swarm, synchronous 272.7 ± 0.0 samples/s, 0.455 ± 0.000 updates/s (n = 3)" in speeds
    assert "our swarm, 4 local steps 256.0 ± 0.0 samples/s (n = 3)" in speeds
    assert compared == (
        "Our swarm, synchronous made 0.91 ± 0.00 times the updates/s and 1.07 ± 0.00 times the samples/s of DDP, "
        "accumulated (n = 3). Our swarm, 4 local steps made 1.00 ± 0.00 times the samples/s (not shown) of DDP, "
        "accumulated (n = 3)."
    )


def test_the_answer_counts_updates_and_is_the_same_in_whatever_order_files_come(tmp_path):
    """The swarm's updates are larger: in samples per second it is faster, in updates per second it is slower."""
    for name, seconds, opponent, repetitions in (
        ("near", 2.2, "ddp-fp16", 3),
        ("far", 2.3, "ddp-fp16", 3),
        ("few", 1.0, "ddp-fp16", 2),
        ("float32", 1.1, "ddp", 3),
    ):
        for repetition, noise in ((1, 0.0), (2, 0.001), (3, 0.002))[:repetitions]:
            for system in ("swarm-local-1-fp16", opponent):
                cell = replace(CELL, system=system, rtt_ms=100, repetition=repetition)
                slower = seconds + noise if system != opponent else 2.0
                write_run(tmp_path / name / cell.name, cell, slower, samples=512 if system == opponent else 600)
    folders = [tmp_path / name for name in ("near", "far", "few", "float32")]
    for output, sources in (("one", folders), ("other", folders[::-1])):
        write_report(sources, tmp_path / output)
    said = (tmp_path / "one" / "report.md").read_text()
    assert said == (tmp_path / "other" / "report.md").read_text()
    assert "0.87 to 0.91 times the updates/s of DDP, accumulated, fp16 hook" in said
    assert "of 2 settings, it is shown to be faster in 0 and slower in 2" in said
    assert "Intervals are not corrected for their number" in said
    begin = said[: said.index("](answer.png)")]
    assert "more peers, other models and real lines may differ." in begin
    assert "Use a swarm where peers come and go, which DDP does not survive; else use DDP" in begin
    assert max(len(sentence.split()) for sentence in begin.splitlines()) <= 40
    assert "| " not in said[: said.index("## Contents")], "tables come after the contents"
    (row,) = re.findall(r"^\| near \| .*", said, re.MULTILINE)
    slower, faster = (f"shown to be faster in {count} of 1 settings, slower in {1 - count}" for count in (0, 1))
    assert re.search(rf"0\.91; {slower} \| 1\.\d\d; {faster} \|$", row), "over DDP with the fp16 hook, in both rates"
    left_out = said[said.index("Not counted above") : said.index("Times as fast as DDP")]
    assert "| few | our swarm, 1 local step, fp16 | DDP, accumulated, fp16 hook | 2.00 (n = 2)" in left_out
    assert "| float32 | our swarm, 1 local step, fp16 | DDP, accumulated | 1.82 ± 0.00 (n = 3)" in left_out
    assert said.index("](answer.png)") < said.index("## Contents") < said.index("](#")
    assert [
        row.verdict("updates_per_second") for row in comparisons([Experiment(read(folders[0]))], "swarm-local-1-fp16")
    ] == ["slower"]


def test_the_answer_says_where_to_use_a_swarm(tmp_path):
    for repetition, (rtt, seconds) in product((1, 2, 3), ((0, 2.2), (100, 1.5))):
        for system in ("swarm-local-1-fp16", "ddp-fp16"):
            cell = replace(CELL, system=system, rtt_ms=rtt, repetition=repetition)
            write_run(tmp_path / "far" / cell.name, cell, 2.0 if system == "ddp-fp16" else seconds + 0.001 * repetition)
    (_, _, advice, _) = opening_section([Experiment(read(tmp_path / "far"))], tmp_path).text
    assert "or where the picture shows it to be faster (with paced devices only); else" in advice


def test_how_often_cells_ran_is_said_beside_n(tmp_path):
    """One cell ran again and notes how often; another ran again, and its version did not note how often."""
    earlier = {1: {"earlier_problems": ["late", "late"], "earlier_runs": 2}, 2: {"earlier_problems": ["a", "b"]}}
    for repetition in (1, 2, 3):
        write_run(folder := tmp_path / "again" / f"{repetition}", replace(CELL, repetition=repetition))
        result = json.loads((folder / "result.json").read_text())
        write_json(folder / "result.json", result | earlier.get(repetition, {}))
    again = Experiment(read(tmp_path / "again"))
    (row,) = throughput_table(again).to_dict("records")
    assert "(n = 3)" in row["our swarm, synchronous"]
    assert row["our swarm, synchronous"].endswith("; 6 tries or more")
    ((_, table), *_) = details_section([again]).tables
    assert table.to_numpy().tolist() == [["our swarm, synchronous", 3, 6, 3]]


def test_captions_say_of_how_many_runs_and_what_is_missing(tmp_path):
    cell = replace(CELL, target_accuracy=0.95, paced_samples_per_second=None)
    for repetition, (system, top1) in product((1, 2), (("swarm", 0.97), ("swarm-overlap", 0.5))):
        run = replace(cell, system=system, repetition=repetition, changes={"seed": repetition})
        write_run(tmp_path / "run" / run.name, run, top1=top1)
    run = Experiment(read(tmp_path / "run"))
    assert captions.times(run, "") == (
        "Seconds of training to 95 % accuracy: a bar is the mean of 2 seeds, too few for an interval; dots are runs. "
        "Did not reach it: our swarm, overlapped."
    )
    assert "means of 2 runs. Where a system averages while it computes, only its wait" in captions.parts(run, "")
    assert "slower peer" not in captions.parts(run, "")
    slow = replace(CELL, last_times_slower=3.0)
    write_run(tmp_path / "slow" / slow.name, slow)
    assert "includes its wait for the slower peer." in captions.parts(Experiment(read(tmp_path / "slow")), "")


def test_every_system_has_a_colour_of_its_own(tmp_path):
    assert set(SYSTEMS) <= set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)
    cell = replace(CELL, system="swarm-local-4-topk")
    write_run(tmp_path / "few" / cell.name, cell)
    write_report([tmp_path / "few"], tmp_path / "report")
    assert (tmp_path / "report" / "few-throughput.png").exists()


def test_a_swarm_of_few_bytes_is_compared_with_ddp_of_few_bytes(tmp_path):
    for system in ("ddp-fp16", "ddp-powersgd", "swarm-local-1-topk"):
        write_run(tmp_path / "few" / system, replace(CELL, system=system))
    experiment = Experiment(read(tmp_path / "few"))
    (said,) = (text for text in answer(experiment) if "topk made" in text)
    assert all(SYSTEMS[system].label in said for system in ("ddp-fp16", "ddp-powersgd"))
    (row,) = results_table([experiment]).to_dict("records")
    assert row[f"{SYSTEMS['ddp-powersgd'].label}: updates/s"]


def test_a_shipped_experiment_asks_in_todays_words(tmp_path):
    """The question that was stored with it may have been wrong."""
    write_run(tmp_path / "cell", CELL, 2.0)
    for command, said in (
        (["run", "learning_rate"], "where both are asked for"),
        (["run", "own.toml"], "At the same?"),
    ):
        grid = {"name": "learning_rate", "question": "At the same?", "command": command}
        write_json(tmp_path / "grid.json", grid)
        assert said in Experiment(read(tmp_path)).question


def test_cells_are_counted_against_those_that_the_command_asked_for(tmp_path):
    """Not against those of the experiment without its options, nor against another experiment of the same name."""
    cells = list(load_grid("slow_line").cells(steps=4))
    for cell in cells[1:]:
        write_run(tmp_path / cell.name, cell)
    grid = {"name": "slow_line", "question": "", "command": ["run", "slow_line", "--steps", "4"]}
    own = grid | {"command": ["run", "x/slow_line.toml"]}
    for stored, said in (
        (grid | {"changes": {"steps": 4}}, f"It runs {len(cells)} cells now; 1 of them were not measured"),
        (grid, f"It runs {len(cells)} cells now; {len(cells)} of them were not measured"),  # by an earlier version
        (own | {"changes": {}}, "python -m analysis run x/slow_line.toml (these cells"),
    ):
        write_json(tmp_path / "grid.json", stored)
        command = reproduction(Experiment(read(tmp_path)))
        assert said in command
        assert ("It runs" in command) == (stored["command"][1] == "slow_line")


def test_how_long_it_took_to_an_accuracy_is_said_with_how_many_reached_it(tmp_path):
    cell = replace(CELL, system="swarm", target_accuracy=0.95, paced_samples_per_second=None)
    for repetition, reached in ((1, True), (2, False)):
        run = replace(cell, repetition=repetition)
        write_run(tmp_path / "run" / run.name, run, top1=0.97 if reached else 0.5)
    assert "our swarm, synchronous 8.0 (1 of 2 reached it)" in time_to_accuracy(Experiment(read(tmp_path / "run")))
    few = replace(cell, paced_samples_per_second=200.0)
    write_run(tmp_path / "few" / few.name, few, top1=0.97)
    assert time_to_accuracy(Experiment(read(tmp_path / "few"))) is None, "most samples were left out"
    every = replace(few, paced_all_samples=True)
    write_run(tmp_path / "every" / every.name, every, top1=0.97)
    assert time_to_accuracy(Experiment(read(tmp_path / "every"))) is not None
    for system in ("swarm", "swarm-local"):
        uneven = replace(cell, system=system, changes={"validate_every_steps": 5})
        write_run(tmp_path / "uneven" / uneven.name, uneven, top1=0.97)
    said = time_to_accuracy(Experiment(read(tmp_path / "uneven")))
    assert "Validations came every 2,048 samples: our swarm, 4 local steps; every 2,560 samples: our swarm" in said


def test_times_to_an_accuracy_of_the_same_seed_count_once(tmp_path):
    cell = replace(CELL, target_accuracy=0.95, paced_samples_per_second=None)
    for seed, repetition, seconds in ((0, 1, 2.0), (0, 2, 2.0), (1, 1, 3.0)):
        run = replace(cell, changes={"seed": seed}, repetition=repetition)
        write_run(tmp_path / "run" / run.name, run, seconds, top1=0.97)
    found = Experiment(read(tmp_path / "run"))
    assert "our swarm, synchronous 10.0 (3 of 3 reached it)" in time_to_accuracy(found), "8 s and 12 s: two seeds"
    assert found.summary("seconds_to_accuracy")["n"].tolist() == [2]
    assert found.summary("samples_per_second")["n"].tolist() == [3]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({0: 2.0, 1: 2.5, 2: 3.0}, "took 1.23 ± 0.63 times the seconds of our swarm, synchronous (n = 3, not shown)."),
        ({0: 2.0, 1: 2.1, 2: 2.0}, "took 1.48 ± 0.10 times the seconds of our swarm, synchronous (n = 3)."),
        ({None: 2.0}, "took 1.50 times the seconds of our swarm, synchronous (n = 1, not shown)."),
    ],
)
def test_times_to_an_accuracy_are_compared_seed_by_seed(tmp_path, seconds, said):
    """With each seed DDP's updates take 3 s."""
    cell = replace(CELL, target_accuracy=0.95, paced_samples_per_second=None)
    for seed, own in seconds.items():
        for system, took in (("ddp", 3.0), ("swarm", own)):
            run = replace(cell, system=system, changes={} if seed is None else {"seed": seed})
            write_run(tmp_path / "run" / run.name, run, took, top1=0.97)
    assert f"Seed by seed, DDP, accumulated {said}" in time_to_accuracy(Experiment(read(tmp_path / "run")))


@pytest.mark.parametrize("turns", [(), (100,), (0, 100)])
def test_it_is_said_where_systems_ran_in_one_order_each_time(tmp_path, turns):
    """Each setting counts by itself: systems that took turns at one round-trip time say nothing about another one."""
    for place, (rtt_ms, seed) in enumerate(product((0, 100), (0, 1))):
        systems = ("swarm", "ddp") if seed and rtt_ms in turns else ("ddp", "swarm")
        for late, system in enumerate(systems):
            cell = replace(CELL, system=system, rtt_ms=rtt_ms, changes={"seed": seed})
            write_run(tmp_path / "run" / cell.name, cell)
            file = tmp_path / "run" / cell.name / "result.json"
            result = json.loads(file.read_text())
            for item in result["all_rounds"]:
                item["ended_at"] += 3600 * place + 180 * late
            write_json(file, result)
    said = order_of_runs(Experiment(read(tmp_path / "run")))
    assert said.startswith("The systems of a repetition ran up to 3 min apart")
    pair = "DDP, accumulated before our swarm, synchronous."
    wanted = {(): f"each time: {pair}", (100,): f"each time: at round-trip time, ms = 0: {pair}"}
    assert wanted.get(turns, "apart.") in said


def test_how_long_validations_took_is_said(tmp_path):
    """Validations do not count, so a reader would not see that they can take longer than the training."""
    cell = replace(CELL, target_accuracy=0.95, paced_samples_per_second=None)
    for repetition, seconds in ((1, 3.0), (2, 9.0)):
        folder = tmp_path / "run" / f"r{repetition}"
        write_run(folder, replace(cell, repetition=repetition), top1=0.97)
        result = json.loads((folder / "result.json").read_text())
        for item in result["all_rounds"]:
            item["ended_at"] += seconds * (item["step"] > 4)
        write_json(folder / "result.json", result)
    said = time_to_accuracy(Experiment(read(tmp_path / "run")))
    assert "Validations do not count (one took 3.0 to 9.0 s with our swarm, synchronous), and" in said


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ((5, 10), "away from validations it was 100 %. Speeds go by"),
        ((4, 7), "The reason is not known."),
        ((), None),
    ],
)
def test_updates_that_took_other_seconds_than_the_clock_says_are_named(tmp_path, late, said):
    """Versions before the check of the clock noted the end of an update after its validation."""
    cell = replace(CELL, changes={"validate_every_steps": 5})
    for repetition in (1, 2):
        write_run(folder := tmp_path / "run" / f"{repetition}", replace(cell, repetition=repetition))
        result = json.loads((folder / "result.json").read_text())
        for item in result["all_rounds"]:
            item["follows_validation"] = None
            item["ended_at"] += 3.0 * sum(item["step"] >= step for step in late)
        write_json(folder / "result.json", result)
    run = Experiment(read(tmp_path / "run"))
    for text in (experiment_section(run, tmp_path).text, agreement_section(run, run).text):
        paragraphs = " ".join(text)
        if said is None:
            assert "between their ends" not in paragraphs
        else:
            assert "y their own account, updates of 2 of 2 runs took 70 % of the time between their ends" in paragraphs
            assert said in paragraphs


def test_swarms_that_learnt_without_a_warm_up_are_named(tmp_path):
    """The version that measured these swarms rounded a quarter of five updates down, and did not note it."""
    own = {"earlier": None, "later": 2, "ddp": 5}
    for name, steps in own.items():
        cell = replace(CELL, system="ddp" if name == "ddp" else "swarm-local", target_accuracy=0.95)
        folder = tmp_path / name / cell.name
        write_run(folder, cell, top1=0.97)
        result = json.loads((folder / "result.json").read_text())
        write_json(folder / "result.json", result | {"own_warmup_steps": steps})
    said = {name: lost_warm_up(Experiment(read(tmp_path / name))) for name in own}
    assert "our swarm, 4 local steps (5 updates)" in said.pop("earlier")
    assert said == {"later": None, "ddp": None}


def test_the_congestion_control_of_each_experiment_is_said(tmp_path):
    machine = {"started_at": "2026-01-01", "git_commit": "abc", "cores": 2, "cpu": "a CPU", "memory_gib": 8.0}
    machine |= {"os": "Linux", "versions": {}}
    write_run(tmp_path / "one" / CELL.name, CELL)
    records = read(tmp_path / "one")

    def said(**used: str | None) -> str:
        grids = [{"name": name, "question": "", "command": [], "congestion_control": one} for name, one in used.items()]
        return " ".join(machine_section([Experiment(replace(records, grid=g, machine=machine)) for g in grids]).text)

    assert "was the kernel's: bbr (delay, demo). It is not known of peers." in said(delay="bbr", peers=None, demo="bbr")
    assert "was the kernel's: bbr (delay); cubic (demo)." in said(delay="bbr", demo="cubic")
    assert "congestion" not in said(delay=None)


def test_cells_that_failed_are_left_out_and_named(tmp_path):
    folder, output = tmp_path / "failed", tmp_path / "report"
    cells = [replace(CELL, repetition=number) for number in (1, 2, 3)]
    write_run(folder / cells[0].name, cells[0])
    for cell in cells[1:]:
        (folder / cell.name).mkdir()
        (folder / cell.name / "cell.json").write_text(cell.to_json())
    write_json(folder / cells[1].name / "result.json", {"problems": ["not done after 900 s"], "backend": "router"})
    write_report([folder], output)
    text = (output / "report.md").read_text()
    assert "Failed by themselves: 1 of 3 cells" in text
    assert "not done after 900 s" in text
    assert "Left out: 1 of 3 cells" in text
    assert "it ended without a result" in text, "it was killed"
    write_json(folder / cells[0].name / "result.json", {"problems": ["not done after 900 s"], "backend": "router"})
    write_report([folder], output)
    assert "No cell was valid" in (output / "report.md").read_text()


def test_a_cell_of_another_version_is_refused_in_one_sentence(tmp_path, capsys):
    for text, reason in (('{"system": "swarm", "speed": 1}', "is no cell"), ('{"system": "old"}', "is no cell")):
        folder = tmp_path / "old" / "cell"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cell.json").write_text(text)
        assert analysis.main(["report", str(tmp_path / "old"), "-o", str(tmp_path / "out")]) == 2
        assert reason in capsys.readouterr().err


def test_another_setting_is_no_repetition(tmp_path):
    for rtt in (0, 100):
        for samples in (256, 512):
            cell = replace(CELL, rtt_ms=rtt, changes={"target_batch_size": samples})
            write_run(tmp_path / "two" / cell.name, cell)
    parts = experiments_in(read(tmp_path / "two"))
    assert [part.name for part in parts] == ["two-target_batch_size-256", "two-target_batch_size-512"]
    assert [part.axes for part in parts] == [["rtt_ms"], ["rtt_ms"]]
    assert {part.asked for part in parts} == {"two"}
    write_report([tmp_path / "two"], tmp_path / "report")
    assert (tmp_path / "report" / "two.jsonl").exists()


def test_a_network_from_a_file_gives_names_of_figures(tmp_path):
    """Its path has slashes, which the name of a picture cannot have."""
    for peers, place in product((2, 3), ("home", "region")):
        shutil.copy(SHIPPED / f"{place}.toml", tmp_path / f"my-{place}.toml")
        cell = replace(CELL, peers=peers, topology=str(tmp_path / f"my-{place}.toml"))
        write_run(tmp_path / "files" / cell.name, cell)
    parts = experiments_in(read(tmp_path / "files"))
    assert [part.name for part in parts] == ["files-topology-my-home", "files-topology-my-region"]
    assert parts[0].question.endswith("(topology my-home)")
    write_report([tmp_path / "files"], tmp_path / "report")
    assert (tmp_path / "report" / "files-topology-my-home-throughput.png").exists()


def test_no_limit_is_a_value_like_others(tmp_path):
    for rate in (10.0, None):
        cell = replace(CELL, bandwidth_mbps=rate)
        write_run(tmp_path / "unlimited" / cell.name, cell)
    assert Experiment(read(tmp_path / "unlimited")).summary("samples_per_second")["n"].tolist() == [1, 1]
    write_report([tmp_path / "unlimited"], tmp_path / "report")


def test_a_model_is_tested_on_every_setting_that_it_has_not_seen(experiment):
    found = predict(Experiment(read(experiment)), "swarm")
    assert len(found.table) == 3
    assert found.is_trusted(pd.DataFrame()), "these rounds are a straight line over the round-trip time"
    assert found.worst_of_mean > 0.08
    assert found.table["predicted, s"].tolist() == pytest.approx(found.table["communication, s"].tolist(), abs=0.15)
    elsewhere = pd.DataFrame([{"recipe": "digits", "error": 0.02}, {"recipe": "another", "error": -0.9}])
    assert found.is_trusted(elsewhere)
    elsewhere.loc[0, "error"] = -0.2
    assert not found.is_trusted(elsewhere), "the same model was predicted badly in another experiment"


def test_a_model_of_averaging_beside_computing_counts_no_wait_twice(tmp_path):
    cell = replace(CELL, system="swarm-local", rtt_ms=100)
    write_run(tmp_path / "local" / cell.name, cell, seconds=6.0, waiting=0.7)
    cells = Experiment(read(tmp_path / "local")).valid
    found = measured_setting(cells, cells)
    assert found.swarm.samples_per_update == 4 * cell.full_recipe().target_batch_size, "an update has four local steps"
    assert found.other == pytest.approx(6.0 - 512 / 400 - 0.7), "the wait comes from the average: it is no further cost"


def test_a_model_is_tested_on_other_experiments(experiment, tmp_path):
    cell = replace(CELL, peers=4, rtt_ms=100)
    write_run(tmp_path / "peers" / cell.name, cell, 2.0)
    killed = replace(cell, kill_at_step=4)
    write_run(tmp_path / "peers" / killed.name, killed, 2.0)
    model = predict(Experiment(read(experiment)), "swarm")
    ddp = replace(cell, system="ddp")
    write_run(tmp_path / "others" / ddp.name, ddp, 2.0)
    table = transfers(model, [Experiment(read(tmp_path / name)) for name in ("peers", "others")])
    assert table["measured"].tolist() == [256.0], "the model knows nothing of peers that are killed"
    compute, communication = 512 / (4 * 200), 2.4 - 512 / (2 * 200)
    assert table["predicted"].item() == pytest.approx(512 / (compute + communication), rel=0.1)


def test_ratios_are_taken_within_a_repetition(tmp_path):
    for repetition, slower in ((1, 1.0), (2, 1.5), (3, 2.0)):  # the machine is slower each time
        for system, seconds in (("swarm", 2.0), ("swarm-overlap", 1.6)):
            cell = replace(CELL, system=system, rtt_ms=50 * (repetition % 2), repetition=repetition)
            write_run(tmp_path / "drift" / cell.name, cell, seconds * slower)
    found = ratios(Experiment(read(tmp_path / "drift")), "swarm-overlap", "swarm")
    assert [len(values) for values in found] == [1, 2]
    assert [value for values in found for value in values] == pytest.approx([1.25] * 3)


@pytest.mark.parametrize(
    ("near", "far"),
    [({"rtt_ms": 0}, {"rtt_ms": 100}), ({"topology": "region"}, {"topology": "continents"})],
    ids=["delay", "topology"],
)
def test_what_distance_leaves_of_the_speed(tmp_path, near, far):
    for repetition, slower in ((1, 1.0), (2, 1.5), (3, 2.0)):  # the machine is slower each time
        for place, seconds in ((near, 2.0), (far, 2.5)):
            cell = replace(CELL, **place, peers=4, repetition=repetition)
            write_run(tmp_path / "far" / cell.name, cell, seconds * slower)
    (row,) = kept_table(Experiment(read(tmp_path / "far"))).to_dict("records")
    assert list(row.values()) == ["our swarm, synchronous", "0.80 ± 0.00 (n = 3)"]


def test_cells_on_one_emulated_network_stand_beside_its_name(tmp_path):
    """Their rtt_ms is 0, and says nothing."""
    for system, repetition in product(("ddp", "swarm"), (1, 2)):
        cell = replace(CELL, system=system, topology="region", peers=4, repetition=repetition)
        write_run(tmp_path / "near" / cell.name, cell)
    near = Experiment(read(tmp_path / "near"))
    assert (near.axes, near.axis) == ([], "topology")
    for table in (throughput_table(near), ratio_table(near), communication_table(near)):
        assert set(table["topology"]) == {"region"}
        assert "rtt_ms" not in table
    assert kept_table(near) is None
    assert distance([near]) == "–"
    assert answer(near)[0].startswith("Speed: ")
    write_report([tmp_path / "near"], tmp_path / "report")


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


def test_the_same_experiment_twice_on_machines_of_different_speed(tmp_path):
    for run, times in (("earlier", 1.0), ("now", 0.5)):
        for repetition in (1, 2, 3):
            for system, seconds in (("ddp", 4.0), ("swarm", 2.0)):
                cell = replace(CELL, system=system, repetition=repetition, paced_samples_per_second=None)
                write_run(tmp_path / run / cell.name, cell, times * (seconds + 0.01 * repetition))
    found = agreement_table(*(Experiment(read(tmp_path / run)) for run in ("now", "earlier")))
    (row,) = found.to_dict("records")
    assert (row["system"], row["agree"]) == ("our swarm, synchronous", "yes")
    assert row["now"].startswith("1.99 ± ")


def test_an_earlier_run_is_compared_setting_by_setting(tmp_path):
    """Smaller updates are faster with a swarm, and slower with DDP; both runs are the same."""
    for repetition, rtt, samples in itertools.product((1, 2, 3), (0, 100), (256, 512)):
        for system, seconds in (("ddp", 4.0 + 512 / samples), ("swarm", 1.0 + samples / 512)):
            changes = {"target_batch_size": samples}
            cell = replace(CELL, system=system, rtt_ms=rtt, repetition=repetition, changes=changes)
            cell = replace(cell, paced_samples_per_second=None)
            write_run(tmp_path / "two" / cell.name, cell, seconds + 0.01 * repetition)
    write_report([tmp_path / "two"], tmp_path / "report", [tmp_path / "two"])
    said = (tmp_path / "report" / "report.md").read_text()
    differences = re.findall(r"\| ([+-][0-9.]+ %) \| [^|]* to [^|]* \| (\w+) \|", said)
    assert differences == [("+0.0 %", "yes")] * 4


def test_efficiency_is_over_what_one_peer_of_the_same_system_makes(tmp_path):
    for system, seconds in (("swarm", {1: 4.0, 2: 2.5}), ("ddp", {2: 2.5})):
        for peers in seconds:
            cell = replace(CELL, system=system, peers=peers)
            write_run(tmp_path / "peers" / cell.name, cell, seconds[peers])
    table = throughput_table(Experiment(read(tmp_path / "peers"))).set_index("peers")
    assert table["our swarm, synchronous"][2] == "204.8 (n = 1); efficiency 0.80", "4 s alone would be 2 s for two"
    assert table["DDP, accumulated"][2] == "204.8 (n = 1); efficiency 0.51", "of 2 times 200 samples per second"


@pytest.mark.parametrize("change", [{"kill_at_step": 4}, {"last_joins_at_step": 4}])
def test_where_the_number_of_peers_changes_there_is_no_efficiency_and_no_limit(tmp_path, change):
    """One that is killed after four of ten updates computes nothing in the others."""
    for name, changes in (("all", {}), ("fewer", change)):
        cell = replace(CELL, peers=3, **changes)
        write_run(tmp_path / name / cell.name, cell)
    (every,), (fewer,) = (
        throughput_table(Experiment(read(tmp_path / name))).to_dict("records") for name in ("all", "fewer")
    )
    assert every["our swarm, synchronous"] == "256.0 (n = 1); efficiency 0.43"
    assert fewer["our swarm, synchronous"] == "256.0 (n = 1)"
    for limit in ("limit, overlapped fp16", "limit, synchronous fp16"):
        assert every[limit] is not None
        assert fewer[limit] is None
    said = {name: experiment_section(Experiment(read(tmp_path / name)), tmp_path) for name in ("all", "fewer")}
    captions_of = {name: section.figures[0][0] for name, section in said.items()}
    assert ("Grey lines" in captions_of["all"], "Grey lines" in captions_of["fewer"]) == (True, False)
    assert "neither an efficiency nor a limit is given" in " ".join(said["fewer"].text)
    assert "neither an efficiency nor a limit is given" not in " ".join(said["all"].text)


def test_communication_beside_computing_is_not_counted_twice(tmp_path):
    for rtt in (0, 100):
        cell = replace(CELL, system="swarm-overlap", rtt_ms=rtt)
        write_run(tmp_path / "hidden" / cell.name, cell, seconds=2.0, waiting=0.1)
    (part, _) = part_rows(Experiment(read(tmp_path / "hidden"))).to_dict("records")
    assert (part["compute"], part["meeting"], part["exchange"]) == pytest.approx((1.9, 0, 0))
    assert part["hidden"] == pytest.approx(0.1 + 0.3 - 0.1), "matchmaking and transfer, but for the wait"
    assert part["other"] == pytest.approx(0.1)


def test_a_report_shows_the_cost_of_a_death_for_the_remaining_peers(tmp_path):
    assert survivors_table(Experiment(read_of(tmp_path / "none", CELL))) is None
    cell = replace(CELL, peers=3, kill_at_step=6)
    write_run(tmp_path / "killed" / cell.name, cell, seconds=2.0)
    file = tmp_path / "killed" / cell.name / "runs/run/h1/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[6]["perf/swarm_samples_per_second"] = 512 / 7  # the update after the sixth took seven seconds
    for number, line in enumerate(lines[7:], 1):
        line["perf/swarm_samples_per_second"] = 512 / 3
        line["time"] += 5 + number
    lines[6]["time"] += 5
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = tmp_path / "killed" / cell.name
    write_json(folder / "result.json", measure(folder, cell, rounds_of(folder, cell)))
    (row,) = survivors_table(Experiment(read(tmp_path / "killed"))).to_dict("records")
    assert [*row.values()][1:] == ["2.0 (n = 1)", "7.0 (n = 1)", "256.0 (n = 1)", "170.7 (n = 1)"]


def read_of(folder: Path, cell):
    write_run(folder / cell.name, cell)
    return read(folder)


@pytest.mark.parametrize(("rate", "said"), [(200.0, "200"), (200, "200"), (None, "not paced")])
def test_the_report_says_what_was_paced(tmp_path, rate, said):
    """Rates are whole numbers in most experiments."""
    for system in ("swarm", "ddp"):
        cell = replace(CELL, system=system, repetition=1, paced_samples_per_second=rate)
        write_run(tmp_path / "paced" / cell.name, cell)
    experiment = Experiment(read(tmp_path / "paced"))
    (row,) = results_table([experiment]).to_dict("records")
    assert row["each paced to, samples/s"] == said
    text = " ".join(experiment_section(experiment, tmp_path).text)
    assert ("PACED: each peer pretended to compute 200 samples/s" in text) == (rate is not None)
    # two thirds of the 0.08 s of a micro-batch, over 2 s
    assert ("DDP's updates would take 2.7 % less time here at most" in text) == (rate is not None)


def test_the_benchmarks_say_what_pacing_takes_from_ddp():
    names = ("averaging", "continents", "delay_paced", "home_ddp", "peers", "unequal")
    kept = {name: Experiment(read(ROOT / "analysis" / "report" / f"{name}.jsonl")) for name in names}
    shares = {name: max(lost_shares(experiment)) for name, experiment in kept.items()}
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert f"{100 * min(shares.values()):.1f} to {100 * max(shares.values()):.1f} % less time" in text
    over_ddp = ratios(kept["peers"], "swarm-local-1-fp16", "ddp-fp16", "updates_per_second")
    ddp = kept["peers"].valid.query("system == 'ddp-fp16'").groupby("peers")["step_seconds"].mean()
    backward = 2 / 3 * CELL.batch_size / 40
    measured = [statistics.fmean(over_ddp[peers]) for peers in (2, 4)]
    (two, four) = (mean * (1 - backward / ddp[peers]) for mean, peers in zip(measured, (2, 4), strict=True))
    said = f"{two:.2f} and {four:.2f} times its updates, not {measured[0]:.2f} and {measured[1]:.2f}."
    assert said in text


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
    assert table["seconds to 50%"].tolist() == ["20.0 (1 of 1 reached it)"] * 2
    assert float(table["epoch, s"][0]) == pytest.approx(1797 * 0.7 / 256, rel=0.3), (
        "most of 1,797 digits are for training"
    )


def test_the_report_says_of_how_many_samples_updates_were(tmp_path):
    """All updates had 512."""
    for asked in (256, 512):
        changes = {"target_batch_size": asked, "validate_every_steps": 4}
        cell = replace(CELL, target_accuracy=0.5, paced_samples_per_second=None, changes=changes)
        write_run(tmp_path / "sizes" / cell.name, cell, top1=0.9)
    table = quality_table(Experiment(read(tmp_path / "sizes")))
    assert table["samples of an update (asked for)"].tolist() == ["512 (256)", "512 (512)"]
    write_report([tmp_path / "sizes"], tmp_path / "report")
    said = (tmp_path / "report" / "report.md").read_text()
    assert "0 to 100 % more here, most at sizes: samples per update = 256." in said


@pytest.mark.parametrize(
    ("spread", "said"),
    [(0.001, "+0.10 ± 0.11; shown"), (0.005, "+0.10 ± 0.57; not shown"), (0.02, "+0.10 ± 2.29; not shown")],
)
def test_that_few_bytes_learn_as_well_is_shown_or_not(tmp_path, spread, said):
    for system, bytes_per_sample in (("swarm-local-1-fp16", 3200.0), ("swarm-local-1-topk", 100.0)):
        for seed, fold in itertools.product(range(2), DIGITS_FOLDS):
            changes = {"seed": seed, "dataset": fold, "validate_every_steps": 4}
            cell = replace(CELL, system=system, repetition=1, target_accuracy=0.5, changes=changes)
            cell = replace(cell, paced_samples_per_second=None)
            write_run(folder := tmp_path / "few" / cell.name, cell)
            result = measure(folder, cell, rounds_of(folder, cell)) | {"bytes_per_sample": bytes_per_sample}
            top1 = 0.95 + 0.01 * int(fold[-1]) + (0.001 + spread * (-1) ** seed if "topk" in system else 0.0)
            quality = dict.fromkeys(("top1", "macro_f1", "precision", "recall"), top1)
            write_json(folder / "result.json", result | quality)
    (row,) = equivalence_table(Experiment(read(tmp_path / "few"))).to_dict("records")
    assert row["system"] == SYSTEMS["swarm-local-1-topk"].label
    assert (row["pairs"], row["bytes per sample, share of those"]) == (10, "1/32")
    # Student's 1.833 for nine degrees of freedom, and 1 / 10 + 1 / 4 of the variance, since folds share samples
    assert f"{row['accuracy, points more']}; {row['the same within 0.5 points']}" == said


@pytest.mark.parametrize(("seeds", "said"), [((0, 1), (2, "+1.00")), ((0,), (1, "+1.00")), ((2,), (0, None))])
def test_fewer_than_three_pairs_have_no_interval(tmp_path, seeds, said):
    for system, of_system, top1 in (("ddp", (0, 1), 0.9), ("swarm", seeds, 0.91)):
        for seed in of_system:
            cell = replace(CELL, system=system, target_accuracy=0.5, paced_samples_per_second=None)
            cell = replace(cell, changes={"seed": seed})
            write_run(folder := tmp_path / "few" / cell.name, cell, top1=top1)
            result = json.loads((folder / "result.json").read_text())
            write_json(folder / "result.json", result | {"bytes_per_sample": 3200.0 if system == "ddp" else 100.0})
    (row,) = equivalence_table(Experiment(read(tmp_path / "few"))).to_dict("records")
    assert (row["pairs"], row["accuracy, points more"]) == said
    assert row["the same within 0.5 points"] == "not shown"


def test_repetitions_with_the_same_seed_are_one_pair(tmp_path):
    points = {0: (0.2, 0.4), 1: (-0.2, 0.0), 2: (0.1, 0.1)}
    for system, bytes_per_sample in (("ddp", 3200.0), ("swarm", 3100.0)):
        for seed, repetition in itertools.product(points, (1, 2)):
            cell = replace(CELL, system=system, repetition=repetition, target_accuracy=0.5, changes={"seed": seed})
            cell = replace(cell, paced_samples_per_second=None)
            write_run(folder := tmp_path / "texts" / cell.name, cell)
            top1 = 0.9 + (points[seed][repetition - 1] / 100 if system == "swarm" else 0.0)
            quality = dict.fromkeys(("top1", "macro_f1", "precision", "recall"), top1)
            result = json.loads((folder / "result.json").read_text()) | {"bytes_per_sample": bytes_per_sample}
            write_json(folder / "result.json", result | quality)
    (row,) = equivalence_table(Experiment(read(tmp_path / "texts"))).to_dict("records")
    # 0.3, -0.1 and 0.1: Student's 2.920 for two degrees of freedom times 0.2, over the root of 3
    assert (row["pairs"], row["accuracy, points more"]) == (3, "+0.10 ± 0.34")
    said = " ".join(experiment_section(Experiment(read(tmp_path / "texts")), tmp_path).text)
    assert "is about other seeds, and not about other samples" in said


def test_accuracies_of_one_seed_count_once(tmp_path):
    """Seeds with 90, 92 and 94 %, each run twice, and the only seed of another system, run three times."""
    for seed, repetition in itertools.product(range(3), (1, 2)):
        cell = replace(CELL, repetition=repetition, target_accuracy=0.5, changes={"seed": seed})
        cell = replace(cell, paced_samples_per_second=None)
        write_run(tmp_path / "seeds" / cell.name, cell, top1=0.9 + 0.02 * seed + 0.001 * (-1) ** repetition)
    for repetition in (1, 2, 3):
        cell = replace(cell, system="swarm-overlap", repetition=repetition)
        write_run(tmp_path / "seeds" / cell.name, cell, top1=0.9)
    experiment = Experiment(read(tmp_path / "seeds"))
    rows = {row["system"]: row for row in quality_table(experiment).to_dict("records")}
    # Student's 4.303 for two degrees of freedom times 0.02, over the root of 3
    sure, unsure = rows["our swarm, synchronous"], rows[SYSTEMS["swarm-overlap"].label]
    assert (sure["n"], sure["accuracy"], sure["macro_f1"]) == (3, "0.9200 ± 0.0497", "0.9200 ± 0.0497")
    assert (unsure["n"], unsure["accuracy"]) == (1, "0.9000")
    assert "our swarm, synchronous 92.0 ± 5.0 (n = 3)" in " ".join(answer(experiment))
    assert f"{SYSTEMS['swarm-overlap'].label} 90.0 (n = 1)" in " ".join(answer(experiment))


def test_cells_are_measured_again_from_their_files(experiment, capsys):
    file = experiment / replace(CELL, rtt_ms=0, repetition=1).name / "result.json"
    result = json.loads(file.read_text())
    write_json(file, result | {"samples_per_second": 1.0, "earlier_problems": ["late"]})
    assert analysis.main(["measure", str(experiment)]) == 1, "one is invalid"
    assert json.loads(file.read_text()) == result | {"earlier_problems": ["late"]}
    assert "broken: failed by itself: an average was partial" in capsys.readouterr().out
    assert analysis.main(["measure", str(experiment / "nothing")]) == 2


def test_folders_without_results_are_refused_in_one_sentence(tmp_path, capsys):
    assert analysis.main(["report", str(tmp_path), "-o", str(tmp_path / "out")]) == 2
    assert "holds no finished cells" in capsys.readouterr().err
    assert analysis.main(["run", "everything"]) == 2
    assert "There is no experiment everything: give accuracy" in capsys.readouterr().err


def test_a_broken_cell_is_refused_in_one_sentence(experiment, capsys):
    (next(experiment.glob("swarm*")) / "cell.json").write_text('{"nothing": 1}')
    assert analysis.main(["measure", str(experiment)]) == 2
    assert "cell of another version" in capsys.readouterr().err
