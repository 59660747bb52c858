"""Files in a folder of images that cannot be read: skipped and named by a peer, found by the doctor, up to a limit."""

import json
import os
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from recipe.data.damaged_images import ImagesByClass
from recipe.data.sampler import PADDING
from recipe.data.vision_data import VisionData
from recipe.errors import InputError
from recipe.presets import preset
from recipe.registry import build_data
from swarm.cli import doctor
from tests.helpers.cli import PeerProgram, reaping

pytestmark = pytest.mark.timeout(300)

RECIPE = replace(preset("imagefolder-vit-small"), num_classes=2, image_size=16, patch_size=4, channels=1)
TRAIN, VAL = 40, 4
"""Images of each of two classes."""


@pytest.fixture
def folder(tmp_path):
    """A folder of JPEGs, each with a brightness of its own."""
    random = np.random.default_rng(0)
    for part, count in (("train", TRAIN), ("val", VAL)):
        for name in ("cat", "dog"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "data" / part / name / f"{i:02}.jpg")
    return tmp_path / "data"


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def opened(folder, num_workers=0) -> VisionData:
    data = build_data(RECIPE, folder, batch_size=4, num_workers=num_workers)
    data.setup()
    return data


def one_pass(data: VisionData) -> list[torch.Tensor]:
    """Return every training image once, as the trainer gets them."""
    batches = islice(data.train_dataloader(), 2 * TRAIN // data.batch_size)
    return [data.on_before_batch_transfer(batch, 0)[0] for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_next_file_stands_in_and_the_damaged_one_is_named(folder, caplog, num_workers):
    damaged = folder / "train" / "cat" / "07.jpg"
    cut(damaged)
    images = one_pass(opened(folder, num_workers))
    assert len(caplog.messages) == 1, "once, however often it is met"
    assert caplog.messages[0].startswith(f"{damaged} is no readable image (")
    assert caplog.messages[0].endswith("and is skipped (1 of 80, at most 10).")
    again = one_pass(opened(folder))
    assert all(torch.equal(one, other) for one, other in zip(images, again, strict=True)), "the same for every peer"
    assert ImagesByClass(folder / "train")[7][0] == ImagesByClass(folder / "train")[8][0]


def test_a_validation_counts_no_image_twice(folder):
    (folder / "val" / "dog" / "03.jpg").write_text("no image")
    labels = torch.cat([labels for _, labels in opened(folder).val_dataloader()])
    assert labels.tolist() == [0] * VAL + [1] * (VAL - 1) + [PADDING]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_too_many_end_it(folder, num_workers):
    for i in range(5, 16):
        cut(folder / "train" / "dog" / f"{i:02}.jpg")
    with pytest.raises(InputError, match=r"^1[01] of 80 images in .*/train cannot be read, such as .*\.jpg \([^)]"):
        one_pass(opened(folder, num_workers))


def test_a_folder_without_any_image_that_can_be_read(folder):
    for path in (folder / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="of 80 images"):
        one_pass(opened(folder))


@pytest.mark.parametrize(("images", "limit"), [(1, 0), (5, 4), (80, 10), (5_000, 50), (1_281_167, 100)])
def test_how_many_are_too_many(folder, images, limit):
    found = ImagesByClass(folder / "train")
    found.samples = found.samples[:1] * images
    assert found.limit == limit


@pytest.mark.parametrize(("damaged", "state"), [(0, "ok"), (2, "warning"), (11, "failed")])
def test_the_doctor_finds_them(folder, tmp_path, capsys, monkeypatch, damaged, state):
    monkeypatch.delenv("INITIAL_PEERS", raising=False)
    for i in range(damaged):
        cut(folder / "train" / "cat" / f"{i:02}.jpg")
    said: list[str] = []
    options = ["--data-dir", str(folder), "--output-dir", str(tmp_path / "runs"), "--check-images", "--json"]
    assert doctor.main(options, say=said.append) == (state == "failed")
    check = next(check for check in json.loads(said[0])["checks"] if check["name"] == "images")
    assert check["state"] == state
    readable = f"{damaged} of 88 cannot be read" if damaged else "all 88 can be read"
    assert check["found"].startswith(f"{readable}; the digest of their classes is "), "a helper's organiser needs it"
    named = [line for line in capsys.readouterr().err.splitlines() if ".jpg: " in line]
    assert len(named) == damaged


def test_the_doctor_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("INITIAL_PEERS", raising=False)
    said: list[str] = []
    assert doctor.main(
        ["--data-dir", str(tmp_path), "--output-dir", str(tmp_path), "--check-images", "--json"], said.append
    )
    assert "has no folders train, val or test" in said[0]


def test_a_peer_trains_on_without_it_and_ends_in_one_sentence_when_there_are_too_many(folder, tmp_path):
    recipe = replace(
        RECIPE, name="pictures", embed_dim=32, depth=1, num_heads=2, target_batch_size=40, total_steps=4, warmup_steps=1
    )
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    options = ["--recipe", str(tmp_path / "recipe.json"), "--data-dir", str(folder), "--batch-size", "4"]
    options += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-workers", "1"]
    cut(folder / "train" / "cat" / "07.jpg")
    with reaping() as programs:
        programs.append(peer := PeerProgram(tmp_path, "one", "ada", "--run-id", "one", *options))
        assert peer.wait(120) == 0, peer.output
        assert peer.output.count(f"{os.path.join('cat', '07.jpg')} is no readable image") == 1
        assert json.loads(peer.folder.summary.read_text())["outcome"] == "completed"
        for i in range(10, 20):
            cut(folder / "train" / "dog" / f"{i:02}.jpg")
        programs.append(peer := PeerProgram(tmp_path, "many", "ada", "--run-id", "many", *options))
        assert peer.wait(120) == 2, peer.output
        assert "Traceback" not in peer.output
        assert peer.output.count("error: ") == 1
        assert "--check-images` names them all." in peer.output.strip().splitlines()[-1]
