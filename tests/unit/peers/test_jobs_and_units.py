"""The job script and the service units, without Slurm and systemd."""

import os
import subprocess

import pytest

from tests.helpers.paths import ROOT

SLURM = ROOT / "peers" / "slurm" / "join.sbatch"


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "slurm-7"),
        ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}, "slurm-5-0"),
        ({"SWARM_VIT_NAME": "ada"}, "ada"),
        ({"SWARM_VIT_NAME": "ada", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, "ada-3"),
    ],
)
def test_a_job_with_a_name_comes_back_as_the_same_member(environment, name):
    """Each new name uses up one more use of an invitation."""
    script = SLURM.read_text().replace("exec .venv/bin/python", "echo")
    given = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SWARM_"))}
    given |= {"INITIAL_PEERS": "swarm://line", "SLURM_JOB_ID": "7"} | environment
    done = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True)
    words = done.stdout.split()
    assert words[words.index("--public-name") + 1] == name
