"""Exports of a trained model, as timm, the hub and ONNX Runtime read them."""

import json
import os
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image

from recipe.data.augmentation import eval_transform
from recipe.export import onnx_file
from recipe.export.run_record import read_record
from recipe.export.timm_folder import preprocessing
from recipe.presets import preset
from recipe.registry import build_task
from recipe.run_folder import RunFolder
from swarm.cli import export


def small(name: str, **changes):
    """A preset with a narrow model. timm has no pretrained weights of its shape."""
    shape = {"embed_dim": 16, "depth": 1, "num_heads": 2, "initialisation": "balanced"}
    return replace(preset(name), **{"pretrained": False, **shape, **changes})


def run_of(tmp_path, recipe, step: int = 40) -> RunFolder:
    """A run folder with a best checkpoint. No seed gives its weights."""
    folder = RunFolder.create(tmp_path / "runs", "night-1", "ada")
    folder.write_recipe(recipe)
    task = build_task(recipe)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    checkpoint = {"state_dict": task.state_dict(), "global_step": step, "recipe": recipe.to_json()}
    torch.save(checkpoint, folder.checkpoints / "best.ckpt")
    return folder


def logits_of(folder: RunFolder, recipe, images: torch.Tensor) -> torch.Tensor:
    """The logits of the checkpoint, computed without the code under test."""
    task = build_task(recipe)
    task.load_state_dict(torch.load(folder.checkpoints / "best.ckpt", weights_only=True)["state_dict"])
    with torch.no_grad():
        return task.eval()(images)


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def images_for(recipe, number: int = 5) -> torch.Tensor:
    return torch.randn(number, recipe.channels, recipe.image_size, recipe.image_size)


@pytest.mark.parametrize(
    "recipe",
    [
        preset("digits"),
        small("glyphs"),
        small("cifar10-vit-tiny"),
        replace(
            small("digits"),
            model="resnet10t",
            patch_size=None,
            embed_dim=None,
            depth=None,
            num_heads=None,
            initialisation="timm",
            image_size=32,
            channels=3,
        ),
    ],
    ids=["digits", "glyphs", "cifar10", "resnet"],
)
def test_timm_gives_the_same_logits_bit_for_bit(recipe, tmp_path, capsys):
    folder = run_of(tmp_path, recipe)
    assert export.main([str(folder.path), "--to", str(tmp_path / "model")]) == 0, capsys.readouterr().err
    assert "same logits, bit for bit" in capsys.readouterr().out
    model = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    images = images_for(recipe)
    assert torch.equal(model(images), logits_of(folder, recipe, images))
    config = timm.data.resolve_model_data_config(model)
    assert config["input_size"] == (recipe.channels, recipe.image_size, recipe.image_size)
    assert len(model.pretrained_cfg["label_names"]) == model.num_classes == recipe.num_classes
    assert names_in(tmp_path / "model") == ["README.md", "config.json", "model.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [small("digits"), small("glyphs")], ids=["digits", "glyphs"])
def test_onnx_runtime_gives_the_same_logits_for_any_number_of_images(recipe, tmp_path, capsys):
    folder = run_of(tmp_path, recipe)
    assert export.main([str(folder.path), "--to", str(tmp_path / "model"), "--onnx"]) == 0, capsys.readouterr().err
    assert "ONNX Runtime gives them within" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(tmp_path / "model" / "model.onnx")
    for number in (1, 7):
        images = images_for(recipe, number)
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        np.testing.assert_allclose(logits, logits_of(folder, recipe, images), rtol=0, atol=1e-4)


def test_onnx_without_its_packages_is_refused_before_anything_is_read(tmp_path, refusal, monkeypatch):
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None if name == "onnxscript" else name)
    said = refusal(export.main, ["no such folder", "--to", str(tmp_path / "model"), "--onnx"])
    assert said == "--onnx needs packages that are missing: pip install onnxscript."


@pytest.mark.parametrize(
    ("recipe", "side"),
    [(small("cifar10-vit-tiny"), 32), (small("imagefolder-vit-small"), 300)],
    ids=["cifar10", "folder"],
)
def test_timms_preprocessing_is_that_of_the_evaluation(recipe, side):
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    image, given = Image.fromarray(pixels), preprocessing(recipe)
    transformed = timm.data.create_transform(**given, is_training=False)(image)
    torch.testing.assert_close(transformed, eval_transform(recipe)(image))


