"""docs/reference/recipe.md: the fields of a recipe, and what each preset sets them to."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin

from generate.source import attribute_docs, find, table
from recipe import config
from recipe.config import Recipe
from recipe.presets import PRESETS, preset

INTRODUCTION = """\
A recipe is what all peers of a run have to agree on. The peer that starts a swarm chooses it; a joiner gets it from the
swarm. `--recipe NAME` takes a preset, `--recipe FILE.json` takes the `recipe.json` of a run folder. Each field except
`name` is an option of `swarm start` and of `python -m swarm.peer`, with dashes: `--total-steps 5000`.

Two recipes are the same if their fingerprints are: the first 16 hex digits of the SHA-256 of the recipe's JSON. Peers
with different fingerprints never meet. A recipe arrives from strangers, so every value is checked against the types and
bounds below. A recipe takes at most {size} bytes as JSON, in format {format}.
"""


def page() -> str:
    """The whole page."""
    presets = {name: preset(name) for name in PRESETS}
    docs = attribute_docs(find("recipe.config", "Recipe"))
    rows = [
        (f"`{item.name}`", _kind(item.type), _bounds(item.name), _default(item), docs[item.name])
        for item in fields(Recipe)
    ]
    values = [
        (f"`{item.name}`", *(_shown(getattr(known, item.name)) for known in presets.values()))
        for item in fields(Recipe)
    ]
    introduction = INTRODUCTION.format(size=f"{config.MAX_JSON_BYTES:,}", format=config.FORMAT)
    return "\n".join(
        [
            f"# Recipe\n\n{introduction}",
            "## Fields\n",
            "A field without a default has to be given by the preset or the file.\n",
            table(("field", "type", "from, to", "default", "meaning"), rows),
            "## Presets\n",
            _preset_notes(),
            table(("field", *(f"`{name}`" for name in presets)), values),
        ]
    )


def _preset_notes() -> str:
    notes = []
    for name, function in PRESETS.items():
        text = " ".join((function.__doc__ or "").split())
        notes.append(f"- `{name}`: {text}" if text else f"- `{name}`")
    return "\n".join(notes) + "\n"


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{option}`" for option in get_args(annotation))
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return f"`{(kinds or [annotation])[0].__name__}`" + (" or none" if kinds else "")


def _bounds(name: str) -> str:
    if name not in config._BOUNDS:
        return ""
    low, high = config._BOUNDS[name]
    return f"{low:g}, {high:,}" if isinstance(high, int) else f"{low:g}, {high:g}"


def _default(item: Any) -> str:
    return "" if item.default is MISSING else _shown(item.default)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
