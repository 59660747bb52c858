"""Tests use what the code offers: none reaches into an attribute of ours that begins with an underscore."""

import ast

import pytest

from tests.helpers.paths import ROOT

PACKAGES = ("analysis", "baseline_ddp", "peers", "recipe", "swarm")
OWN = {"self", "cls"}
OF_LIBRARIES = {"_p2p", "_peer", "_make_process_args", "_cells"}
"""Of Hivemind, which is what the test is about, and of Rich's tables; names of ours are the same."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_in(path) -> set[str]:
    """Private names that a file of ours gives: to attributes, functions, classes and constants."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return set(filter(is_private, found))


@pytest.fixture(scope="module")
def ours() -> set[str]:
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found |= names_in(path)
    assert len(found) > 100
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.name)
def test_no_test_reaches_into_private_attributes(path, ours):
    tree, own_names = ast.parse(path.read_text()), names_in(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr in ours - own_names - OF_LIBRARIES:
            assert ast.unparse(node.value) in OWN, f"{path.name}:{node.lineno} reaches into {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            private = [alias.name for alias in node.names if is_private(alias.name)]
            assert not private, f"{path.name}:{node.lineno} imports {private}"
