"""Experiments: grids, gates, measurements and the model, against values computed by hand."""

import json
import math
import shutil
from dataclasses import replace

import pytest

from analysis.campaigns.cells import Cell, load_grid, network_of, shipped_grids
from analysis.campaigns.measure import failed_by_itself, measure, measured_rounds, problems, rounds_of
from analysis.campaigns.payload import payload_bytes
from analysis.campaigns.statistics import equivalence
from analysis.campaigns.systems import SYSTEMS, check_learning, samples_between_validations, swarm, system_of
from analysis.reporting.archive import read
from analysis.reporting.results import Experiment, doubling, interval, limits, transfer_seconds
from analysis.reporting.round_model import Measured, RoundCosts, Swarm, fit, simulate, wire_seconds
from analysis.wan.lab import TOPOLOGY
from analysis.wan.topology import SHIPPED
from recipe.config import Recipe
from recipe.errors import InputError
from recipe.optimizer import lr_factor
from recipe.run_folder import RunFolder
from tests.helpers.measured_cells import CELL, write_run

# ---- grids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_grids())
def test_shipped_experiments_have_cells_that_can_run(name):
    cells = list(load_grid(name).cells(repeat=3))
    assert len({cell.name for cell in cells}) == len(cells)
    assert [cell.repetition for cell in cells] == sorted(cell.repetition for cell in cells), "interleaved"
    for cell in cells:
        assert Cell.from_json(cell.to_json()) == cell
        check_learning(cell)
        if cell.kill_at_step is None:
            assert system_of(cell) is SYSTEMS[cell.system]


def test_systems_run_forwards_and_backwards_in_turn():
    """Otherwise a machine that slows down would favour the same system each time."""
    orders: dict[tuple, list[str]] = {}
    for cell in load_grid("accuracy").cells(repeat=2):
        orders.setdefault((cell.repetition, cell.changes["seed"], cell.rtt_ms), []).append(cell.system)
    forwards = orders[1, 0, 0]
    assert sorted(forwards) == ["ddp-fp16", "swarm-local", "swarm-local-1-fp16"]
    for rtt_ms in (0, 100, 200):
        of_setting = [order for (_, _, rtt), order in orders.items() if rtt == rtt_ms]
        assert (of_setting.count(forwards), of_setting.count(forwards[::-1])) == (3, 3)


def test_a_cell_can_be_rebuilt_when_the_file_of_its_topology_is_gone(tmp_path):
    file, folder = tmp_path / "mine.toml", tmp_path / "cell"
    shutil.copy(SHIPPED / "home.toml", file)
    cell, other = replace(CELL, topology=str(file)), replace(CELL, topology="campus")
    folder.mkdir()
    assert network_of(cell, folder) == cell.network()
    (folder / TOPOLOGY).write_text(cell.network().to_json())
    before = cell.network()
    file.unlink()
    assert network_of(Cell.from_json(cell.to_json()), folder) == before != other.network()
    (folder / TOPOLOGY).write_text("{")
    with pytest.raises(InputError, match="There is no topology"):
        network_of(cell, folder)


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
        ("grid = 5", r"grid is no table: write \[grid\]"),
        ("cell = 5", r"cell is no table: write \[cell\]"),
        ('question = 5\n[grid]\nsystem = ["ddp"]', "question is no text"),
        ("[grid]\nsystem = []", "system has no values, so there is no cell"),
        ('[cell]\nsteps = 8\nkill_at_step = 8\n[grid]\nsystem = ["swarm"]', "less than the 8 steps"),
        ('[cell]\nsteps = 8\nkill_at_step = 0\n[grid]\nsystem = ["swarm"]', "kill_at_step is at least 1"),
        ('[cell]\npeers = 1\nkill_at_step = 4\n[grid]\nsystem = ["swarm"]', "needs at least 2 peers"),
        ('[grid]\nsystem = [["ddp"]]', r"system is \['ddp'\]: give a text"),
    ],
)
def test_a_grid_that_cannot_work_is_refused(tmp_path, text, problem):
    file = tmp_path / "grid.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=problem):
        load_grid(str(file))


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("target_accuracy = 95", "target_accuracy is 95: give a fraction up to 1, such as 0.95"),
        ('target_accuracy = "x"', "target_accuracy is 'x': give a number or \"none\""),
        ("steps = 3.5", "steps is 3.5: give a whole number"),
        ("peers = true", "peers is True: give a whole number"),
        ('time_limit_seconds = "x"', "time_limit_seconds is 'x': give a number"),
        ("time_limit_seconds = 0", "time_limit_seconds has to be more than 0"),
        ("paced_samples_per_second = inf", "paced_samples_per_second is inf: give a finite number"),
        ("congestion_control = 4", "congestion_control is 4: give a text"),
        ("topology = 5", "topology is 5: give a text"),
        ("changes = 3", "changes is 3: give a table"),
    ],
)
def test_a_value_that_no_cell_can_have_is_refused(tmp_path, setting, problem):
    """It is refused before the first run, which may take hours."""
    file = tmp_path / "grid.toml"
    file.write_text(f'[cell]\n{setting}\n[grid]\nsystem = ["swarm"]')
    with pytest.raises(InputError, match=problem):
        load_grid(str(file))


