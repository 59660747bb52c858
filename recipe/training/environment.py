"""Describes what a run ran on: versions, hardware, commit and command line, without the machine's name and secrets."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from recipe.command_line import without_secrets
from recipe.training.main_memory import main_memory
from recipe.training.pacing import paced_samples_per_second

_PACKAGES = ("torch", "torchvision", "hivemind", "timm", "lightning", "torchmetrics", "numpy")


def describe_environment() -> dict[str, Any]:
    """The environment as JSON values, to judge or repeat a measurement by; memory in GiB, time in UTC."""
    return {
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": _available_cores(),
        "memory_gib": round(main_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "paced_samples_per_second": paced_samples_per_second(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "git_commit": _git_commit(),
        "command_line": without_secrets(sys.argv),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():  # platform.processor() is empty on many Linux systems
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _available_cores() -> int:
    """Cores that this process may use; in a container these can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the code, with "+" if files differ from it; None without git or outside a checkout."""
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() if described.returncode == 0 else None
