"""docs/reference/commands.md: every command with its options, as tables instead of boxes."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from generate.source import attribute_docs, constants, docstring, find, path_of, table, tree_of
from recipe.command_line import arg
from recipe.config import Recipe
from recipe.overrides import RecipeOverrides
from recipe.presets import PRESETS
from swarm.cli.app import COMMANDS, COMPLETION, SHELLS

COMPLETION_USE = (
    "In bash, `source <(swarm completion bash)` switches it on in one terminal. For all, write the script into a file "
    "(`swarm completion bash > ~/.swarm-completion`, for it takes some seconds to make) and add the line "
    "`source ~/.swarm-completion` to `~/.bashrc`. In zsh, write it into a file `_swarm` in a folder of `fpath`."
)


@dataclass(frozen=True)
class Command:
    """One command of the page.

    Args:
        usage: what a person types.
        module: where the options are.
        options: name of their dataclass; None if there are no options.
        takes_peer_options: it also takes those of python -m swarm.peer.
        text: what it does, where the dataclass does not say it.
    """

    usage: str
    module: str
    options: str | None
    takes_peer_options: bool = False
    text: str = ""


SWARM = [
    Command(f"swarm {word}", f"swarm.cli.{module}", options, word == "demo", text)
    for word, (module, _, options, text) in COMMANDS.items()
]
PEER = [Command("python -m swarm.peer", "swarm.peer.options", "PeerOptions")]
BASELINE = [
    Command("python baseline_ddp/train.py", "baseline_ddp.options", "BaselineOptions"),
    Command("python -m baseline_ddp.scaling", "baseline_ddp.scaling", "ScalingOptions"),
    Command("python -m recipe.data.benchmark", "recipe.data.benchmark", "DataBenchmarkOptions"),
    Command("python -m recipe.glyphs", "recipe.glyphs.__main__", "GlyphOptions"),
]
PROGRAMS = [
    Command("python -m analysis soak", "analysis.endurance.soak", "SoakOptions"),
    Command("python -m analysis attacks", "analysis.endurance.attacks", "AttackOptions"),
    Command("python -m analysis robust", "analysis.endurance.robust", "RobustOptions"),
    Command("python -m analysis lying", "analysis.endurance.lying", "LyingOptions"),
    Command("python -m analysis membership", "analysis.endurance.membership", "MembershipOptions"),
    Command("python -m analysis exactness", "analysis.endurance.exactness", "ExactnessOptions"),
    Command("python -m analysis memory", "analysis.endurance.memory", "MemoryOptions"),
    Command("python -m analysis footprint", "analysis.endurance.footprint", "FootprintOptions", True),
    Command(
        "python -m analysis cell FOLDER",
        "analysis.campaigns.cell",
        None,
        text="Run one cell again, by its cell.json.",
    ),
]
SLOW = {"swarm.cli.bench", "baseline_ddp.scaling", "recipe.data.benchmark", *(command.module for command in PROGRAMS)}
"""Importing them imports torch; only the class of their options is run."""
SECTIONS = {
    "swarm": "The command `swarm` is for people. `swarm COMMAND --help` shows the same options in a terminal.",
    "python -m swarm.peer": "The same peer with every option in one place. `swarm start` and `swarm join` use it.",
    "baseline_ddp": "The same recipe without a swarm. `torchrun` starts several processes of `baseline_ddp/train.py`.",
    "analysis": "Experiments on an emulated network, and what they found.",
}


def page() -> str:
    """The whole page."""
    experiments = _subcommands("python -m analysis", "analysis.experiments_cli")
    network = _subcommands("python -m analysis wan", "analysis.wan.cli")
    groups = [SWARM, PEER, BASELINE, [*experiments, *PROGRAMS, *network]]
    lines = [
        "# Commands\n",
        "Options may be written with dashes or underscores. A switch is an option without a value, such as `--resume`;",
        "`--no-resume` turns it off.\n",
    ]
    for (heading, text), commands in zip(SECTIONS.items(), groups, strict=True):
        if heading != "python -m swarm.peer":
            lines.append(f"## {'The command ' if heading == 'swarm' else ''}`{heading}`\n\n{text}\n")
        for command in commands:
            level = "##" if heading == "python -m swarm.peer" else "###"
            if heading == "python -m swarm.peer":  # GitHub would call the heading python--m-swarmpeer
                lines.append('<a id="python-m-swarmpeer"></a>\n')
            lines.append(f"{level} `{command.usage}`\n")
            lines.append(_command(command, text if heading == "python -m swarm.peer" else ""))
        if heading == "swarm":
            shells = ", ".join(f"`{shell}`" for shell in SHELLS)
            lines.append(f"### `swarm {COMPLETION} SHELL`\n")
            lines.append(f"Print a script that completes the commands and options in a shell: {shells}.\n")
            lines.append(f"{COMPLETION_USE}\n")
    return "\n".join(lines)


def _command(command: Command, text: str) -> str:
    if command.options is None:
        return command.text + "\n"
    kind = _options_class(command.module, command.options)
    says = [docstring(find(command.module, command.options)).text or command.text, text]
    if command.takes_peer_options:
        says.append("It takes the options of [`python -m swarm.peer`](#python-m-swarmpeer) as well.")
    blocks = ["\n\n".join(part for part in says if part) + "\n"]
    rows: list[tuple[str, ...]] = []
    for option in fields(kind):
        group = _group(kind, option)
        if group is None:
            rows.append(_row(kind, option))
            continue
        if option.name == "overrides":
            excluded = " except `--averaging`, `--codec` and `--robust`" if "Baseline" in group.__name__ else ""
            blocks.append(
                f"**Changes to the recipe**: every field of a [recipe](recipe.md){excluded} is an option with the same "
                "name, such as `--total-steps 5000`. Without it the recipe keeps its own value.\n"
            )
            continue
        title = _title(kind, option)
        blocks.append(f"**{title}**{_group_text(group)}\n\n{_table([_row(group, item) for item in fields(group)])}")
    blocks[1:1] = [_table(rows)] if rows else []
    return "\n".join(blocks)


def _group_text(group: type) -> str:
    text = (group.__doc__ or "").strip()
    return f": {text}" if text else ""


def _title(kind: type, option: Field) -> str:
    for note in _notes(kind, option.name):
        if name := getattr(note, "name", None):
            return name.capitalize()
    return option.name.capitalize()


def _table(rows: list[tuple[str, ...]]) -> str:
    return table(("option", "default", "meaning"), rows)


def _row(kind: type, option: Field) -> tuple[str, str, str]:
    notes = _notes(kind, option.name)
    config = next((note for note in notes if hasattr(note, "metavar")), None)
    annotation = _bare(get_type_hints(kind, include_extras=True)[option.name])
    metavar = (config.metavar if config else None) or _metavar(annotation)
    is_positional = any(note is get_args(tyro.conf.Positional[int])[1] for note in notes)
    name = "--" + option.name.replace("_", "-")
    if is_positional:
        shown = f"`{metavar}`"
    elif annotation is bool:
        shown = f"`{name}`"
    else:
        shown = f"`{name} {metavar}`"
    hint = config.help_behavior_hint if config else None
    meaning = (config.help if config else None) or _docs(kind).get(option.name, "")
    return shown, _default(option, hint), meaning


def _default(option: Field, hint: Any) -> str:
    if isinstance(hint, str):
        return hint.removeprefix("(").removesuffix(")").removeprefix("default: ")
    value = option.default if option.default_factory is MISSING else option.default_factory()
    if value is MISSING:
        return "has to be given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return " ".join(f"`{item}`" for item in value) or "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _metavar(annotation: Any) -> str:
    options = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if get_origin(annotation) is tuple:
        return f"{_metavar(options[0])} ..."
    if options:
        return _metavar(options[0])
    return {int: "N", float: "NUMBER", str: "TEXT"}.get(annotation, getattr(annotation, "__name__", "VALUE").upper())


def _bare(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _group(kind: type, option: Field) -> type | None:
    annotation = _bare(get_type_hints(kind, include_extras=True)[option.name])
    return annotation if is_dataclass(annotation) else None


def _notes(kind: type, name: str) -> tuple[Any, ...]:
    annotation = get_type_hints(kind, include_extras=True)[name]
    return tuple(getattr(annotation, "__metadata__", ()))


def _docs(kind: type) -> dict[str, str]:
    """Of all its fields, also of those that it inherits."""
    docs: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if is_dataclass(base)]):
        docs |= attribute_docs(find(base.__module__, base.__name__))
    return docs


def _options_class(module: str, name: str) -> type:
    if module not in SLOW:
        return getattr(importlib.import_module(module), name)
    names: dict[str, Any] = {
        "dataclass": dataclass,
        "get_args": get_args,
        "get_type_hints": get_type_hints,
        "Recipe": Recipe,
        "field": field,
        "Annotated": Annotated,
        "Literal": Literal,
        "Path": Path,
    }
    names |= {"tyro": tyro, "arg": arg, "RecipeOverrides": RecipeOverrides, "PRESETS": PRESETS, "__name__": module}
    body = tree_of(module).body
    assigned = [node for node in body if isinstance(node, ast.Assign)]
    aliases = [node for node in assigned if re.match(r"Literal\[|\(?get_type_hints\(", ast.unparse(node.value))]
    code = compile(ast.Module([*aliases, find(module, name)], []), str(path_of(module)), "exec")
    names |= _imported_constants(body)
    stand_in = type(sys)(module)  # get_type_hints looks for the names of annotations in the class's module
    vars(stand_in).update(names)
    had = sys.modules.get(module)
    sys.modules[module] = stand_in
    try:
        exec(code, vars(stand_in))
        kind = vars(stand_in)[name]
        hints = get_type_hints(kind, include_extras=True)
    finally:
        if had is None:
            del sys.modules[module]
        else:
            sys.modules[module] = had
    kind.__annotations__ = hints
    return kind


def _imported_constants(body: list[ast.stmt]) -> dict[str, Any]:
    """Numbers and texts that a module imports from others of ours: defaults may be made of them."""
    found: dict[str, Any] = {}
    for node in body:
        is_ours = isinstance(node, ast.ImportFrom) and path_of(node.module or "").is_file()
        if is_ours and any(alias.name.isupper() for alias in node.names):
            found |= constants(node.module)
    return found


def _subcommands(usage: str, module: str) -> Iterator[Command]:
    """Those of a module that reads a union of dataclasses."""
    for call in ast.walk(tree_of(module)):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "tyro.cli":
            for name in ast.unparse(call.args[0]).split(" | "):
                word = "".join(("-" if letter.isupper() and at else "") + letter for at, letter in enumerate(name))
                yield Command(f"{usage} {word.lower()}", module, name)
