"""Private parts of Hivemind are touched in two files, so a change of its version needs a look at no other file.

Names are compared, not types. A private name is Hivemind's if one of its classes or modules gives it to something.
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PACKAGES = ("analysis", "baseline_ddp", "peers", "recipe", "swarm")
MAY_TOUCH = {"swarm/network/hivemind_internals.py", "swarm/network/hivemind_patches.py"}
HIVEMIND = Path(find_spec("hivemind").origin).parent
OWN = {"self", "cls", "super()"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def ours() -> dict[str, ast.Module]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): parsed(path) for path in paths}


def classes_in(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def private_names(owner: ast.ClassDef | ast.Module) -> set[str]:
    """Private names that a class or a module gives to its functions, classes, constants and attributes."""
    names = set()
    for statement in owner.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and is_stored(node)}
    names |= {node.attr for node in ast.walk(owner) if is_of_own(node) and is_stored(node)}
    return set(filter(is_private, names))


def is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def is_of_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in OWN


@cache
def hivemind_classes() -> dict[str, list[ast.ClassDef]]:
    """Hivemind's classes by their names. Two classes may share a name."""
    found = {}
    for path in HIVEMIND.rglob("*.py"):
        for kind in classes_in(parsed(path)):
            found.setdefault(kind.name, []).append(kind)
    return found


@cache
def hivemind_names() -> set[str]:
    """All private names of Hivemind."""
    names = set()
    for path in HIVEMIND.rglob("*.py"):
        for owner in (parsed(path), *classes_in(parsed(path))):
            names |= private_names(owner)
    return names


@cache
def our_classes() -> dict[str, list[ast.ClassDef]]:
    found = {}
    for tree in ours().values():
        for kind in classes_in(tree):
            found.setdefault(kind.name, []).append(kind)
    return found


@cache
def inherited_names(kind: ast.ClassDef) -> set[str]:
    """Private names that a class of ours, or of Hivemind, has from bases that are Hivemind's."""
    names = set()
    for base in kind.bases:
        base_name = ast.unparse(base).partition("[")[0].rpartition(".")[-1]
        for above in hivemind_classes().get(base_name, ()):
            names |= private_names(above) | inherited_names(above)
        for above in our_classes().get(base_name, ()):
            names |= inherited_names(above) if above is not kind else set()
    return names


def touches(tree: ast.Module) -> Iterator[str]:
    """Line and code of each place that touches a private part of Hivemind."""
    class_of = {node: kind for kind in classes_in(tree) for node in ast.walk(kind)}  # the innermost comes last
    for node in ast.walk(tree):
        found = set()
        if is_of_own(node) and node in class_of:
            found = {node.attr} & inherited_names(class_of[node])
        elif isinstance(node, ast.Attribute):
            found = {node.attr} & hivemind_names()
        elif isinstance(node, ast.ClassDef):
            found = private_names(node) & inherited_names(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            found = {word.value for word in node.args if isinstance(word, ast.Constant)} & hivemind_names()
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hivemind":
            found = {alias.name for alias in node.names if is_private(alias.name)}
        if found:
            yield f"line {node.lineno}: {', '.join(sorted(found))}"


def test_only_two_files_touch_private_parts_of_hivemind():
    found = {name: list(touches(tree)) for name, tree in ours().items()}
    touching = {name: places for name, places in found.items() if places}
    assert touching.keys() - MAY_TOUCH == set(), {name: touching[name] for name in touching.keys() - MAY_TOUCH}
    assert touching.keys() == MAY_TOUCH, "else this test sees nothing"


@pytest.mark.parametrize(
    "code",
    [
        "await node.p2p._client.connect(peer, [])",
        "self.dht._ready.done()",
        "P2P._UNIX_SOCKET_PREFIX = '/unix/tmp/'",
        "getattr(protocol.record_validator, '_validators', ())",
        "from hivemind.dht.node import _SearchState",
        "hivemind.utils.crypto._RSA_PADDING",
        "async def rpc_find(self: DHTProtocol, request, context): self._validate_record(request)",
        "class Ours:\n    def stop(self): self.dht._outer_pipe.close()",
        "class Ours(hivemind.DHT):\n    def is_up(self): return self._ready.done()",
        "class Ours(hivemind.DHT):\n    async def _shutdown(self): pass",
        "class Ours(hivemind.DHT):\n    async def end(self): await super()._shutdown()",
        "class Ours(SwarmDHT):\n    def __init__(self): self._node = None",
        "class Ours(PeerService):\n    _stub_type = None",
    ],
)
def test_a_private_part_is_seen(code):
    assert list(touches(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "class Ours:\n    def __init__(self, client): self._client = client",
        "class Ours(ServicerBase):\n    def __init__(self, p2p): self._p2p = p2p",
        "class Ours(Exception):\n    def other(self): return self._ready",
        "node.p2p.peer_id",
    ],
)
def test_a_private_part_of_our_own_is_not_reported(code):
    assert not list(touches(ast.parse(code)))
