"""Images: splits, orders, loaders on files in the real formats, and augmentation that can be repeated."""

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10

from recipe.data.augmentation import TensorView
from recipe.data.datasets import TensorImages, open_splits, stratified
from recipe.data.sampler import PeerBatches, PeerSampler, sample_randomness
from recipe.errors import InputError
from recipe.presets import preset
from recipe.registry import DIGITS_FOLDS, build_data
from swarm.cli.checks import check_data, check_images
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from tests.helpers.paths import ROOT


def first(sampler, count):
    return list(islice(iter(sampler), count))


def test_order_depends_on_seed_and_identity_alone():
    order = first(PeerSampler(50, seed=1, identity="alice"), 120)
    assert order == first(PeerSampler(50, seed=1, identity="alice"), 120)
    assert order != first(PeerSampler(50, seed=1, identity="bob"), 120)
    assert order != first(PeerSampler(50, seed=2, identity="alice"), 120)
    assert order[:50] != order[50:100]


@pytest.mark.slow
def test_order_is_equal_in_another_process():
    code = "from recipe.data.sampler import PeerSampler; from itertools import islice; "
    code += "print(list(islice(iter(PeerSampler(50, 1, 'alice')), 70)))"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert printed.stdout.strip() == str(first(PeerSampler(50, 1, "alice"), 70)), printed.stderr


def test_every_pass_covers_every_sample_once():
    order = first(PeerSampler(37, seed=0, identity=""), 37 * 3)
    for begin in (0, 37, 74):
        assert sorted(order[begin : begin + 37]) == list(range(37))


@pytest.mark.parametrize("done", [0, 5, 36, 37, 50])
def test_order_goes_on_from_a_state(done):
    sampler = PeerSampler(37, 0, "alice")
    order = first(PeerSampler(37, 0, "alice"), 90)
    assert first(sampler, done) == order[:done]
    resumed = PeerSampler(37, 0, "alice")
    resumed.load_state_dict(sampler.state_dict())
    assert first(resumed, 90 - done) == order[done:]


def test_micro_batches_are_equal_in_size_and_numbered():
    batches = first(PeerBatches(PeerSampler(10, 0, ""), batch_size=4), 5)
    assert [[position for position, _ in batch] for batch in batches] == np.arange(20).reshape(5, 4).tolist()


def test_sample_randomness_is_splitmix64():
    # First outputs for seed 1234567 as published with the reference code (Vigna, splitmix64.c; Rosetta Code).
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert sample_randomness(1234567, np.arange(3)).tolist() == expected


def test_digits_split_is_pinned_and_stratified():
    splits = open_splits(preset("digits"), Path("unused"))
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [1257, 270, 270]
    assert splits.val.labels.bincount().min() >= 26
    other = open_splits(replace(preset("digits"), seed=9), Path("unused"))
    assert torch.equal(splits.val.images, other.val.images)
    pixels = (splits.val.images * 16).to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(pixels).hexdigest()[:16] == "102898adf821511b"


def test_digits_are_those_of_scikit_learn_split_as_it_splits():
    pixels, labels = load_digits(return_X_y=True)
    splits = open_splits(preset("digits"), Path("unused"))
    train, rest = stratified(labels, 0.30)
    val, test = (rest[part] for part in stratified(labels[rest], 0.50))
    for part, indices in ((splits.train, train), (splits.val, val), (splits.test, test)):
        assert (part.images.flatten(1).numpy() * 16 == pixels[indices]).all()
        assert (part.labels.numpy() == labels[indices]).all()


def test_the_folds_of_digits_validate_every_image_once():
    everything = TensorImages(*(torch.cat(parts) for parts in zip(*map(images_and_labels, all_digits()), strict=True)))
    validated = []
    for fold in DIGITS_FOLDS:
        splits = open_splits(replace(preset("digits"), dataset=fold), Path("unused"))
        assert splits.test is None
        assert len(splits.train) + len(splits.val) == len(everything) == 1797
        assert (splits.val.labels.bincount() - everything.labels.bincount() / 5).abs().max() < 1
        assert not as_set(splits.train) & as_set(splits.val)
        validated.append(as_set(splits.val))
    assert sum(map(len, validated)) == len(set().union(*validated)) == len(as_set(everything))