def test_the_card_says_what_the_run_folder_says(tmp_path):
    recipe = small("digits")
    folder = run_of(tmp_path, recipe)
    write_lines(folder.metrics, {"step": 20, "val/top1": 0.5}, {"step": 40, "val/top1": 0.75, "val/loss": 0.25})
    rounds = [
        {"step": 39, "outcome": "averaged", "members": ["a", "b"], "samples": 520},
        {"step": 40, "outcome": "the link broke", "members": ["a", "e"], "samples": 7},
        {"step": 40, "outcome": "averaged", "members": ["a", "c"], "samples": 530},
        {"step": 41, "outcome": "averaged", "members": ["a", "d"], "samples": 540},
    ]
    write_lines(folder.rounds, *rounds)
    write_lines(folder.evaluations, {"step": 30, "top1": 0.7, "top5": 0.9, "loss": 0.3, "images": 270})
    assert export.main([str(folder.path), "--to", str(tmp_path / "digits-vit"), "--license", "mit"]) == 0
    card = ModelCard.load(tmp_path / "digits-vit" / "README.md")
    assert (card.data.library_name, card.data.license, card.data.base_model) == ("timm", "mit", None)
    found = {(result.dataset_split, result.metric_value) for result in card.data.eval_results}
    assert found == {("validation", 0.75), ("test", 0.7)}
    assert "| validation | 40 | 75.00 % | – | 0.2500 | – |" in card.text
    assert "| test | 30 | 70.00 % | 90.00 % | 0.3000 | 270 |" in card.text
    assert "Results above of another step belong to other weights" in card.text
    assert "2 updates with 1,050 samples of 3 peers" in card.text
    assert f"`{recipe.fingerprint}`" in card.text
    assert "| embed_dim | 16 |" in card.text
    assert "## Contributors" not in card.text, "no contributor agreed to be named"


def test_the_card_of_a_baseline_counts_all_samples_until_its_weights(tmp_path):
    """The best checkpoint is of step 40; the run was resumed at step 50, and ended at step 80."""
    folder = run_of(tmp_path, small("digits"))
    for resumed in ({"samples": 30 * 256}, {"samples": 80 * 256}):  # an earlier version counted since it was resumed
        summary = {"run_id": "run", "outcome": "completed", "steps": 80, "global_batch": 256, "resumed_step": 50}
        folder.summary.write_text(json.dumps(summary | resumed))
        assert read_record(folder, 40).samples == 40 * 256
        assert read_record(folder, 40).updates == 40
        assert read_record(folder, 80).samples == 80 * 256


@pytest.mark.slow
def test_weights_that_began_with_others_name_them(tmp_path):
    folder = run_of(tmp_path, small("cifar10-vit-tiny"))
    recipe = replace(preset("cifar10-vit-base"), model="vit_tiny_patch16_224", image_size=32)
    task = build_task(replace(recipe, pretrained=False))
    content = {"state_dict": task.state_dict(), "global_step": 1, "recipe": recipe.to_json()}
    torch.save(content, moved := folder.path / "moved.ckpt")
    assert export.main([str(moved), "--to", str(tmp_path / "m")]) == 0
    card = ModelCard.load(tmp_path / "m" / "README.md")
    assert card.data.base_model == timm.get_pretrained_cfg("vit_tiny_patch16_224").hf_hub_id
    assert "whose licence applies" in card.text
    assert timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).num_classes == 10


def test_contributors_that_agreed_are_named_as_text(tmp_path):
    folder = run_of(tmp_path, small("digits"))
    (names := tmp_path / "names.txt").write_text(
        "# agreed on 1 May\nAda\n\n<script>x</script>\n[b](javascript:1)\nAda\n"
    )
    assert export.main([str(folder.path), "--to", str(tmp_path / "m"), "--name-contributors", str(names)]) == 0
    card = (tmp_path / "m" / "README.md").read_text()
    assert card.count("- Ada\n") == 1
    assert "<script>" not in card
    assert "\\[b\\](javascript:1)" in card


