"""A third task takes a file and a line, as docs/howto/own-task.md shows."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "howto" / "own-task.md"


@pytest.mark.long
def test_a_third_task_is_a_file_and_a_line(tmp_path):
    page = PAGE.read_text()
    file = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    line = re.search(r"^ +\"recipe\.tasks\.wine.*\n", page, re.MULTILINE)[0]
    command = re.search(r"^python (baseline_ddp.*)$", page, re.MULTILINE)[1]
    for package in ("recipe", "baseline_ddp"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "recipe" / "tasks" / "wine.py").write_text(file)
    registry = tmp_path / "recipe" / "registry.py"
    registry.write_text(registry.read_text().replace("TASKS = {\n", f"TASKS = {{\n{line}"))
    options = ["--max-steps", "30", "--target-batch-size", "64", "--run-id", "wine"]
    subprocess.run(
        [sys.executable, *command.split(), *options],
        cwd=tmp_path,
        check=True,
        timeout=200,
    )
    summary = json.loads((tmp_path / "runs" / "wine" / "single-1" / "summary.json").read_text())
    assert summary["steps"] == 30
    assert summary["val_accuracy"] >= 0.9
    test = json.loads((tmp_path / "runs" / "wine" / "single-1" / "test.json").read_text())
    assert test["samples"] == 35