def all_digits() -> list[TensorImages]:
    splits = open_splits(preset("digits"), Path("unused"))
    return [splits.train, splits.val, splits.test]


def images_and_labels(part: TensorImages) -> tuple[torch.Tensor, torch.Tensor]:
    return part.images, part.labels


def as_set(part: TensorImages) -> set[bytes]:
    """The set of images. No two of the 1,797 are equal."""
    return {image.numpy().tobytes() for image in part.images}


def test_a_fold_of_digits_has_nothing_to_test_with():
    data = build_data(replace(preset("digits"), dataset="digits-fold-2"))
    with pytest.raises(InputError, match="a fold of digits has none"):
        data.test_dataloader()


def test_digits_batches():
    data = build_data(preset("digits"), batch_size=64, identity="alice")
    data.prepare_data()
    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    assert (images.shape, images.dtype, labels.shape, labels.dtype) == (
        (64, 1, 8, 8),
        torch.float32,
        (64,),
        torch.int64,
    )
    assert data.num_train_samples == 1257
    assert sum(len(labels) for _, labels in data.val_dataloader()) == 270
    assert sum(len(labels) for _, labels in data.test_dataloader()) == 270
    everything = torch.cat([images for images, _ in data.val_dataloader()])
    assert abs(everything.mean()) < 0.05
    assert abs(everything.std() - 1) < 0.05


def test_digits_in_other_sizes_and_colours():
    data = build_data(replace(preset("digits"), image_size=32, patch_size=8, channels=3), batch_size=4)
    assert next(iter(data.train_dataloader()))[0].shape == (4, 3, 32, 32)


def test_loaders_leave_the_global_random_state_alone():
    data = build_data(replace(preset("digits"), augmentation="light"), batch_size=8)
    before = torch.random.get_rng_state()
    next(iter(data.train_dataloader()))
    assert torch.equal(before, torch.random.get_rng_state())


def test_light_augmentation_does_not_depend_on_the_micro_batch():
    recipe = replace(preset("digits"), augmentation="light")
    plain = next(iter(build_data(preset("digits"), batch_size=32, identity="a").train_dataloader()))[0]
    big = next(iter(build_data(recipe, batch_size=32, identity="a").train_dataloader()))[0]
    small = torch.cat([x for x, _ in islice(build_data(recipe, batch_size=8, identity="a").train_dataloader(), 4)])
    assert torch.equal(big, small)
    assert not torch.equal(big, plain)


def test_light_augmentation_shifts():
    recipe = replace(preset("digits"), augmentation="light")
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 4, 4] = 1.0
    view = TensorView(TensorImages(image, torch.zeros(1, dtype=torch.int64)), recipe, key=3)
    shifted, _ = view.__getitems__([(position, 0) for position in range(200)])
    peaks = {divmod(int(flat.argmax()), 8) for flat in shifted.flatten(1)}
    assert peaks == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}


def test_position_counts_batches_that_were_trained_on():
    whole = build_data(preset("digits"), batch_size=8, identity="a")
    expected = [labels.tolist() for _, labels in islice(whole.train_dataloader(), 6)]
    resumed = build_data(preset("digits"), batch_size=8, identity="a")
    resumed.load_state_dict({"position": 16})
    assert [labels.tolist() for _, labels in islice(resumed.train_dataloader(), 4)] == expected[2:]
    assert resumed.state_dict() == {"position": 16}


@pytest.mark.slow
def test_synthetic_is_deterministic():
    recipe = preset("synthetic")
    one, two = (next(iter(build_data(recipe, batch_size=16).train_dataloader())) for _ in range(2))
    assert torch.equal(one[0], two[0])
    assert one[0].shape == (16, 3, 32, 32)


