"""The job script and the service units, without Slurm and systemd."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from swarm.enrolment.removed import EXIT_STATUS
from tests.helpers.paths import ROOT

SLURM = ROOT / "peers" / "slurm" / "join.sbatch"
UNITS = sorted((ROOT / "peers" / "systemd").glob("*.service"))


def settings(unit: Path, name: str) -> list[str]:
    """The values of this setting in a unit, as often as it is set."""
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


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


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_writes_only_into_folders_that_it_may_write_to(unit):
    """It can only read all other folders, /tmp and the home folder too."""
    assert settings(unit, "ProtectSystem") == ["strict"]
    assert (settings(unit, "StateDirectory"), settings(unit, "PrivateTmp")) == (["swarm-vit"], ["yes"])
    (command,) = settings(unit, "ExecStart")
    folders = re.findall(r"--(?:output|data)-dir (\S+)", command)
    if unit.stem != "swarm-desk":  # the desk loads no weights
        folders += re.findall(r"^Environment=HF_HOME=(.*)$", unit.read_text(), re.MULTILINE)
        assert len(folders) >= 2
    assert all(folder.startswith("/var/lib/swarm-vit/") for folder in folders)


def test_the_variables_of_a_unit_can_be_copied_into_their_file():
    """systemd takes a comment behind a value for a part of the value."""
    lines = [line for unit in UNITS for line in re.findall(r"^#       (\w+=.*)$", unit.read_text(), re.MULTILINE)]
    assert len(lines) == 4
    assert [line for line in lines if " " in line] == []


def test_no_unit_tells_other_peers_the_name_of_its_machine():
    for unit in UNITS:
        (command,) = settings(unit, "ExecStart")
        assert not re.search(r"%[HlqmMb]", command)
    unit = ROOT / "peers" / "systemd" / "swarm-vit.service"
    assert "--public-name ${NAME} " in settings(unit, "ExecStart")[0]
    assert "NAME=volunteer" in settings(unit, "Environment")[0], "without a name, each start would be another peer"
    assert re.search(r"^#       NAME=ada$", unit.read_text(), re.MULTILINE)


def test_a_peer_that_was_removed_is_not_started_again():
    unit = ROOT / "peers" / "systemd" / "swarm-vit.service"
    assert settings(unit, "RestartPreventExitStatus") == [str(EXIT_STATUS)]
