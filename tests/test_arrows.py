"""The import arrows of the house: who may import whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "recipe": set(),
    "swarm": {"recipe"},
    "baseline_ddp": {"recipe"},
    "peers": {"swarm", "recipe"},
    "analysis": {"recipe"},
}


def imported_packages(path: Path) -> set[str]:
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            packages.add(node.module.split(".")[0])
    return packages


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_import_only_along_the_arrows(room):
    for path in (ROOT / room).rglob("*.py"):
        ours = imported_packages(path) & ALLOWED.keys() - {room}
        assert ours <= ALLOWED[room], f"{path.relative_to(ROOT)} imports {ours - ALLOWED[room]}"


def test_only_swarm_imports_hivemind():
    """And the script that the swarm is compared with, which stands by itself."""
    importers = {
        path.relative_to(ROOT).parts[0]
        for room in ALLOWED
        for path in (ROOT / room).rglob("*.py")
        if "hivemind" in imported_packages(path) and path != ROOT / "analysis" / "stock_hivemind.py"
    }
    assert importers == {"swarm"}
