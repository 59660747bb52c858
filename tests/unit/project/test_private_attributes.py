"""Tests use the public interface: none accesses an attribute of ours that begins with an underscore."""

import ast
from collections.abc import Iterator

import pytest

from tests.helpers.paths import ROOT

PACKAGES = ("analysis", "baseline_ddp", "peers", "recipe", "swarm")
OWN = {"self", "cls"}
OF_HIVEMIND = {"stub._p2p", "stub._peer", "P2P._make_process_args"}
"""Attributes that tests of Hivemind's transport are about. Names of ours are the same."""
BY_NAME = {"setattr", "getattr", "delattr", "hasattr", "attrgetter", "patch", "object"}
"""Functions that get the names of attributes as texts. The last is `patch.object`."""


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


def reached(tree: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Each attribute that is read, or named in a text: the node, the expression in front of it, and its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node, ast.unparse(node.value), node.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            owner = ast.unparse(node.args[0]) if node.args else ""
            given = [*node.args[:2], *(keyword.value for keyword in node.keywords)]
            for text in (part.value for part in given if isinstance(part, ast.Constant)):
                if isinstance(text, str):
                    yield from ((node, owner, name) for name in text.split("."))


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
    for node, owner, name in reached(tree):
        if name in ours - own_names and owner not in OWN and f"{owner}.{name}" not in OF_HIVEMIND:
            pytest.fail(f"{path.name}:{node.lineno} reaches into {name}: {ast.unparse(node)}")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            private = [alias.name for alias in node.names if is_private(alias.name)]
            assert not private, f"{path.name}:{node.lineno} imports {private}"


@pytest.mark.parametrize(
    "code",
    [
        "node._limits.spend(1)",
        "monkeypatch.setattr(nodes, '_limits', None)",
        "monkeypatch.setattr('swarm.network.nodes._limits', None)",
        "monkeypatch.setattr('swarm.network.nodes._limits.left', None)",
        "monkeypatch.delattr(nodes, name='_limits')",
        "getattr(node, '_limits')",
        "mock.patch('swarm.network.nodes._limits')",
        "mock.patch.object(nodes, attribute='_limits')",
    ],
)
def test_a_private_attribute_is_found(code):
    assert "_limits" in [name for _, _, name in reached(ast.parse(code))]


@pytest.mark.parametrize(
    "code", ["getattr(node, 'limits', '_limits')", "say('_limits')", "setattr(node, name, '_limits')"]
)
def test_other_texts_name_no_attribute(code):
    assert "_limits" not in [name for _, _, name in reached(ast.parse(code))]
