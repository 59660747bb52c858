"""An experiment as a user would run it: namespaces, programs, what they measured, the table."""

import json

import pytest

from analysis import __main__ as analysis
from analysis.wan import sandbox
from recipe.errors import InputError


def test_a_swarm_is_started_in_the_lab_and_measured(tmp_path, capsys):
    """The whole way once: grid, namespaces, two peers as a user would start them, their metrics, the table."""
    try:
        sandbox.wrapped([])
    except InputError as error:
        pytest.skip(str(error))
    grid = tmp_path / "small.toml"
    settings = 'recipe = "digits"\ndepth = 1\nsteps = 4\nwarm_up_steps = 1\nbatch_size = 32\nrtt_ms = 20'
    settings += '\ncongestion_control = "reno"'
    grid.write_text(f'question = "Does it run?"\n[cell]\n{settings}\n[grid]\nsystem = ["swarm"]\n')
    command = ["run", str(grid), "--output-dir", str(tmp_path), "--paced-samples-per-second", "500"]
    status = analysis.main(command)
    printed = capsys.readouterr().out
    (folder,) = (tmp_path / "small").glob("*/")
    found = json.loads((folder / "result.json").read_text())
    assert found.get("samples_per_second", 0) > 100, found["problems"]
    assert found["bytes_per_sample"] > 100
    assert found["congestion_control"] == "reno"
    assert found["home"]["whole_updates"] >= 1, "the rounds that the peers wrote down are found"
    assert set(found["home"]["start"]["parts"]) == {"h1", "h2"}
    assert all("state" in parts for parts in found["home"]["start"]["parts"].values())
    assert [item["step"] for item in found["all_rounds"]] == [1, 2, 3, 4]
    assert {item["peers"] for item in found["all_rounds"]} == {2}
    of_the_machine = ("the machine was saturated", "other programs", "the router was late")
    assert all(problem.startswith(of_the_machine) for problem in found["problems"]), "what a busy machine may do to it"
    assert status == (1 if found["problems"] else 0)
    analysis.main(command)
    assert "1 of 1 cells have a result already" in capsys.readouterr().out
    assert "our swarm, synchronous, 2 peers, 20 ms" in printed
    assert min(found["machine_gflops"]) > 0