def test_time_to_an_accuracy_is_measured_as_finely_for_all_systems():
    for every in (4, 8):
        cells = [
            replace(CELL, system=system, target_accuracy=0.9, changes={"validate_every_steps": every})
            for system in ("swarm", "swarm-local-1-fp16", "swarm-local", "torchft-diloco-4")
        ]
        assert {samples_between_validations(cell) for cell in cells} == {every * 512}
    uneven = replace(cells[-2], changes={"validate_every_steps": 5})
    with pytest.raises(InputError, match="set validate_every_steps to a multiple of 4"):
        check_learning(uneven)
    check_learning(replace(uneven, target_accuracy=None))
    assert system_of(uneven) is SYSTEMS["swarm-local"], "those of earlier reports can be read"
    assert samples_between_validations(uneven) == 2048


@pytest.mark.parametrize("name", shipped_grids())
def test_a_system_that_learns_is_warmed_up_by_as_many_samples_as_ddp(name, tmp_path):
    """A quarter of five updates, rounded down, would be one, which is no warm-up. Three quarters would be lost."""
    for cell in (cell for cell in load_grid(name).cells() if cell.target_accuracy is not None):
        asked, own = cell.full_recipe(), recipe_of_command(cell, tmp_path)
        local = own.target_batch_size // asked.target_batch_size
        lost, own_lost = (
            sum(1 - lr_factor(recipe, step) for step in range(recipe.warmup_steps)) for recipe in (asked, own)
        )
        assert local * own_lost == pytest.approx(lost), "full learning rates, counted in updates of DDP"


def recipe_of_command(cell: Cell, folder) -> Recipe:
    """The recipe that the command line of a swarm's first host makes of the preset.

    For other systems it is the cell's.
    """
    system, host = SYSTEMS[cell.system], cell.network().hosts[0]
    if system.command is not swarm:
        return cell.full_recipe()
    words = swarm(system, cell, host, host, folder, ())
    fields = ("target_batch_size", "total_steps", "warmup_steps")
    given = [name for name in fields if f"--{name.replace('_', '-')}" in words]
    values = {name: int(words[words.index(f"--{name.replace('_', '-')}") + 1]) for name in given}
    return replace(cell.full_recipe(), **values)


def test_a_warm_up_that_local_steps_cannot_keep_is_refused():
    cell = replace(CELL, system="swarm-local", target_accuracy=0.9, changes={"validate_every_steps": 4})
    for updates in (0, 5, 9):
        check_learning(replace(cell, changes=cell.changes | {"warmup_steps": updates}))
    other = replace(cell, changes=cell.changes | {"warmup_steps": 8})
    with pytest.raises(InputError, match="set warmup_steps to 0, or to a multiple of 4 and one more"):
        check_learning(other)
    for allowed in ("swarm", "ddp", "swarm-local-1-fp16", "torchft-diloco-4"):
        check_learning(replace(other, system=allowed))
    check_learning(replace(other, target_accuracy=None))


