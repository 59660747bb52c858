"""`make setup` can be repeated after it has failed."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


def test_an_environment_without_pip_is_mended(tmp_path):
    """Debian's Python leaves such an environment if its package python3-venv is missing, and asks for the package."""
    pytest.importorskip("ensurepip")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True)
    offline = {**os.environ, "PIP_NO_INDEX": "1"}  # so it stops before it would download something
    make = subprocess.run(
        ["make", "setup", f"PYTHON={sys.executable}"], cwd=tmp_path, env=offline, capture_output=True, text=True
    )
    assert "No module named pip" not in make.stderr
    subprocess.run([".venv/bin/python", "-m", "pip", "--version"], cwd=tmp_path, check=True)
