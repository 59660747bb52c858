"""The recipe as data: JSON form, fingerprint, refused values, presets and command-line overrides."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import tyro

from recipe.config import MAX_JSON_BYTES, Recipe
from recipe.errors import InputError
from recipe.overrides import RecipeOverrides, apply_overrides, field_docstrings
from recipe.presets import PRESETS, named_recipe, preset
from recipe.tasks.images import KNOWN_MODELS
from recipe.tasks.texts import KNOWN_TEXT_MODELS
from tests.helpers.paths import ROOT

# A changed fingerprint separates old peers from new ones: change these only together with what a recipe means.
FINGERPRINTS = {
    "digits": "51d9517113cb4277",
    "glyphs": "2599b6fde05e96d9",
    "cifar10-vit-base": "36b18203e3195111",
    "cifar10-vit-tiny": "9c991b654f903338",
    "imagefolder-vit-small": "f3b09206a443fe44",
    "synthetic": "0b6420b910dc7fbd",
    "docstrings": "1c939637a6bcd3ab",
    "ag-news-distilbert": "35d8f7971fafeea7",
}


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name):
    recipe = preset(name)
    assert recipe.name == name
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert Recipe.from_json(recipe.to_json().encode()).fingerprint == recipe.fingerprint


def test_a_recipe_of_an_earlier_version_gets_the_defaults_of_missing_fields():
    recipe = preset("digits")
    earlier = json.loads(recipe.to_json())
    del earlier["robust"]
    assert Recipe.from_json(json.dumps(earlier)) == recipe
    del earlier["seed"]
    with pytest.raises(InputError, match=r"lacks the fields \['seed'\]"):
        Recipe.from_json(json.dumps(earlier))


@pytest.mark.parametrize("name", PRESETS)
def test_fingerprints_are_pinned(name):
    assert preset(name).fingerprint == FINGERPRINTS[name]


def test_fingerprint_is_equal_in_another_process():
    code = "from recipe.presets import *; print(preset('digits').fingerprint)"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout.strip() == preset("digits").fingerprint


def test_a_recipe_has_the_name_of_a_preset_or_of_a_file(tmp_path):
    own = replace(preset("digits"), seed=7)
    (tmp_path / "own.json").write_text(own.to_json())
    assert named_recipe(str(tmp_path / "own.json")) == own
    assert named_recipe("digits") == preset("digits")
    with pytest.raises(InputError, match=r"no\.json cannot be read \(No such file"):
        named_recipe(str(tmp_path / "no.json"))


def test_importing_recipes_and_options_does_not_import_torch():
    code = "import sys, recipe.overrides, recipe.presets as p; [make() for make in p.PRESETS.values()]; "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_every_field_changes_the_fingerprint():
    recipe = preset("digits")
    changed = [replace(recipe, seed=1), replace(recipe, learning_rate=2e-3), replace(recipe, name="other")]
    assert len({recipe.fingerprint, *(other.fingerprint for other in changed)}) == 4


def test_equal_numbers_have_equal_fingerprints():
    recipe = preset("digits")
    assert replace(recipe, clip_norm=1).fingerprint == replace(recipe, clip_norm=1.0).fingerprint
    assert replace(recipe, weight_decay=-0.0).fingerprint == replace(recipe, weight_decay=0).fingerprint


def test_difference_names_the_fields():
    recipe = preset("digits")
    assert recipe.difference(recipe) == {}
    assert recipe.difference(replace(recipe, seed=3, target_batch_size=7)) == {
        "seed": (0, 3),
        "target_batch_size": (512, 7),
    }


@pytest.mark.parametrize(
    ("changes", "part_of_message"),
    [
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"learning_rate": "0.1"}, "type float"),
        ({"learning_rate": 10**400}, "learning_rate"),
        ({"target_batch_size": 0}, "from 1 to"),
        ({"target_batch_size": 2**20 + 1}, "from 1 to"),
        ({"target_batch_size": True}, "type int"),
        ({"target_batch_size": 2.0}, "type int"),
        ({"pretrained": 1}, "type bool"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "type int"),
        ({"channels": 2}, "1, 3"),
        ({"channels": True}, "1, 3"),
        ({"optimizer": "lion"}, "adamw, sgd"),
        ({"optimizer": ["adamw"]}, "adamw, sgd"),
        ({"name": "../digits"}, "recipe name"),
        ({"name": "a" * 65}, "recipe name"),
        ({"model": "hf-hub:someone/else"}, "--model"),
        ({"model": "local-dir:/tmp"}, "--model"),
        ({"model": "resnet51"}, "did you mean"),
        ({"model": ""}, "--model"),
        ({"warmup_steps": 60}, "--warmup-steps"),
        ({"averaging": "local", "local_steps": 600}, "--local-steps"),
        ({"outer_momentum": 1.0}, "outer_momentum"),
        ({"patch_size": 3}, "--patch-size"),
        ({"image_size": 1024, "patch_size": 4}, "at least 8"),
        ({"num_heads": 3}, "--num-heads"),
        ({"num_classes": 11}, "--num-classes 10"),
        ({"augmentation": "crop-flip"}, "--augmentation"),
        ({"pretrained": True}, "--pretrained False"),
    ],
)
def test_contradictions_are_refused_in_one_sentence(changes, part_of_message):
    with pytest.raises(InputError) as caught:
        replace(preset("digits"), **changes)
    message = str(caught.value)
    assert part_of_message in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "{" * 50_000,
        "[" * 50_000,
        b"\xff\xfe\x00",
        " " * (MAX_JSON_BYTES + 1),
        None,
        preset("digits").to_json().replace('"format":1', '"format":2'),
        preset("digits").to_json().replace('"format":1', '"format":true'),
        preset("digits").to_json().replace('"seed":0', '"seed":0,"seed":0'),
        preset("digits").to_json().replace('"seed":0', '"seed":' + "9" * 5000),
        preset("digits").to_json().replace('"seed":0', '"seed":' + "[" * 900 + "]" * 900),
        preset("digits").to_json().replace('"seed":0', '"sead":0'),
        preset("digits").to_json().replace('"model":"v', '"model":"\\ud800\\u001b[31m'),
    ],
)
def test_bad_json_is_refused(text):
    with pytest.raises(InputError) as caught:
        Recipe.from_json(text)
    assert str(caught.value).isprintable()


def test_no_mutation_of_the_json_raises_anything_else():
    """2,000 random edits of the text and of the values; each is either read or refused."""
    chance = random.Random(0)
    text = preset("digits").to_json()
    strange = [
        None,
        True,
        -1,
        0,
        1e308,
        float("nan"),
        float("inf"),
        10**30,
        "",
        "\x00",
        [],
        {},
        [[]],
        {"a": 1},
        "digits",
    ]
    fields = [field.name for field in dataclasses.fields(Recipe) if field.name != "model"]  # a name costs a look-up
    for _ in range(1000):
        values = json.loads(text)
        for name in chance.sample(fields, chance.randint(1, 3)):
            values[name] = chance.choice(strange)
        _read_or_refuse(json.dumps(values))
        edited = bytearray(text.encode())
        for _ in range(chance.randint(1, 4)):
            edited[chance.randrange(len(edited))] = chance.randrange(256)
        _read_or_refuse(bytes(edited))


def _read_or_refuse(text):
    try:
        recipe = Recipe.from_json(text)
    except InputError:
        return
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_unknown_preset_suggests_a_name():
    with pytest.raises(InputError, match=r"did you mean digits\?.*cifar10-vit-base"):
        preset("digit")


def test_preset_models_need_no_look_up():
    assert {preset(name).model for name in PRESETS} == KNOWN_MODELS | KNOWN_TEXT_MODELS


@dataclasses.dataclass
class CommandLine:
    changes: tyro.conf.OmitArgPrefixes[RecipeOverrides] = dataclasses.field(default_factory=RecipeOverrides)
    port: int = 0


@pytest.mark.parametrize("option", ["--target-batch-size", "--target_batch_size"])
def test_command_line_overrides(option):
    words = [option, "1024", "--model", "resnet50", "--learning-rate", "1e-3", "--optimizer", "sgd", "--port", "5"]
    options = tyro.cli(CommandLine, args=words)
    recipe = apply_overrides(preset("digits"), options.changes)
    assert options.port == 5
    assert (recipe.target_batch_size, recipe.model, recipe.learning_rate) == (1024, "resnet50", 1e-3)
    assert recipe.optimizer == "sgd"
    assert recipe.patch_size is recipe.embed_dim is recipe.depth is recipe.num_heads is None


def test_no_override_keeps_the_recipe():
    assert apply_overrides(preset("digits"), tyro.cli(CommandLine, args=[]).changes) == preset("digits")


def test_a_shape_given_with_the_model_is_kept():
    overrides = RecipeOverrides(model="vit_small_patch16_224", patch_size=2, pretrained=False)
    recipe = apply_overrides(preset("digits"), overrides)
    assert (recipe.patch_size, recipe.depth) == (2, None)


def test_help_shows_the_field_docstrings(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(CommandLine, args=["--help"])
    shown = capsys.readouterr().out
    assert "--target-batch-size INT" in shown
    assert "Samples that all peers together" in shown
    assert "--name" not in shown
    assert field_docstrings(Recipe).keys() == {field.name for field in dataclasses.fields(Recipe)}
