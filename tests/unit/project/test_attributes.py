"""A reader sees in `__init__` all attributes of an object: none is added later."""

import ast

import pytest

from tests.helpers.paths import ROOT

PACKAGES = ("analysis", "baseline_ddp", "peers", "recipe", "swarm")
OF_LIBRARIES = {("PatientConsole", "quiet")}
"""Attributes that the base class has."""


def attributes_set_in(function: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def born_in(kind: ast.ClassDef, others: dict[str, ast.ClassDef]) -> set[str]:
    """Attributes that the class body, `__init__`, and the methods that it calls set, in this class and its bases."""
    methods = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}
    found = set()
    for node in kind.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    for constructor in {"__init__", "__post_init__"} & methods.keys():
        found |= attributes_set_in(methods[constructor])
        for call in ast.walk(methods[constructor]):
            name = ast.unparse(call.func).removeprefix("self.") if isinstance(call, ast.Call) else ""
            if name in methods:
                found |= attributes_set_in(methods[name])
    for base in kind.bases:
        if (above := others.get(ast.unparse(base))) is not None:
            found |= born_in(above, others)
    return found


@pytest.fixture(scope="module")
def classes() -> dict[str, ast.ClassDef]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            found |= {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_attribute_is_added_outside_init(package, classes):
    for path in (ROOT / package).rglob("*.py"):
        for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            born = born_in(kind, classes)
            for method in kind.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    late = {name for name in attributes_set_in(method) - born if (kind.name, name) not in OF_LIBRARIES}
                    assert not late, f"{path.name}: {kind.name}.{method.name} makes {sorted(late)}"
