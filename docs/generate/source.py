"""Reads modules without importing them: torch and Hivemind take seconds, and a page needs only the text of a module."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import docstring_parser

ROOT = Path(__file__).parent.parent.parent


@dataclass
class Documented:
    """A docstring in Google's form, in parts.

    Args:
        text: everything that is not about a parameter or an error.
        params: what each parameter is.
        raises: which error, and when.
    """

    text: str = ""
    params: dict[str, str] = field(default_factory=dict)
    raises: list[tuple[str, str]] = field(default_factory=list)

    @property
    def first_line(self) -> str:
        """The sentence that says it all."""
        return self.text.split("\n\n")[0].replace("\n", " ")


def path_of(module: str) -> Path:
    """The file of a module of this repository."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree_of(module: str) -> ast.Module:
    """The parsed file of a module."""
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def find(module: str, name: str) -> Any:
    """The class or function of this name, or the method "Class.method".

    Raises:
        LookupError: there is none (any more).
    """
    body: list[ast.stmt] = tree_of(module).body
    node = None
    for part in name.split("."):
        named = [item for item in body if isinstance(item, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        node = next((item for item in named if item.name == part), None)
        if node is None:
            raise LookupError(f"{module} has no {name}: correct the list in docs/generate.")
        body = node.body
    return node


def where(module: str, name: str) -> str | None:
    """The module that has this class or function: the named one, or else the only other one of its package.

    So a page does not change its list when a class moves to another file.
    """
    owner = name.split(".")[0]
    package = ROOT / module.split(".")[0]
    others = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(package.rglob("*.py"))]
    for candidates in ([module] if path_of(module).is_file() else [], others):
        found = [one for one in candidates if any(_named(node) == owner for node in tree_of(one).body)]
        if len(found) == 1:
            return found[0]
    return None


def _named(node: ast.stmt) -> str | None:
    return getattr(node, "name", None)


def docstring(node: ast.AST) -> Documented:
    """The docstring of a module, class or function."""
    return parse(ast.get_docstring(node) or "")


def parse(text: str) -> Documented:
    """A docstring, cleaned of its indentation."""
    found = docstring_parser.parse(text, style=docstring_parser.DocstringStyle.GOOGLE)
    said = found.description or ""
    if found.returns is not None:
        kind = f"{found.returns.type_name}: " if found.returns.type_name else ""
        said += f"\n\nReturns {kind}{_one_line(found.returns.description).rstrip('.')}."
    params = {param.arg_name: _one_line(param.description) for param in found.params}
    raises = [(error.type_name or "", _one_line(error.description)) for error in found.raises]
    return Documented(said.strip(), params, raises)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def attribute_docs(node: ast.ClassDef | ast.Module) -> dict[str, str]:
    """What stands below attributes, or behind them in their line."""
    docs = {}
    for above, below in zip(node.body, [*node.body[1:], None], strict=True):
        name = _assigned(above)
        if name and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[name] = " ".join(str(below.value.value).split())
    return docs


def _assigned(node: ast.AST | None) -> str | None:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def dataclass_fields(node: ast.ClassDef) -> list[tuple[str, str, str | None]]:
    """Name, type and default (None if there is none) of each field of a dataclass."""
    return [
        (item.target.id, ast.unparse(item.annotation), ast.unparse(item.value) if item.value else None)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


@cache
def constants(module: str) -> dict[str, Any]:
    """The public numbers, texts and tuples at the top of a module, also those that are worked out from others."""
    known: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for node in tree_of(module).body:
        if isinstance(node, ast.ImportFrom) and node.module and path_of(node.module).is_file():
            wanted = [alias.name for alias in node.names if alias.name.isupper()]
            known |= {
                name: value for name, value in (constants(node.module) if wanted else {}).items() if name in wanted
            }
        if not isinstance(node, ast.Assign):
            continue
        try:
            value = eval(compile(ast.Expression(node.value), module, "eval"), {"__builtins__": {}}, known)
        except Exception:
            continue  # made by a call, or of something that is no constant
        names = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else [node.targets[0]]
        for name, one in zip(names, value if len(names) > 1 else [value], strict=True):
            if isinstance(name, ast.Name) and isinstance(one, int | float | str | tuple):
                known[name.id] = own[name.id] = one
    return {name: value for name, value in own.items() if name.isupper() and not name.startswith("_")}


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, drop_self: bool) -> str:
    """As Python code, on several lines where one is too short."""
    arguments = node.args
    if drop_self:
        arguments = ast.arguments(
            posonlyargs=arguments.posonlyargs,
            args=arguments.args[1:],
            vararg=arguments.vararg,
            kwonlyargs=arguments.kwonlyargs,
            kw_defaults=arguments.kw_defaults,
            kwarg=arguments.kwarg,
            defaults=arguments.defaults,
        )
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    parts = [_spaced(part) for part in _split_arguments(ast.unparse(arguments))]
    return call(name, parts, returns)


def call(name: str, parts: list[str], returns: str = "") -> str:
    """A call with these arguments, on one line if it fits."""
    text = f"{name}({', '.join(parts)}){returns}"
    if len(text) > 90:
        text = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"
    return text.replace("'", '"')


def _spaced(argument: str) -> str:
    """`size: int=1` as people write it."""
    kind, equals, default = argument.partition("=")
    return f"{kind} = {default}" if equals and ": " in kind else argument


def _split_arguments(text: str) -> list[str]:
    """At the commas that are within no bracket."""
    parts, depth, begin = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[begin:position].strip())
            begin = position + 1
    return [*parts, text[begin:].strip()]


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
