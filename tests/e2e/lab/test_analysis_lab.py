"""An experiment as a user would run it: namespaces, programs, their measurements, the table."""

import json

import pytest

from analysis import __main__ as analysis
from analysis.wan import sandbox
from recipe.errors import InputError
from recipe.run_folder import read_metrics


@pytest.mark.long
def test_a_swarm_is_started_in_the_lab_and_measured(tmp_path, capsys):
    """Everything runs once: grid, namespaces, peers as a user would start them, their metrics, the table.

    The last peer starts after an update of the others: it finds a training swarm, and the cell contains the cost of its
    joining."""
    try:
        sandbox.wrapped([])
    except InputError as error:
        pytest.skip(str(error))
    grid = tmp_path / "late.toml"
    settings = 'recipe = "digits"\ndepth = 1\npeers = 3\nsteps = 20\nrtt_ms = 20\npaced_samples_per_second = 50'
    settings += '\nbatch_size = 32\ntarget_batch_size = 256\nlast_joins_at_step = 2\ncongestion_control = "reno"'
    grid.write_text(f'question = "Late?"\n[cell]\n{settings}\n[grid]\nsystem = ["swarm-local-1-fp16"]\n')
    command = ["run", str(grid), "--output-dir", str(tmp_path)]
    status = analysis.main(command)
    printed = capsys.readouterr().out
    (folder,) = (tmp_path / "late").glob("*/")
    found = json.loads((folder / "result.json").read_text())
    assert found.get("samples_per_second", 0) > 0, found["problems"]
    assert found["bytes_per_sample"] > 100
    assert found["congestion_control"] == "reno"
    assert min(found["machine_gflops"]) > 0
    home = found["home"]
    assert home["whole_updates"] >= 1, "the rounds that the peers wrote down are found"
    assert set(home["start"]["parts"]) == {"h1", "h2", "h3"}
    assert all("state" in parts for parts in home["start"]["parts"].values())
    assert [item["step"] for item in found["all_rounds"]] == list(range(1, 21))
    assert {item["peers"] for item in found["all_rounds"]} <= {2, 3}

    started = json.loads((folder / "started.json").read_text())
    metrics = read_metrics(folder / "runs/run/h1/metrics.jsonl")
    second_update = next(line["time"] for line in metrics if line["step"] == 2)
    assert max(started["h1"], started["h2"]) < second_update < started["h3"]
    assert home["updates"][0]["groups"] == [["h1", "h2"]], "no peer waited for it"
    late = home["late"]
    assert late["first_step"] > 2, found["problems"]
    assert late["parts"]["state"] > 0
    assert late["first_round_ends_after"] > late["first_round_begins_after"] > 0
    assert late["others_before"]["median"] > 0

    of_the_machine = ("the machine was saturated", "other programs", "the router was late")
    others = [problem for problem in found["problems"] if not problem.startswith(of_the_machine)]
    assert others == [], "a busy machine may do no more to it"
    assert status == (1 if found["problems"] else 0)
    analysis.main(command)
    assert "1 of 1 cells have a result already" in capsys.readouterr().out
    assert "3 peers, 20 ms" in printed