@pytest.mark.parametrize("batch_size", [0, 1258])
def test_micro_batch_that_cannot_work(batch_size):
    with pytest.raises(InputError, match="--batch-size"):
        build_data(preset("digits"), batch_size=batch_size).setup()


@pytest.fixture
def cifar_folder(tmp_path, monkeypatch):
    """CIFAR-10's python format with 20 images per batch; the checksums are of these files."""
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    random = np.random.default_rng(0)
    sums = {}
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        pixels = random.integers(0, 256, size=(20, 3072), dtype=np.uint8)
        entry = {"data": pixels, "labels": [i % 10 for i in range(20)], "batch_label": name, "filenames": [""] * 20}
        sums[name] = _pickled(folder / name, entry)
    meta_sum = _pickled(folder / "batches.meta", {"label_names": [f"class{i}" for i in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", [[n, s] for n, s in sums.items() if n != "test_batch"])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": meta_sum})
    return tmp_path


def _pickled(path, entry):
    path.write_bytes(pickle.dumps(entry, protocol=2))
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("augmentation", ["none", "light", "crop-flip", "randaugment"])
def test_cifar10(cifar_folder, augmentation):
    recipe = replace(preset("cifar10-vit-tiny"), augmentation=augmentation)
    data = build_data(recipe, cifar_folder, batch_size=6)
    data.prepare_data()
    data.setup()
    images, labels = next(iter(data.train_dataloader()))
    assert (images.shape, labels.dtype) == ((6, 3, 32, 32), torch.int64)
    again = next(iter(build_data(recipe, cifar_folder, batch_size=6).train_dataloader()))[0]
    assert torch.equal(images, again)
    assert data.num_train_samples == 90
    val_labels = torch.cat([labels for _, labels in data.val_dataloader()])
    assert sorted(val_labels.tolist()) == list(range(10))
    assert sum(len(labels) for _, labels in data.test_dataloader()) == 20


def test_cifar10_pixels_are_normalised_as_they_are(cifar_folder):
    recipe = replace(preset("cifar10-vit-tiny"), augmentation="none")
    data = build_data(recipe, cifar_folder, batch_size=1)
    stored = CIFAR10(cifar_folder, train=False).data[0] / 255.0
    expected = (stored - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]
    np.testing.assert_allclose(next(iter(data.test_dataloader()))[0][0].permute(1, 2, 0), expected, atol=1e-5)


def test_an_augmented_image_leaves_the_generators_of_the_gpus_alone(cifar_folder, monkeypatch):
    """With one seed, all GPUs that train together would draw the same dropout."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPUs were seeded"))
    recipe = replace(preset("cifar10-vit-tiny"), augmentation="randaugment")
    assert len(next(iter(build_data(recipe, cifar_folder, batch_size=2).train_dataloader()))[0]) == 2


def test_cifar10_for_pretrained_weights_is_large_and_normalised_as_they_expect(cifar_folder):
    data = build_data(preset("cifar10-vit-base"), cifar_folder, batch_size=2)
    images, _ = next(iter(data.train_dataloader()))
    assert images.shape == (2, 3, 224, 224)
    assert images.min() == -1  # padding is black: (0 - 0.5) / 0.5


def test_image_loaders_with_processes_give_the_same_images(cifar_folder):
    recipe = preset("cifar10-vit-tiny")
    here = build_data(recipe, cifar_folder, batch_size=4, num_workers=0).train_dataloader()
    there = build_data(recipe, cifar_folder, batch_size=4, num_workers=1).train_dataloader()
    for (one, _), (other, _) in islice(zip(here, there, strict=False), 3):
        assert torch.equal(one, other)


def test_the_processes_of_a_peer_take_turns_in_its_order():
    def batches(share, amount):
        data = build_data(preset("digits"), batch_size=4, identity="ada")
        if share is not None:
            data.deal_out(*share)
        return [images for images, _ in islice(data.train_dataloader(), amount)]

    alone, first, second = batches(None, 6), batches((0, 2), 3), batches((1, 2), 3)
    together = [batch for turn in zip(first, second, strict=True) for batch in turn]
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_cifar10_that_cannot_be_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    data = build_data(preset("cifar10-vit-tiny"), tmp_path)
    with pytest.raises(InputError, match=r"cifar-10-python.tar.gz.*--data-dir") as caught:
        data.prepare_data()
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(InputError, match="--data-dir"):
        data.setup()


def test_a_complete_cifar10_is_taken_from_a_folder_that_cannot_be_written(cifar_folder):
    """As /kaggle/input is, or a folder that another user has prepared. Here the lock file cannot be opened."""
    (cifar_folder / ".download.lock").mkdir()
    build_data(preset("cifar10-vit-tiny"), cifar_folder).prepare_data()


def test_a_damaged_file_of_cifar10_is_named(cifar_folder, monkeypatch):
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    damaged = cifar_folder / CIFAR10.base_folder / "data_batch_3"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    data = build_data(preset("cifar10-vit-tiny"), cifar_folder)
    for use in (data.prepare_data, data.setup):
        with pytest.raises(InputError) as caught:
            use()
        assert str(caught.value).startswith(f"{damaged} has the wrong checksum, ")
        assert "delete it, and connect this machine to the network or put cifar-10-python.tar.gz" in str(caught.value)
    assert check_data(RunManifest(PROTOCOL, "run", data.recipe), cifar_folder).found.startswith(
        f"{damaged} has the wrong checksum"
    )


@pytest.fixture
def image_folder(tmp_path):
    for part, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(["cat", "dog", "owl"]):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.full((20, 30, 3), 60 * label + i, dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
    return tmp_path


def folder_recipe(**changes):
    recipe = replace(preset("imagefolder-vit-small"), num_classes=3, image_size=16, patch_size=4)
    return replace(recipe, **changes)


@pytest.mark.parametrize("augmentation", ["none", "light", "crop-flip", "randaugment"])
def test_imagefolder(image_folder, augmentation):
    data = build_data(folder_recipe(augmentation=augmentation, channels=1), image_folder, batch_size=5)
    data.prepare_data()
    images, _ = next(iter(data.train_dataloader()))
    assert images.shape == (5, 1, 16, 16)
    assert torch.cat([labels for _, labels in data.val_dataloader()]).tolist() == [0, 0, 1, 1, 2, 2]
    assert len(data.digest) == 16
    assert build_data(preset("digits")).digest == ""
    with pytest.raises(InputError, match="test"):
        data.test_dataloader()


def test_a_class_folder_whose_name_is_not_in_utf_8_is_named(image_folder):
    for part in ("train", "val"):
        shutil.copytree(image_folder / part / "cat", image_folder / part / os.fsdecode(b"caf\xe9"))
    with pytest.raises(InputError, match=r"train is not in UTF-8 \('caf\\udce9'\): rename it"):
        build_data(folder_recipe(num_classes=4), image_folder, batch_size=2).setup()
    assert check_images(image_folder, print).state == "failed"


def test_imagefolder_errors(image_folder, tmp_path):
    cases = {
        "--num-classes 3": (folder_recipe(num_classes=4), image_folder),
        "--data-dir": (folder_recipe(), tmp_path / "nowhere"),
        "--batch-size": (folder_recipe(), image_folder),
    }
    for expected, (recipe, folder) in cases.items():
        with pytest.raises(InputError, match=expected):
            build_data(recipe, folder, batch_size=13).setup()
    (image_folder / "val" / "emu").mkdir()
    with pytest.raises(InputError, match="emu"):
        build_data(folder_recipe(), image_folder, batch_size=2).setup()
    Image.new("RGB", (20, 20)).save(image_folder / "val" / "emu" / "0.png")
    with pytest.raises(InputError, match="different class folders"):
        build_data(folder_recipe(), image_folder, batch_size=2).setup()