def test_a_grid_in_another_encoding_is_refused(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_bytes('question = "Über was?"'.encode("latin-1"))
    with pytest.raises(InputError, match="is no TOML"):
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


def test_a_result_holds_the_warm_up_that_its_host_had(tmp_path):
    write_run(tmp_path, CELL)
    rounds = rounds_of(tmp_path, CELL)
    assert measure(tmp_path, CELL, rounds)["own_warmup_steps"] is None
    RunFolder(tmp_path / "runs/run/h1").write_recipe(replace(CELL.full_recipe(), warmup_steps=2))
    assert measure(tmp_path, CELL, rounds)["own_warmup_steps"] == 2


def test_lines_of_ddp_that_were_written_late_are_put_on_time(tmp_path):
    cell = replace(CELL, system="ddp")
    file = tmp_path / "runs/run/h1/metrics.jsonl"
    file.parent.mkdir(parents=True)
    common = {"perf/step_seconds": 10.0, "perf/samples_per_second": 51.2}
    lines = [{"time": 1000 + min(10 * step + 10, 30), "step": step, **common} for step in (1, 2, 3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [item.ended_at for item in rounds_of(tmp_path, cell)] == [1010, 1020, 1030]
    assert [item.ended_at for item in rounds_of(tmp_path, replace(cell, peers=1))] == [1020, 1030, 1030], "one: at once"
    validated = [lines[0], {**lines[1], "time": 1020}, {"time": 1025, "step": 2, "val/top1": 0.5}]
    validated.append({**lines[2], "time": 1035})
    file.write_text("".join(json.dumps(line) + "\n" for line in validated))
    assert [item.ended_at for item in rounds_of(tmp_path, cell)] == [1010, 1020, 1035], "a validation of 5 s between"


def test_a_validation_after_an_update_is_no_part_of_it(tmp_path):
    write_run(tmp_path, CELL)
    before = json.loads((tmp_path / "result.json").read_text())
    with (tmp_path / "runs/run/h1/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1029.0, "step": CELL.steps, "val/top1": 0.5}) + "\n")
    found = measure(tmp_path, CELL, rounds_of(tmp_path, CELL))
    assert found["all_rounds"] == before["all_rounds"]
    assert found["top1"] == 0.5


def test_an_update_after_a_validation_does_not_count_for_the_speed(tmp_path):
    cell = replace(CELL, target_accuracy=0.95)
    write_run(tmp_path, cell, top1=0.9)
    file = tmp_path / "runs/run/h1/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines if "val/top1" in line] == [4]
    for line in lines:
        if line["step"] == 5:
            line["perf/swarm_samples_per_second"] = 512 / 8  # the update takes four times as long
    lines.append({"time": 1017.0, "step": 8, "val/top1": 0.97})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measure(tmp_path, cell, rounds_of(tmp_path, cell))
    assert [item["step"] for item in found["all_rounds"] if item["follows_validation"]] == [5, 9]
    assert found["rounds"] == 6, "two of ten are warm-up, two follow a validation"
    assert found["samples_per_second"] == pytest.approx(256)
    assert found["seconds_to_accuracy"] == pytest.approx(8 * 2)
    assert found["problems"] == [], "nor are its seconds compared with the clock's"


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


def test_a_part_that_another_host_has_lost_makes_a_cell_invalid(tmp_path):
    write_run(tmp_path, CELL)
    shutil.copytree(tmp_path / "runs/run/h1", tmp_path / "runs/run/h2")
    assert measure(tmp_path, CELL, rounds_of(tmp_path, CELL))["received"] == 1
    file = tmp_path / "runs/run/h2/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[-1]["round/parts_received_fraction"] = 0.75
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measure(tmp_path, CELL, rounds_of(tmp_path, CELL))
    assert found["problems"] == ["an average was partial: 75.0% of its parts arrived"]


def test_an_average_that_was_too_small_for_its_bytes_is_invalid(tmp_path):
    for rtt, rate in ((0, 100_000), (20, 10_000_000)):
        cell = replace(CELL, rtt_ms=rtt)
        write_run(tmp_path / "bytes" / cell.name, cell, rate=rate)
    cells = Experiment(read(tmp_path / "bytes")).cells.set_index("rtt_ms")
    assert cells.loc[20, "problems"] == []
    (problem,) = cells.loc[0, "problems"]
    needed = 2 * payload_bytes(CELL) * 7.5 / 1e6  # of eight updates after the warm-up, half a one may be on its way
    assert problem == f"averages were partial: 3.2 of {needed:.1f} MB crossed the network"


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


def test_a_cell_without_a_watch_of_the_machine_and_the_router_is_invalid(tmp_path):
    write_run(tmp_path, CELL)
    (tmp_path / "watch.jsonl").unlink()
    found = measure(tmp_path, CELL, rounds_of(tmp_path, CELL))
    assert found["problems"] == ["the machine was not watched meanwhile"]
    write_run(tmp_path, CELL)
    (tmp_path / "router.jsonl").write_text("")
    found = measure(tmp_path, CELL, rounds_of(tmp_path, CELL))
    assert found["problems"] == ["the router was not watched meanwhile"]


@pytest.mark.parametrize("target", [None, 0.95])
def test_seconds_that_are_not_those_of_the_clock_make_a_cell_invalid(tmp_path, target):
    """A system's own statement of its speed is checked against the clock, except beside a validation."""
    cell = replace(CELL, target_accuracy=target)
    write_run(tmp_path, cell, top1=target and 0.97)
    file = tmp_path / "runs/run/h1/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line | {"perf/swarm_samples_per_second": 512}) + "\n" for line in lines))
    found = measure(tmp_path, cell, rounds_of(tmp_path, cell))
    assert found["problems"] == ["by its own account its updates took 50% of the time that passed between their ends"]
    assert not failed_by_itself(found["problems"]), "the machine's clock may have been set, or have stood still"


def test_an_update_without_the_first_peer_makes_a_cell_invalid(tmp_path):
    write_run(tmp_path, CELL)
    file = tmp_path / "runs/run/h1/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    caught_up = {"perf/step_seconds": 2.0, "perf/samples_per_second": 256.0}
    lines[5] = {"time": lines[5]["time"], "step": 6, **caught_up}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measure(tmp_path, CELL, rounds_of(tmp_path, CELL))
    assert found["problems"] == ["the first peer was not there in 1 updates"]


def test_an_update_that_a_peer_of_hivemind_has_not_made_makes_a_cell_invalid(tmp_path):
    """Each peer knows its own samples only. A peer without samples in an update was not there."""
    cell = replace(CELL, system="hivemind", steps=4, warm_up_steps=1)
    for host, steps in (("h1", (1, 2, 3, 4)), ("h2", (1, 2, 4))):
        file = tmp_path / "runs" / "run" / host / "metrics.jsonl"
        file.parent.mkdir(parents=True)
        lines = [{"time": 10 + step, "step": step, "swarm/own_samples": 256, "perf/step_seconds": 1} for step in steps]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rounds = rounds_of(tmp_path, cell)
    assert [(item.samples, item.peers) for item in rounds] == [(512, 2), (512, 2), (256, 1), (512, 2)]
    numbers = {"busy_cores": 1.0, "lab_cores": 1.0, "received": None}
    assert problems(cell, rounds, numbers) == ["only 1 of 2 peers took part in an update"]


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
    assert doubling(compute=4.0, communication=1.0, rest=1.0) == pytest.approx(6 / 4)
    assert doubling(compute=4.0, communication=1.5, overlaps=True) == pytest.approx(2.0)
    assert doubling(compute=4.0, communication=3.0, overlaps=True) == pytest.approx(4 / 3)
    assert doubling(compute=4.0, communication=5.0, overlaps=True) == pytest.approx(1.0), "all of it waits already"


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


def test_costs_that_a_line_puts_below_zero_take_no_time():
    below = RoundCosts(meeting=-1.0, meeting_rtts=0.0, exchange=-2.0, exchange_rtts=0.0)
    assert simulate(SWARM, below) == pytest.approx((1024 + 16) / (528 / 80))


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


@pytest.mark.parametrize(
    ("differences", "is_shown"),
    [
        ([0.1, -0.1, 0.2, -0.2, 0.0, 0.0], True),
        ([0.44, 0.46, 0.45, 0.47, 0.43, 0.45], True),
        ([-0.49, -0.51, -0.50, -0.52, -0.48, -0.50], False),  # certainly a difference, and of exactly that size
        ([0.55, 0.56, 0.54, 0.55, 0.55, 0.56], False),
        ([0.8, -0.8, 0.9, -0.9, 0.7, -0.7], False),  # none was found, because nothing is known
        ([0.6, -0.5, 0.55, -0.5, 0.5, -0.6], True),  # ± 0.49: the 95 % interval would be ± 0.62
        ([0.0, 0.0, 0.0, 0.0], False),  # few, and all alike by chance
    ],
)
def test_that_there_is_no_difference_to_speak_of_is_shown_or_not(differences, is_shown):
    assert equivalence(differences, 0.5).is_shown == is_shown


def test_folds_that_share_training_samples_show_less():
    differences = [0.44, 0.46, 0.45, 0.47, 0.43]
    independent, folds = equivalence(differences, 0.5), equivalence(differences, 0.5, 0.25)
    assert folds.half_width == pytest.approx(1.5 * independent.half_width), "1 / 5 + 1 / 4 is 9 / 4 of 1 / 5"
    assert (independent.is_shown, folds.is_shown) == (True, True)
    assert not equivalence([0.4, 0.5, 0.35, 0.45, 0.4], 0.5, 0.25).is_shown
    assert equivalence([0.4, 0.5, 0.35, 0.45, 0.4], 0.5).is_shown
