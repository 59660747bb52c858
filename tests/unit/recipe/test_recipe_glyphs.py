"""The data set `glyphs`, made from the fonts that matplotlib brings: no fonts of the system are needed."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch

from recipe.data.datasets import open_splits
from recipe.errors import InputError
from recipe.glyphs import __main__ as glyphs
from recipe.glyphs.archive import FILE, REFERENCE_DIGEST, GlyphArchive
from recipe.glyphs.choose import PICTURES, Candidate, families, num_alike, recognised, similarities, split, vectors
from recipe.glyphs.drawing import CHARACTERS, SIDE, Typeface, UnusableTypeface, Variation
from recipe.glyphs.typefaces import PACKAGES, PARTS, ListedTypeface, file_digest, listed_typefaces, listed_versions
from recipe.presets import preset
from recipe.registry import build_data
from swarm.cli.checks import check_data
from swarm.membership.run_manifest import PROTOCOL, RunManifest

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FACES = {"train": "DejaVuSans.ttf", "val": "DejaVuSerif.ttf", "test": "DejaVuSansMono.ttf"}


def small_list() -> list[ListedTypeface]:
    """A list with one typeface for each part."""
    return [
        ListedTypeface(part=part, family=file, package="fonts-go", file=file, sha256=file_digest(FONTS / file))
        for part, file in FACES.items()
    ]


@pytest.fixture(scope="module")
def archive() -> GlyphArchive:
    return glyphs.draw(small_list(), FONTS)


@pytest.fixture
def data_dir(archive, tmp_path) -> Path:
    archive.save(tmp_path / FILE)
    return tmp_path


def ink_rows(image: np.ndarray) -> np.ndarray:
    return np.flatnonzero((image > 127).any(axis=1))


# The committed lists


def test_the_committed_list_can_be_read_and_names_hundreds_of_typefaces():
    typefaces = listed_typefaces()
    assert len(typefaces) > 500
    assert {typeface.part for typeface in typefaces} == set(PARTS)
    assert len({typeface.file for typeface in typefaces}) == len({typeface.sha256 for typeface in typefaces})
    assert all(re.fullmatch("[0-9a-f]{16}", typeface.sha256) for typeface in typefaces)
    assert len({typeface.file for typeface in typefaces}) == len(typefaces)


def test_no_family_is_in_two_parts():
    parts = {}
    for typeface in listed_typefaces():
        assert parts.setdefault(typeface.family, typeface.part) == typeface.part, typeface.family


def test_every_package_is_used_and_has_a_version_and_a_licence():
    assert {typeface.package for typeface in listed_typefaces()} == set(listed_versions())
    with PACKAGES.open(newline="") as file:
        assert all(row["version"] and row["licence"] for row in csv.DictReader(file))


# Drawing


def test_small_letters_stay_smaller_than_capitals_and_stand_on_one_baseline():
    typeface = Typeface(FONTS / "DejaVuSans.ttf")
    for small in "csvwxz":
        of_small, of_capital = ink_rows(typeface.draw(small)), ink_rows(typeface.draw(small.upper()))
        assert len(of_small) < 0.85 * len(of_capital)
        assert abs(of_small[-1] - of_capital[-1]) <= 1
    assert ink_rows(typeface.draw("p"))[-1] > ink_rows(typeface.draw("x"))[-1] + 2


def test_all_characters_lie_within_the_image():
    for image in Typeface(FONTS / "DejaVuSans-Bold.ttf").images:
        assert not image[[0, -1]].any()
        assert not image[:, [0, -1]].any()


def test_variations_are_repeatable_and_differ():
    typeface = Typeface(FONTS / "DejaVuSans.ttf")
    plain = typeface.draw("B")
    assert Variation.of("B", 0) == Variation()
    assert Variation.of("B", 1) == Variation.of("B", 1)
    assert len({Variation.of(character, 1) for character in CHARACTERS}) > 40
    bold, thin = (int(typeface.draw("B", Variation(weight=weight)).sum()) for weight in (1, -1))
    assert thin < plain.sum() < bold
    np.testing.assert_array_equal(typeface.draw("B", Variation(right=4, down=4)), np.roll(plain, (1, 1), (0, 1)))
    assert len(ink_rows(typeface.draw("B", Variation(size=0.85)))) < len(ink_rows(plain))


def test_fonts_that_lack_characters_and_files_that_are_no_fonts_are_noticed(tmp_path):
    assert Typeface(FONTS / "DejaVuSans.ttf").is_complete
    assert not Typeface(FONTS / "LastResortHE-Regular.ttf").is_complete, "it draws one box for all"
    with pytest.raises(UnusableTypeface, match="draws nothing for some characters"):
        Typeface(FONTS / "STIXSizOneSymReg.ttf")
    (tmp_path / "no.ttf").write_bytes(b"no font")
    with pytest.raises(UnusableTypeface, match="install its package again"):
        Typeface(tmp_path / "no.ttf")


# The command


@pytest.fixture
def with_small_list(monkeypatch):
    monkeypatch.setattr(glyphs, "listed_typefaces", small_list)


def test_the_command_makes_the_file(with_small_list, tmp_path, capsys, archive):
    assert glyphs.main(["--fonts-dir", str(FONTS), "--data-dir", str(tmp_path / "new")]) == 0
    shown = capsys.readouterr()
    assert f"Its digest {archive.digest} is not the published {REFERENCE_DIGEST}" in shown.out
    assert shown.err == ""
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE]
    assert GlyphArchive.load(tmp_path / "new" / FILE).digest == archive.digest


def test_missing_fonts_are_one_sentence_that_names_their_packages_alone(tmp_path, capsys):
    (tmp_path / "fonts").mkdir()
    present = next(typeface for typeface in listed_typefaces() if typeface.package == "fonts-roadgeek")
    arguments = ["--fonts-dir", str(tmp_path / "fonts"), "--data-dir", str(tmp_path / "data")]
    assert glyphs.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {len(listed_typefaces())} of {len(listed_typefaces())} typefaces are not in ")
    assert line.endswith("fonts-yrsa-rasa` (Debian 12 has them all), or take glyphs.npz from the run's organiser.")
    assert "`apt-get install --no-install-recommends fonts-adf-accanthis " in line
    assert not (tmp_path / "data").exists()
    for typeface in listed_typefaces():
        if typeface.package == present.package:
            (tmp_path / "fonts" / typeface.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "fonts" / typeface.file).touch()
    assert glyphs.main(arguments) == 2
    assert present.package not in capsys.readouterr().err


def test_a_package_of_another_version_is_named(monkeypatch, tmp_path, capsys):
    other = [replace(small_list()[0], sha256="0" * 16), *small_list()[1:]]
    monkeypatch.setattr(glyphs, "listed_typefaces", lambda: other)
    assert glyphs.main(["--fonts-dir", str(FONTS), "--data-dir", str(tmp_path)]) == 0
    assert (
        capsys.readouterr().err
        == f"fonts-go is not the listed version {listed_versions()['fonts-go']}: its images differ.\n"
    )


def test_the_published_digest_is_recognised():
    assert glyphs.verdict(REFERENCE_DIGEST) == f"Its digest {REFERENCE_DIGEST} is the published one."


# The file, and training on it


def test_the_parts_are_those_of_the_list(archive):
    counts = {part: len(images) for part, images in archive.images.items()}
    assert counts == {part: glyphs.VARIATIONS[part] * len(CHARACTERS) for part in PARTS}
    np.testing.assert_array_equal(archive.images["val"], Typeface(FONTS / "DejaVuSerif.ttf").images)
    assert archive.labels["val"].tolist() == list(range(len(CHARACTERS)))


def test_the_digest_is_of_every_pixel_and_label(archive):
    labels = archive.labels["test"].copy()
    labels[7] += 1
    assert replace(archive, labels=archive.labels | {"test": labels}).digest != archive.digest
    images = archive.images["train"].copy()
    images[-1, -1, -1] += 1
    assert replace(archive, images=archive.images | {"train": images}).digest != archive.digest


def test_batches(data_dir, archive):
    data = build_data(preset("glyphs"), data_dir, batch_size=31, identity="ada")
    images, labels = next(iter(data.train_dataloader()))
    assert (images.shape, images.dtype, labels.dtype) == ((31, 1, SIDE, SIDE), torch.float32, torch.int64)
    assert data.num_train_samples == 2 * len(CHARACTERS)
    assert data.digest == archive.digest
    tested = torch.cat([images for images, _ in data.test_dataloader()])
    stored = torch.from_numpy(archive.images["test"])[:, None] / 255
    torch.testing.assert_close(tested * 0.246 + 0.079, stored)


def test_other_sizes_and_colours(data_dir):
    recipe = replace(preset("glyphs"), image_size=16, channels=3)
    splits = open_splits(recipe, data_dir)
    images, _ = splits.val.gather(range(4))
    assert images.shape == (4, 3, 16, 16)
    assert 0.5 < images.max() <= 1.0


def test_peers_with_other_images_are_refused(data_dir, archive, tmp_path):
    manifest = RunManifest(PROTOCOL, "run", preset("glyphs")).with_classes(archive.digest, data_dir)
    assert check_data(manifest, data_dir).state == "ok"
    replace(archive, images=archive.images | {"val": archive.images["test"]}).save(data_dir / FILE)
    found = check_data(manifest, data_dir)
    assert found.state == "failed"
    assert "or glyphs.npz or vocab.txt, differ" in found.found


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"no archive"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(InputError, match=rf"{FILE} is no archive of glyphs .*python -m recipe.glyphs"):
        open_splits(preset("glyphs"), tmp_path)


def test_a_file_with_a_damaged_byte_is_refused_or_read_right(data_dir, archive):
    whole = (data_dir / FILE).read_bytes()
    for place in range(100, len(whole), len(whole) // 60):
        (data_dir / FILE).write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            assert GlyphArchive.load(data_dir / FILE).digest == archive.digest, place
        except InputError:
            pass


def test_a_file_with_other_arrays_is_refused(tmp_path, archive):
    for part, changes in {
        "images": {"images": archive.images | {"val": archive.images["val"].astype(np.float32)}},
        "labels": {"labels": archive.labels | {"val": archive.labels["val"][1:]}},
        "label 62": {"labels": archive.labels | {"val": archive.labels["val"] + np.uint8(1)}},
    }.items():
        replace(archive, **changes).save(tmp_path / FILE)
        with pytest.raises(InputError, match=part):
            GlyphArchive.load(tmp_path / FILE)


def test_no_file_is_one_sentence_with_the_command(tmp_path):
    with pytest.raises(InputError, match=rf"There is no {tmp_path / FILE}: make it with `python -m recipe.glyphs"):
        open_splits(preset("glyphs"), tmp_path)


# How the list is chosen


@pytest.fixture(scope="module")
def candidates() -> list[Candidate]:
    """Four candidates: Sans in two packages, Mono and Serif in one each."""
    files = [("a", "DejaVuSans"), ("b", "DejaVuSans"), ("c", "DejaVuSansMono"), ("d", "DejaVuSerif")]
    return [
        Candidate(package, FONTS / f"{file}.ttf", Typeface(FONTS / f"{file}.ttf").images) for package, file in files
    ]


def test_typefaces_that_resemble_each_other_are_one_family(candidates):
    numbers = families(candidates, similarities(vectors(candidates)))
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3


def test_a_typeface_is_recognised_by_other_families_alone(candidates):
    images = vectors(candidates)
    alone = recognised(images, np.arange(4))
    assert alone[0] == alone[1] == 1.0, "its copy stands in another family"
    assert (recognised(images, np.array([0, 0, 1, 2])) < 1.0).all()


def test_a_font_of_symbols_is_not_recognised(candidates):
    symbols = Candidate("e", FONTS / "cmsy10.ttf", Typeface(FONTS / "cmsy10.ttf").images)
    shares = recognised(vectors([*candidates, symbols]), np.arange(5))
    assert shares[-1] < PICTURES < 0.8 < shares[:-1].min()


def test_capitals_in_place_of_small_letters_are_counted(candidates):
    images = vectors(candidates)[3:]
    repeated = images.copy()
    repeated[:, 36:] = images[:, 10:36]
    assert num_alike(images)[0] <= 5
    assert num_alike(repeated)[0] >= 26


def test_the_split_holds_out_a_tenth_of_small_families():
    members = {f"family-{i}": list(range(1 + i % 9)) for i in range(90)}
    parts = split(members)
    counts = {part: sum(len(members[name]) for name in members if parts[name] == part) for part in PARTS}
    total = sum(counts.values())
    assert 0.08 * total < counts["val"] <= 0.1 * total
    assert 0.08 * total < counts["test"] <= 0.1 * total
    assert max(len(members[name]) for name in members if parts[name] != "train") <= 6
    assert split(dict(reversed(members.items()))) == parts
