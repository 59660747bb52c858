"""Command-line options that change single fields of a recipe, derived from the recipe's fields and docstrings."""

import ast
import inspect
import textwrap
from dataclasses import field, fields, make_dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro

from recipe.config import Recipe

OTHER_MODEL = {"patch_size": None, "embed_dim": None, "depth": None, "num_heads": None, "initialisation": "timm"}
"""Values that the fields that describe one particular ViT take when the model changes."""


def field_docstrings(cls: type) -> dict[str, str]:
    """The docstrings under a dataclass's fields, as {field: text}; Python itself does not keep them at run time."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        above.target.id: inspect.cleandoc(below.value.value)
        for above, below in pairwise(body)
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def _option(annotation: Any, help_text: str) -> Any:
    kind = annotation if get_origin(annotation) is Literal else (get_args(annotation) or (annotation,))[0]
    options = get_args(kind) or ((True, False) if kind is bool else ())
    metavar = "{" + ",".join(map(str, options)) + "}" if options else kind.__name__.upper()
    # None stands for the recipe's own value, which is not known before the recipe is.
    text = " ".join(help_text.split())
    return Annotated[kind | None, tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="(recipe's own)")]


def _make_overrides() -> type:
    docs = field_docstrings(Recipe)
    options = [
        (item.name, _option(item.type, docs[item.name]), field(default=None))
        for item in fields(Recipe)
        if item.name != "name"
    ]
    doc = "Changes to the recipe. Each option that is left out keeps the recipe's own value."
    return make_dataclass("RecipeOverrides", options, frozen=True, namespace={"__doc__": doc, "__module__": __name__})


RecipeOverrides = _make_overrides()
"""Dataclass with every field of `Recipe` except its name, all optional; None keeps the recipe's value.

Use it as a field of a dataclass of options, under `tyro.conf.OmitArgPrefixes`.
"""


def apply_overrides(recipe: Recipe, overrides: "RecipeOverrides") -> Recipe:
    """The recipe with the given fields changed.

    Another `model` also resets the ViT shape and initialisation (`OTHER_MODEL`), unless the overrides give them. These
    describe the preset's own model, and `--model resnet50` alone has to work.

    Raises:
        InputError: the result is not a valid recipe.
    """
    changes: dict[str, Any] = {name: value for name, value in vars(overrides).items() if value is not None}
    if changes.get("model", recipe.model) != recipe.model:
        changes = OTHER_MODEL | changes
    return replace(recipe, **changes)
