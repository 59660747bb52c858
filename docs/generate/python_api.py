"""docs/reference/python-api.md: what other programs use."""

from __future__ import annotations

import ast
import re

from generate.source import attribute_docs, call, dataclass_fields, docstring, find, signature, table, where

SECTIONS = {
    "Train your own model with a swarm": {
        "swarm.training.strategy": ["SwarmStrategy"],
        "swarm.training.averaging_mode": ["Averaging", "Averaging.sync", "Averaging.overlap", "Averaging.local"],
        "swarm.training.local_steps": ["LocalSteps"],
        "swarm.averaging.compression.codec": ["Codec"],
        "swarm.training.options": ["CoordinatorOptions"],
        "swarm.runtime.timeouts": ["Timeouts"],
        "swarm.network.dht_options": ["NetworkOptions", "start_dht", "visible_addresses", "stop_dht"],
    },
    "Join from a notebook": {"peers.notebook": ["join", "preview", "CannotJoin"]},
    "Recipes": {
        "recipe.config": ["Recipe", "Recipe.to_json", "Recipe.from_json", "Recipe.difference"],
        "recipe.presets": ["preset"],
        "recipe.overrides": ["apply_overrides"],
        "recipe.model": ["build_model"],
        "recipe.registry": ["build_task", "build_data"],
        "recipe.tasks.task_kind": ["TaskKind"],
        "recipe.training.task": ["ClassificationTask"],
        "recipe.data.peer_data": ["PeerData"],
        "recipe.data.splits": ["Splits"],
        "recipe.optimizer": ["build_optimizer", "build_scheduler"],
        "recipe.training.trainer": ["build_trainer"],
    },
    "Run folders": {"recipe.run_folder": ["RunFolder", "RunFolder.create", "read_metrics"]},
}
"""What is public, and in which module it probably is."""
OPTIONAL = {"Averaging"}
"""Left out where the code does not have it."""


def page() -> str:
    """The whole page."""
    lines = [
        "# Python API\n",
        "These classes and functions are meant for other programs. Everything else may change at any time.",
        "A value that cannot work raises `recipe.errors.InputError`, whose text says what to do.\n",
    ]
    for title, modules in SECTIONS.items():
        lines.append(f"## {title}\n")
        for module, names in modules.items():
            lines += [_entry(place, name) for name in names if (place := _place(module, name))]
    return "\n".join(lines)


def _place(module: str, name: str) -> str | None:
    place = where(module, name)
    if place is None and name.split(".")[0] not in OPTIONAL:
        raise LookupError(f"There is no {name} any more: correct the list in docs/generate/python_api.py.")
    return place


def _entry(module: str, name: str) -> str:
    node = find(module, name)
    says = docstring(node)
    parts = [f"### `{name}`\n", f"```python\nfrom {module} import {name.split('.')[0]}\n\n{_code(node, name)}\n```\n"]
    if says.text:
        parts.append(says.text + "\n")
    meanings = says.params
    if isinstance(node, ast.ClassDef):
        meanings = meanings | attribute_docs(node)
    if name == "Recipe":
        meanings = {}
        parts.append("[Recipe](recipe.md) has all fields with their meaning.\n")
    if meanings:
        parts.append(table(("argument", "meaning"), [(f"`{key}`", text) for key, text in meanings.items()]))
    parts += [f"Raises `{kind}`: {text.rstrip('.')}.\n" for kind, text in says.raises if text]
    return "\n".join(parts)


def _code(node: ast.AST, name: str) -> str:
    if not isinstance(node, ast.ClassDef):
        is_method = "." in name
        return signature(node, name, drop_self=is_method)
    if _is_dataclass(node):
        if name == "Recipe":
            return "Recipe(*, name, model, ...)"
        fields = dataclass_fields(node)
        shown = [f"{field}: {kind}" + (f" = {_made(default)}" if default else "") for field, kind, default in fields]
        return call(name, shown)
    init = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    return signature(init, name, drop_self=True) if init else f"class {name}({', '.join(map(ast.unparse, node.bases))})"


def _made(default: str) -> str:
    """`Codec()` for `field(default_factory=Codec)`."""
    factory = re.fullmatch(r"field\(default_factory=(\w+)\)", default)
    return f"{factory[1]}()" if factory else default


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
