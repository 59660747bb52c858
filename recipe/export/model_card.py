"""Writes the `README.md` of an exported model: a model card, whose front matter the Hugging Face hub reads."""

import html
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import timm
from huggingface_hub import EvalResult, ModelCardData

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.export.onnx_file import IMAGES, LOGITS, MODEL
from recipe.export.run_record import Measured, RunRecord
from recipe.export.timm_folder import preprocessing
from recipe.export.trained import Trained
from recipe.registry import DIGITS_FOLDS
from recipe.run_folder import check_name

MAX_CONTRIBUTORS, MAX_NAME_LETTERS = 10_000, 100
_TASK = "image-classification"
_WHITE_ON_BLACK = {"glyphs", "digits", *DIGITS_FOLDS}
_RECIPE_OF_SWARMS = {
    *("averaging", "local_steps", "fragments", "outer_learning_rate", "outer_momentum"),
    *("codec", "powersgd_rank", "robust"),
}


def model_card(
    trained: Trained,
    record: RunRecord | None,
    *,
    name: str,
    contributors: Sequence[str] = (),
    license_name: str | None = None,
    has_onnx: bool = False,
) -> str:
    """The text of the model card.

    Args:
        trained: the exported model.
        record: the record of its run folder; None if there is none.
        name: name of the model.
        contributors: names of the contributors who agreed to be named.
        license_name: name of the licence on the hub; None to leave it out.
        has_onnx: whether the folder has an ONNX file.
    """
    sections = [
        f"---\n{_front_matter(trained.recipe, record, name, license_name)}\n---",
        f"# {name}",
        _summary(trained, record),
        _use(trained.recipe, has_onnx),
        _results(trained, record),
        _training(trained, record),
        _contributors(contributors),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def read_contributors(path: Path) -> list[str]:
    """The names in a file, one per line; empty lines and lines that begin with # are skipped.

    Raises:
        InputError: the file cannot be read, has too many names, or has a line that is no name.
    """
    try:
        with open(path.expanduser(), encoding="utf-8") as file:
            lines = [line.strip() for line in file.read(MAX_CONTRIBUTORS * (MAX_NAME_LETTERS + 1)).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): give a text file with a name in each line.") from error
    names = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if len(names) > MAX_CONTRIBUTORS:
        raise InputError(f"{path} has more than {MAX_CONTRIBUTORS} names: shorten it.")
    for contributor in names:
        if len(contributor) > MAX_NAME_LETTERS or not contributor.isprintable():
            raise InputError(
                f"{path}: {ascii(contributor)[:60]} is no name: give at most {MAX_NAME_LETTERS} letters a line."
            )
    return names


def model_name(folder: Path) -> str:
    """The model's name, which is that of its folder.

    Raises:
        InputError: a model on the hub cannot have this name.
    """
    return check_name(folder.absolute().name, "--to")


def _front_matter(recipe: Recipe, record: RunRecord | None, name: str, license_name: str | None) -> str:
    data = ModelCardData(
        library_name="timm",
        pipeline_tag=_TASK,
        tags=[_TASK, "timm", "swarm-vit"],
        license=license_name,
        base_model=_base_model(recipe),
        model_name=name,
        eval_results=[
            EvalResult(
                task_type=_TASK,
                dataset_type=recipe.dataset,
                dataset_name=recipe.dataset,
                dataset_split=result.part,
                metric_type="accuracy",
                metric_value=round(result.top1, 4),
                metric_name=f"Top-1 accuracy after {result.step} updates",
            )
            for result in (record.results if record is not None else ())
        ],
    )
    return data.to_yaml().strip()


def _base_model(recipe: Recipe) -> str | None:
    """Name on the hub of the pretrained weights that the training started from; None without any."""
    weights = timm.get_pretrained_cfg(recipe.model) if recipe.pretrained else None
    return None if weights is None else weights.hf_hub_id


def _summary(trained: Trained, record: RunRecord | None) -> str:
    recipe = trained.recipe
    parameters = sum(parameter.numel() for parameter in trained.model.parameters()) / 1e6
    who = "Trained"
    if record is not None and record.peers > 1:
        who = f"{record.peers} peers of a swarm of volunteers trained it together over the internet,"
    begin = f", from timm's weights `{recipe.model}`, whose licence applies" if recipe.pretrained else ", from scratch"
    return (
        f"`{recipe.model}` of timm with {parameters:,.2f} million parameters and {recipe.num_classes} classes. "
        f"{who} on `{recipe.dataset}` for {trained.step:,} updates{begin}."
    )


def _use(recipe: Recipe, has_onnx: bool) -> str:
    given = preprocessing(recipe)
    white_on_black = " They are white on black." if recipe.dataset in _WHITE_ON_BLACK else ""
    shape = f"(batch, {recipe.channels}, {recipe.image_size}, {recipe.image_size})"
    lines = [
        "## Use\n",
        "```python",
        "import timm",
        "",
        'model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or "hf-hub:NAME/MODEL"',
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
        "```\n",
        f"The model takes images {shape}: values from 0 to 1, less the mean {_numbers(given['mean'])}, over the "
        f"deviation {_numbers(given['std'])}." + white_on_black,
    ]
    if has_onnx:
        lines.append(
            f"\n`{MODEL}` is the same for ONNX: `{IMAGES}` {shape} to `{LOGITS}` (batch, {recipe.num_classes})."
        )
    return "\n".join(lines)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _results(trained: Trained, record: RunRecord | None) -> str:
    if record is None or not record.results:
        return "## Results\n\nNo validation or test results of these weights are recorded."
    rows = ["| images | after updates | top-1 | top-5 | loss | how many |", "|---|---|---|---|---|---|"]
    rows += [_row(result) for result in record.results]
    notes = []
    if any(result.part == "validation" for result in record.results):
        notes.append("The weights were chosen by their validation result, which is therefore a little too good.")
    others = [result for result in record.results if result.step != trained.step]
    if others:
        notes.append(
            f"These are the weights of step {trained.step}. Results above of another step belong to other weights."
        )
    return "\n".join(["## Results\n", *rows, *([""] if notes else []), " ".join(notes)]).rstrip()


def _row(result: Measured) -> str:
    shown = [_percent(result.top1), _percent(result.top5), "–" if result.loss is None else f"{result.loss:.4f}"]
    images = "–" if result.images is None else f"{result.images:,}"
    return f"| {result.part} | {result.step:,} | {' | '.join(shown)} | {images} |"


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.2f} %"