@pytest.mark.slow
def test_an_earlier_export_is_replaced_only_when_asked_and_as_a_whole(tmp_path, refusal):
    folder = run_of(tmp_path, small("digits"))
    given = [str(folder.path), "--to", str(tmp_path / "m")]
    assert export.main([*given, "--onnx"]) == 0
    (tmp_path / "m" / "mine.txt").write_text("kept")
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    run_of(tmp_path, small("digits"))
    assert refusal(export.main, given).endswith("name another --to, or add --overwrite to replace an earlier export.")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
    assert export.main([*given, "--overwrite"]) == 0
    assert (tmp_path / "m" / "model.safetensors").read_bytes() != before
    assert names_in(tmp_path / "m") == ["README.md", "config.json", "mine.txt", "model.safetensors"]
    assert names_in(tmp_path) == ["m", "runs"], "nothing half is left"


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", ["model.safetensors", "README.md", "config.json"])
def test_an_export_that_breaks_off_leaves_no_mixture_of_two_models(fails_at, tmp_path, monkeypatch, refusal):
    given = [str(run_of(tmp_path, small("digits")).path), "--to", str(tmp_path / "m"), "--overwrite"]
    assert export.main([*given, "--onnx"]) == 0
    earlier = {path.name: path.stat().st_ino for path in (tmp_path / "m").iterdir()}
    replace_file = os.replace

    def replace_or_fail(source, target):
        if target == tmp_path / "m" / fails_at:
            raise OSError(5, "Input/output error")
        replace_file(source, target)

    with monkeypatch.context() as broken:
        broken.setattr("os.replace", replace_or_fail)
        assert "Input/output error" in refusal(export.main, given)
    assert not any(path.stat().st_ino == earlier[path.name] for path in (tmp_path / "m").iterdir())
    assert not (tmp_path / "m" / "config.json").exists()
    assert export.main(given) == 0


def test_class_folders_give_the_names_of_classes(tmp_path, refusal):
    recipe = small("imagefolder-vit-small", image_size=32, patch_size=8, num_classes=2)
    folder = run_of(tmp_path, recipe)
    for name in ("dog", "cat"):
        (tmp_path / "images" / "train" / name).mkdir(parents=True)
    given = [str(folder.path), "--to", str(tmp_path / "m"), "--data-dir", str(tmp_path / "images")]
    assert export.main(given) == 0
    assert json.loads((tmp_path / "m" / "config.json").read_text())["label_names"] == ["cat", "dog"]
    (tmp_path / "images" / "train" / "emu").mkdir()
    assert "3 class folders and the recipe 2 classes" in refusal(export.main, [*given, "--overwrite"])


def test_a_checkpoint_by_itself_is_enough(tmp_path):
    recipe = small("digits")
    moved = tmp_path / "moved.ckpt"
    (run_of(tmp_path, recipe).checkpoints / "best.ckpt").rename(moved)
    assert export.main([str(moved), "--to", str(tmp_path / "m")]) == 0
    assert "No validation or test results" in (tmp_path / "m" / "README.md").read_text()


def test_what_cannot_be_exported_is_refused_in_a_sentence(tmp_path, refusal):
    folder = run_of(tmp_path, small("digits"))
    to = ["--to", str(tmp_path / "m")]
    assert "name one of its peers, such as" in refusal(export.main, [str(folder.path.parent), *to])
    assert "There is no checkpoint in" in refusal(export.main, [str(tmp_path), *to])
    assert "cannot be read" in refusal(export.main, [str(tmp_path / "no.ckpt"), *to])
    assert "--to" in refusal(export.main, [str(folder.path), "--to", str(tmp_path / "no name")])
    best = folder.checkpoints / "best.ckpt"
    content = torch.load(best, weights_only=True)
    best.write_bytes(best.read_bytes()[:5000])
    assert "name another file" in refusal(export.main, [str(folder.path), *to])
    next(iter(content["state_dict"].values())).fill_(float("nan"))
    torch.save(content, best)
    assert "are not finite" in refusal(export.main, [str(folder.path), *to])
    (tmp_path / "names").write_text("a\u202eb\n")
    run_of(tmp_path, small("digits"))
    assert "is no name" in refusal(export.main, [str(folder.path), *to, "--name-contributors", str(tmp_path / "names")])
    assert not (tmp_path / "m").exists()


def write_lines(path, *lines: dict) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
