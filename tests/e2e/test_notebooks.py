"""The notebooks run from the first to the last cell, against a live swarm, in an environment without our package."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from recipe.run_folder import RunFolder
from swarm.peer.status import Status
from tests.helpers.cli import START_SECONDS, PeerProgram, live_peer
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.timeout(900)

NOTEBOOKS = sorted((ROOT / "peers").glob("*.ipynb"))


def make_kernel(folder: Path) -> KernelSpecManager:
    """Make a kernel in a clean environment: it has pip and the packages that we need (from ours), but not our own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    (Path(site.strip()) / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    spec = folder / "kernels" / "volunteer"
    spec.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "volunteer", "language": "python"}))
    assert subprocess.run([python, "-c", "import swarm"], cwd=folder, capture_output=True).returncode != 0
    return KernelSpecManager(kernel_dirs=[str(folder / "kernels")], ensure_native_kernel=False)


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Iterator[PeerProgram]:
    with live_peer(tmp_path_factory.mktemp("swarm")) as peer:
        yield peer


async def execute(notebook, kernel: KernelSpecManager, folder: Path, environment: dict[str, str], status) -> None:
    """Run all cells; when the volunteer contributes, interrupt the last one."""
    client = NotebookClient(
        notebook, timeout=START_SECONDS, kernel_name="volunteer", resources={"metadata": {"path": folder}}
    )
    client.km = client.create_kernel_manager()
    client.km.kernel_spec_manager = kernel
    async with client.async_setup_kernel(env=environment, cwd=str(folder)):
        install, look, last = [number for number, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
        await client.async_execute_cell(notebook.cells[install], install)
        await client.async_execute_cell(notebook.cells[look], look)
        joining = asyncio.ensure_future(client.async_execute_cell(notebook.cells[last], last))
        while not joining.done() and not status().contributed:
            await asyncio.sleep(0.2)
        if not joining.done():
            await client.km.interrupt_kernel()
        await joining


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


async def volunteer(path: Path, kernel: KernelSpecManager, first: PeerProgram, session: Path) -> tuple:
    """Execute the notebook in a session of its own. Returns the notebook, the session's folder and the run folder."""
    notebook = nbformat.read(path, as_version=4)
    folder = RunFolder(session / "runs" / "live" / path.stem)
    (session / "runs").mkdir()
    (session / "runs" / "public-name.txt").write_text(path.stem)  # of an earlier session
    environment = {**os.environ, "INITIAL_PEERS": first.address, "SWARM_VIT_SOURCE": f"file://{ROOT}"}
    environment["OMP_NUM_THREADS"] = "1"

    def status() -> Status:
        return Status.read(folder.status) or Status(path.stem, "", "starting")

    await execute(notebook, kernel, session, environment, status)
    return notebook, session, folder


def test_a_notebook_joins_and_its_contribution_counts(first, tmp_path_factory):
    """One of them is enough, as their code is the same."""
    codes = [[cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"] for path in NOTEBOOKS]
    assert all(code == codes[0] for code in codes)
    path, at = NOTEBOOKS[0], tmp_path_factory.mktemp("session")
    kernel = make_kernel(tmp_path_factory.mktemp("kernel"))
    notebook, session, folder = asyncio.run(volunteer(path, kernel, first, at))
    install, look, joined = (cell for cell in notebook.cells if cell.cell_type == "code")
    for line in ("device", "micro-batch", "traffic", "session", "storage", "run live"):
        assert line in printed(look)
    assert "ERROR" not in printed(install)
    summary = json.loads(folder.summary.read_text())
    assert summary["samples"] > 0
    assert summary["outcome"] == "interrupted"
    assert f"You gave {summary['samples']:,} samples" in printed(joined)
    assert any("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in joined.outputs)
    kept = (session / "kept.txt").read_text()
    assert "torch==" in kept


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) == 3
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    text = path.read_text()
    assert "12D3KooW" not in text, "the address of a peer"
    assert not any(word in text.lower() for word in ("token=", "password", "api_key", "secret"))