def _training(trained: Trained, record: RunRecord | None) -> str:
    recipe = trained.recipe
    lines = ["## Training\n"]
    if record is not None:
        peers = "one participant" if record.peers == 1 else f"{record.peers} peers"
        lines.append(
            f"Run `{record.run_id}`: {record.updates:,} updates with {record.samples:,} samples of {peers}, as "
            "recorded in the run folder that these weights come from."
        )
    lines.append(f"Trained with swarm-vit; the recipe has the fingerprint `{recipe.fingerprint}`.\n")
    skipped = set() if record is None or record.peers > 1 else _RECIPE_OF_SWARMS
    lines += ["| setting | value |", "|---|---|"]
    lines += [
        f"| {field.name} | {value} |"
        for field in fields(recipe)
        if (value := asdict(recipe)[field.name]) is not None and field.name not in skipped
    ]
    if record is not None and record.versions:
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        lines.append(f"\nVersions: {versions}.")
    return "\n".join(lines)


def _contributors(names: Sequence[str]) -> str:
    if not names:
        return ""
    return "\n".join(
        ["## Contributors\n", "These contributors agreed to be named:\n", *(f"- {_escaped(name)}" for name in names)]
    )


def _escaped(name: str) -> str:
    """The name with the special letters of Markdown and HTML escaped."""
    return "".join(f"\\{letter}" if letter in r"\`*_[]|#" else letter for letter in html.escape(name, quote=False))
