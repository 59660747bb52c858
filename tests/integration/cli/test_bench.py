"""The comparison with a plain Trainer, with real processes and small micro-batches."""

import json
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
from rich.console import Console

from recipe.errors import InputError
from recipe.overrides import RecipeOverrides
from swarm.cli import bench
from swarm.cli.bench import PLAIN, SWARM, BenchOptions, Turns, compare, cpu_seconds_beside, result_table
from swarm.runtime.processes import descendants

pytestmark = pytest.mark.timeout(180)


@pytest.mark.long
def test_both_take_turns_and_leave_nothing(capfd):
    turns = compare(BenchOptions(recipe="digits", pairs=2, updates=2, batch_size=1, micro_batches=2))
    living = [process for process in descendants(os.getpid()) if process.status() != psutil.STATUS_ZOMBIE]
    assert not [process for process in living if "spawn_main" in str(process.cmdline())]
    assert [len(turns.seconds[contestant]) for contestant in (PLAIN, SWARM)] == [2, 2]
    assert all(seconds > 0 for contestant in turns.seconds.values() for seconds in contestant)
    assert 0 <= turns.cores_beside < 2  # these turns are so short that the kernel may count none
    assert "Traceback" not in capfd.readouterr().err


def test_what_runs_beside_is_counted():
    busy = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\nsys.stdin.read()"
    before = cpu_seconds_beside(os.getpid())
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"done\n"
        assert cpu_seconds_beside(os.getpid()) - before >= 0.4


def test_the_ratio_is_of_neighbours_and_comes_with_an_interval():
    turns = Turns({PLAIN: [1.0, 2.0, 4.0], SWARM: [2.0, 4.0, 4.0]}, 0.02)
    np.testing.assert_allclose(turns.ratios, [0.5, 0.5, 1.0])
    console = Console(width=100)
    with console.capture() as shown:
        console.print(result_table(turns, BenchOptions(pairs=3, updates=2, micro_batches=4)))
    # mean 2/3, standard deviation 0.2887, and 4.303 for the 95 % of Student's t with two degrees of freedom
    assert "0.667" in shown.get()
    assert "-0.050–1.384" in shown.get()
    assert "0.500–1.000" in shown.get()
    assert "(250 ms)" in shown.get(), "2 s for two updates of four micro-batches"


def test_the_result_is_kept_and_it_is_said_where(tmp_path, monkeypatch, capsys):
    turns = Turns({PLAIN: [1.0, 2.0, 4.0], SWARM: [2.0, 4.0, 4.0]}, 0.02)
    monkeypatch.setattr(bench, "compare", lambda options: turns)
    assert bench.main(["--recipe", "digits", "--pairs", "3", "--depth", "2", "--output-dir", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("bench-*/bench.json")
    assert capsys.readouterr().out.endswith(f"Result: {file}\n")
    kept = json.loads(file.read_text())
    assert (kept["seconds"], kept["ratios"], kept["cores_beside"]) == (turns.seconds, [0.5, 0.5, 1.0], 0.02)
    assert kept["interval"] == pytest.approx([-0.050, 1.384], abs=5e-4)
    assert (kept["options"]["pairs"], kept["recipe"]["depth"]) == (3, 2)
    assert {"git_commit", "cpu", "command_line"} <= kept["environment"].keys()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (BenchOptions(recipe="nothing"), "nothing"),
        (BenchOptions(batch_size=10**6), "target_batch_size is 4000000"),
        (BenchOptions(pairs=1), "--pairs is 1"),
        (BenchOptions(overrides=RecipeOverrides(image_size=30)), "--patch-size"),
    ],
)
def test_what_cannot_be_measured_is_said(options, sentence):
    with pytest.raises(InputError, match=sentence):
        compare(options)
