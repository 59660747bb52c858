"""The import rules: which package and folder may import which, and how many floors and files there may be."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

ALLOWED = {
    "recipe": set(),
    "swarm": {"recipe"},
    "baseline_ddp": {"recipe"},
    "peers": {"swarm", "recipe"},
    "analysis": {"recipe"},
}
PURE = {"analysis/endurance/virtual_swarm.py": "swarm.averaging.robust_mean"}
"""A module that may be imported against the rules, by the module that may do so: a simulation has to use the real rule.

It imports nothing of ours, so that no more of the swarm comes with it.
"""
FLOORS = [
    {"cli"},
    {"desk", "peer"},
    {"training"},
    {"averaging"},
    {"membership", "state_sync", "enrolment", "ledger"},
    {"network"},
    {"protocol", "runtime"},
    {"recipe"},
]
"""Folders of swarm/ from the top floor to the lowest. Each may import only folders on lower floors."""
FOLDER_FLOORS = {
    "analysis": ["reporting", "endurance", "campaigns", "wan", "opponents"],
    "recipe": ["export", "tasks", "training", "text", "data", "glyphs"],
    "baseline_ddp": ["checkpoints", "measuring"],
}
"""The same for the folders of other packages. Modules directly in the package do not count."""
MAX_FLOORS = 8
MAX_FILES = 15

GRAPH_FILE = ROOT / "docs" / "make_import_graph.py"
_spec = importlib.util.spec_from_file_location("make_import_graph", GRAPH_FILE)
graph = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(graph)
room_graph = cache(graph.room_graph)


@cache
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
        name = path.relative_to(ROOT).as_posix()
        ours = imported_packages(path) & ALLOWED.keys() - {room}
        if name in PURE:
            imported = {names[-1] for names in graph.imports_of(path) if names[-1].startswith("swarm")}
            assert imported == {PURE[name]}, f"{name} imports {imported}"
            ours.discard("swarm")
        assert ours <= ALLOWED[room], f"{name} imports {ours - ALLOWED[room]}"


@pytest.mark.parametrize("module", PURE.values())
def test_what_is_imported_against_the_arrows_imports_nothing_of_ours(module):
    assert not imported_packages(ROOT / f"{module.replace('.', '/')}.py") & ALLOWED.keys()


def test_only_swarm_imports_hivemind():
    """The script that the swarm is compared with does so too, and stands by itself."""
    importers = {
        path.relative_to(ROOT).parts[0]
        for room in ALLOWED
        for path in (ROOT / room).rglob("*.py")
        if "hivemind" in imported_packages(path) and path != ROOT / "analysis" / "opponents" / "hivemind_optimizer.py"
    }
    assert importers == {"swarm"}


@pytest.mark.parametrize("floor", range(len(FLOORS)))
def test_rooms_of_swarm_import_only_lower_floors(floor):
    lower = set().union(*FLOORS[floor + 1 :])
    for room in FLOORS[floor]:
        upwards = room_graph()[room].keys() - lower
        assert not upwards, f"swarm/{room} imports {upwards}, which stand beside or above it"


@pytest.mark.parametrize(
    ("package", "floor"),
    [(package, floor) for package, floors in FOLDER_FLOORS.items() for floor in range(len(floors))],
)
def test_folders_of_other_packages_import_only_lower_floors(package, floor):
    floors = FOLDER_FLOORS[package]
    for path in (ROOT / package / floors[floor]).rglob("*.py"):
        for names in graph.imports_of(path):
            rooms = {name.split(".")[1] for name in names if name.startswith(f"{package}.")}
            assert not rooms & set(floors[:floor]), f"{path.name} imports {names[0]}"


@pytest.mark.parametrize("package", FOLDER_FLOORS)
def test_every_folder_of_other_packages_has_a_floor(package):
    folders = {path.name for path in (ROOT / package).iterdir() if any(path.rglob("*.py"))}
    assert folders == set(FOLDER_FLOORS[package])


def test_every_folder_of_swarm_is_a_room():
    folders = {path.name for path in (ROOT / "swarm").iterdir() if any(path.glob("*.py"))}
    assert folders == graph.ROOMS.keys() - {"recipe"} == set().union(*FLOORS) - {"recipe"}


def test_the_house_is_not_too_high():
    assert max(graph.floors(room_graph()).values()) <= MAX_FLOORS


def circle(imports: Mapping[str, Collection[str]]) -> list[str]:
    """Modules that import each other in a circle, if there are any."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_no_modules_import_each_other_in_a_circle():
    """This holds for every package, and for circles of two modules too."""
    imports = graph.module_graph(*ALLOWED, "tests")
    assert {name.split(".")[0] for name in imports} == {*ALLOWED, "tests"}
    found = circle(imports)
    assert not found, f"an import circle: {' → '.join(found)}"


def test_what_tests_share_is_in_helpers():
    """No test imports another test, not even from its own folder, and no helper imports a test."""
    imports = graph.module_graph("tests")
    assert any(targets for name, targets in imports.items() if name.startswith("tests.unit."))
    for name, targets in imports.items():
        others = [target for target in targets if not target.startswith("tests.helpers.")]
        assert not others, f"{name} imports {others}"


def folders() -> list[str]:
    """Folders with modules in them."""
    found = {path.parent for package in (*ALLOWED, "tests") for path in (ROOT / package).rglob("*.py")}
    return sorted(folder.relative_to(ROOT).as_posix() for folder in found if "__pycache__" not in str(folder))


@pytest.mark.parametrize("folder", folders())
def test_a_folder_has_no_more_files_than_one_can_look_through_beside_its_init(folder):
    """`__init__.py` does not count: it says in a few lines what is in the folder."""
    files = [path.name for path in (ROOT / folder).iterdir() if path.is_file() and path.name != "__init__.py"]
    assert len(files) <= MAX_FILES, f"{len(files)} files: {sorted(files)}"


def test_type_checking_imports_do_not_count(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import swarm.cli\nelse:\n    import recipe.errors\n"
        "def late():\n    from swarm.peer import main\n"
    )
    assert set(graph.imports_of(module)) == {
        ("typing.TYPE_CHECKING", "typing"),
        ("recipe.errors",),
        ("swarm.peer.main", "swarm.peer"),
    }


def test_the_picture_of_the_rooms_is_not_stale():
    done = subprocess.run([sys.executable, GRAPH_FILE, "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
