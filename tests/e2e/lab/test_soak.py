"""Faults on an emulated internet, and how a soak judges what it saw."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.endurance import soak
from analysis.endurance.soak_result import HANG_SECONDS, Event, hangs, rows, summarise, summarise_stock, table
from analysis.endurance.volunteers import StockVolunteer
from analysis.reporting.fault_sections import SOAKS, side_by_side, soak_section
from analysis.wan import sandbox
from analysis.wan.topology import uniform
from recipe.errors import InputError
from recipe.run_folder import RunFolder
from tests.helpers.cli import Program, reaping

pytestmark = pytest.mark.timeout(700)
MOMENTS = {"h1": [*range(1, 11), *range(14, 31)], "h2": [*range(1, 11), *range(20, 31)]}
"""Times of updates, one in a second; none from 10 to 14, and the victim is back at 20."""

END = 30.0
"""The peers were told to leave right after the last update."""


@pytest.fixture
def runs(tmp_path) -> Path:
    """The folder of a run with these updates."""
    for name, times in MOMENTS.items():
        folder = RunFolder.create(tmp_path, "soak", name)
        lines = [
            {"time": t, "step": times.index(t) + 1, "swarm/peers": 2, "swarm/own_samples": 9, "val/top1": 0.9}
            for t in times
        ]
        if name == "h2":
            lines = [line | {"step": MOMENTS["h1"].index(line["time"]) + 1} for line in lines]
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "soak"


@pytest.fixture
def calm(tmp_path) -> RunFolder:
    """The folder of a peer that met no fault."""
    return RunFolder.create(tmp_path, "calm", "calm")


def test_what_a_swarm_lost_by_a_fault(runs, calm):
    calm.metrics.write_text(
        '{"step": 10, "val/top1": 0.8}\n{"step": 20, "val/top1": 1.0}\n{"step": 99, "val/top1": 1.0}\n'
    )
    event, next_one = Event("killed", ["h2"], began=10.5, mended=13.5), Event("frozen", ["h1"], began=13.8, mended=15.0)
    found = summarise(runs, [event, next_one], 27, {"h1": "a", "h2": "a"}, [], [calm, calm], [], {"calm_runs": 2}, END)
    assert [event["stall_seconds"] for event in found["events"]] == [3, 0], "the later one met a swarm that stood still"
    assert found["events"][0]["back_seconds"] == pytest.approx(6.5)
    assert (found["updates"], found["usual_seconds"], found["problems"]) == (27, 1, [])
    assert (found["validated_steps"], found["accuracy"], found["calm_accuracies"]) == ([10, 20], 0.9, [0.9, 0.9])
    assert table(found).row_count == 2
    assert table(found).title.endswith("until update 20); not judged: 2 of 10 validations")
    alone = {row["fault"]: row["of these, begun when all were there"] for row in rows(found)}
    assert alone == {"killed": "1", "frozen": "0"}, "the victim of the first one was not back"
    divided = Event("network divided", ["h1", "h2"], began=10.5, mended=13.5)
    found = summarise(runs, [divided], 27, {"h1": "a", "h2": "a"}, [], [calm, calm], [], options={}, ended=END)
    assert found["problems"] == ["network divided (h1, h2): not back"], "they only trained with each other"


def test_a_swarm_that_stood_still_for_long_hung():
    stalls = [Event("frozen", ["h1"], stall_seconds=HANG_SECONDS + more) for more in (0.0, 7.0)]
    assert hangs(stalls) == ["frozen (h1): no new update for 127 s"]


def test_a_fault_that_stops_the_swarm_for_good_is_a_hang(runs):
    first, last = Event("killed", ["h2"], began=10.5, mended=13.5), Event("frozen", ["h1"], began=30.5, mended=40.0)
    found = summarise(runs, [first, last], 0, {}, [], [], [], {}, ended=200.0)
    assert [event["stall_seconds"] for event in found["events"]] == [3, 169]
    stock = summarise_stock({name: RunFolder(runs / name) for name in MOMENTS}, [first, last], [], [], {}, ended=200.0)
    hang = "frozen (h1): no new update for 169 s"
    assert hang in found["problems"]
    assert hang in stock["problems"]


@pytest.mark.parametrize("updates", [0, 1])
def test_a_swarm_with_hardly_an_update_has_a_result_too(tmp_path, updates):
    folder = RunFolder.create(tmp_path, "soak", "h1")
    folder.metrics.write_text('{"time": 10, "step": 1, "swarm/peers": 2, "swarm/own_samples": 9}\n' * updates)
    event = Event("killed", ["h1"], began=10.5, mended=13.5)
    for found in (
        summarise(folder.path.parent, [event], 0, {}, [], [], [], {}, ended=200.0),
        summarise_stock({"h1": folder}, [event], [], [], {}, ended=200.0),
    ):
        assert "killed (h1): not back" in found["problems"]
        assert found["events"][0]["stall_seconds"] == 190 * updates
        assert (found["updates"], table(found).row_count) == (updates, 1)


def test_what_is_not_good_is_said_and_compared_with_hiveminds(tmp_path, runs, calm):
    calm.metrics.write_text("".join(f'{{"step": {step}, "val/top1": 0.95}}\n' for step in range(11, 21)))
    event = Event("killed", ["h3"], began=10.5, mended=13.5)
    found = summarise(runs, [event], 27, {"h1": "a", "h2": "b"}, ["h1"], [calm], [], options={}, ended=END)
    assert len(found["problems"]) == 4, "not back, other weights, processes left, less accurate"
    lost = summarise(runs, [event], 0, {}, [], [], ["they never trained again"], options={}, ended=END)
    assert lost["problems"][0] == "they never trained again"

    (tmp_path / "soak.json").write_text(json.dumps(found | {"options": vars(soak.SoakOptions()) | {"output_dir": ""}}))
    (tmp_path / "report").mkdir()
    section = soak_section(tmp_path / "soak.json", tmp_path / "report")
    assert len(section["tables"][0][1]) == 1
    assert sum("Not good" in line for line in section["text"]) == 4
    assert (tmp_path / "report" / "soak.json").exists()

    other = found | {"options": found["options"] | vars(soak.SoakOptions(system="hivemind")) | {"output_dir": ""}}
    other["events"] = [event | {"fault": "frozen"} for event in found["events"]]
    (tmp_path / "soak-hivemind.json").write_text(json.dumps(other))
    ((_, both),) = side_by_side([tmp_path / name for name in SOAKS])["tables"]
    assert both["fault"].tolist() == ["frozen", "killed"]
    assert both["ours: times"].tolist() == ["–", "1"]
    assert both["Hivemind's: times"].tolist() == ["1", "–"]


@pytest.mark.parametrize(
    ("validations", "problems", "said"),
    [
        (10, ["accuracy 0.900, without faults 0.950"], "(means of 10 validations until update 10)"),
        (9, [], "(means of 9 validations until update 9); not judged: 9 of 10 validations"),
        (0, ["no step until 27 was validated both with"], "accuracy not judged: 0 of 10 validations"),
    ],
)
def test_accuracies_are_judged_where_there_are_enough_of_them(runs, calm, validations, problems, said):
    lines = [f'{{"step": {step}, "val/top1": 0.95}}\n' for step in range(1, validations + 1)]
    calm.metrics.write_text("".join(lines))
    event = Event("killed", ["h2"], began=10.5, mended=13.5)
    found = summarise(runs, [event], 27, {}, [], [calm], [], options={"calm_runs": 1}, ended=END)
    assert len(found["problems"]) == len(problems)
    assert all(one.startswith(begin) for one, begin in zip(found["problems"], problems, strict=True))
    assert table(found).title.endswith(said)


def test_a_victim_of_hiveminds_swarm_that_is_not_back_is_a_problem(runs):
    event = Event("killed", ["h3"], began=10.5, mended=13.5)
    found = summarise_stock({name: RunFolder(runs / name) for name in MOMENTS}, [event], [], [], options={}, ended=END)
    assert found["problems"] == ["killed (h3): not back"]
    assert found["usual_seconds"] == 1
    assert table(found).row_count == 1


def test_bad_options_are_refused(capsys):
    ours = (["--system", "hivemind", "--codec", "fp16"], ["--outbound-only", "4"])
    for arguments in (["--minutes", "0"], ["--peers", "2"], ["--every-seconds", "1"], ["--faults", "rain"], *ours):
        assert soak.main(arguments) == 2
        assert capsys.readouterr().err.startswith("error: --")


def test_a_volunteer_of_hivemind_waits_for_the_others_only_once(tmp_path):
    """A volunteer that comes back must not wait for those that have been training all the time."""
    lab = SimpleNamespace(hosts=uniform(3, 100, 100).hosts)
    volunteer = StockVolunteer(lab.hosts[0], lab, tmp_path, 60.0, num_peers=3)
    words = volunteer.command(None)
    assert words[words.index("--peers") + 1] == "3"
    volunteer.folder.metrics.parent.mkdir(parents=True)
    volunteer.folder.metrics.write_text("")
    words = volunteer.command("/ip4/10.77.0.2/tcp/1")
    assert words[words.index("--peers") + 1] == "1"


@pytest.mark.long
def test_a_swarm_gets_over_some_faults(tmp_path):
    try:
        sandbox.wrapped([])
    except InputError as error:
        pytest.skip(str(error))
    options = ["--minutes", "0.4", "--every-seconds", "10", "--peers", "3", "--calm-runs", "0"]
    options += ["--output-dir", str(tmp_path)]
    with reaping() as programs:
        programs.append(program := Program("analysis", ["soak", *options], tmp_path / "log"))
        status = program.wait(680)
        found = json.loads((tmp_path / "soak.json").read_text())
        assert found["problems"] == [], program.output
        assert status == 0
        assert len(found["events"]) >= 2
        assert len(set(found["weights"].values())) == 1
