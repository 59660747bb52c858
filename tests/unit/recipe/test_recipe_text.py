"""Texts as data and models: what is read, how it is cut, and that texts of unequal length do not disturb each other."""

import hashlib
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from itertools import chain, islice

import pytest
import torch
from torch.nn import functional as F

from recipe.errors import InputError
from recipe.model import build_model
from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.text import corpora
from recipe.text.docstrings import __main__ as docstrings
from recipe.text.docstrings.archive import REFERENCE_DIGEST, bundled, read_rows
from recipe.text.docstrings.extract import PARTS, VERSIONS, Docstring, as_csv, extract
from recipe.text.encoder import TextEncoder
from recipe.text.tokens import HIDDEN, PAD, VOCABULARY, HashedWords
from swarm.cli.checks import check_data
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from tests.helpers.texts.csv_files import write_csv

OWN_TEXTS = replace(preset("docstrings"), dataset="csv", num_classes=2)


@pytest.fixture
def own_texts(tmp_path):
    """A folder in the form of AG News: 40 rows of class, title and description."""
    rows = [(name, f"About {name}", f"text {i} of {name}, " * (i % 3 + 1)) for i in range(20) for name in ("b", "a")]
    write_csv(tmp_path / "train.csv", rows)
    return tmp_path


# ---- the bundled texts ---------------------------------------------------------------------------------------------


def test_no_text_is_in_two_parts():
    parts = {part: {text for other, _, text in read_rows() if other == part} for part in PARTS}
    assert {part: len(texts) for part, texts in parts.items()} == {"train": 3449, "val": 909, "test": 830}
    assert not parts["train"] & (parts["val"] | parts["test"])
    assert not parts["val"] & parts["test"]
    assert build_data(preset("docstrings")).digest == REFERENCE_DIGEST


@pytest.mark.slow
@pytest.mark.skipif(version("networkx") != VERSIONS["networkx"], reason="another version of the library")
def test_the_bundled_texts_can_be_made_again():
    """Here with one library only: all four take several seconds."""
    assert as_csv(extract(["networkx"])) == as_csv([Docstring(*row) for row in read_rows() if row[1] == "networkx"])


def test_other_versions_of_the_libraries_are_refused(monkeypatch, capsys):
    monkeypatch.setitem(VERSIONS, "matplotlib", "0.1")
    assert docstrings.main([]) == 2
    assert "pip install matplotlib==0.1" in capsys.readouterr().err


def test_a_damaged_archive_is_refused(monkeypatch, tmp_path):
    (tmp_path / "half.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(InputError, match="install swarm-vit again"):
        bundled(tmp_path / "half.gz")


# ---- tokens and batches --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_words_have_the_same_tokens_in_another_process():
    code = "from recipe.text.tokens import HashedWords; print(HashedWords()(['Draw an edge, 3_x.'], 9).tolist())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    tokens = HashedWords()(["draw AN edge, 3_x."], 9)
    assert printed.stdout.strip() == str(tokens.tolist())
    assert tokens.shape == (1, 8)
    assert tokens.min() > HIDDEN
    assert tokens.max() < VOCABULARY


def test_a_batch_is_as_long_as_its_longest_text():
    tokens = HashedWords()(["one", "one two three", "", "a b c d e f"], max_tokens=5)
    assert tokens.shape == (4, 5)
    assert (tokens != PAD).sum(1).tolist() == [1, 3, 1, 5]


def test_batches_and_passes():
    data = build_data(preset("docstrings"), batch_size=16, identity="a")
    tokens, labels = next(iter(data.train_dataloader()))
    assert tokens.shape[0] == 16
    assert tokens.shape[1] <= 64
    assert (tokens.dtype, labels.dtype) == (torch.int64, torch.int64)
    assert sum(len(labels) for _, labels in data.val_dataloader()) == 909
    other = next(iter(build_data(preset("docstrings"), batch_size=16, identity="b").train_dataloader()))[1]
    assert other.tolist() != labels.tolist()


def test_hidden_words_do_not_depend_on_the_micro_batch():
    def texts(size: int, augmentation: str) -> list[list[int]]:
        data = build_data(replace(preset("docstrings"), augmentation=augmentation), batch_size=size, identity="a")
        batches = islice(data.train_dataloader(), 32 // size)
        return [row[row != PAD].tolist() for tokens, _ in batches for row in tokens]

    assert texts(32, "light") == texts(4, "light")
    plain, hidden = (list(chain(*texts(32, augmentation))) for augmentation in ("none", "light"))
    changed = [new for old, new in zip(plain, hidden, strict=True) if old != new]
    assert set(changed) == {HIDDEN}
    assert 0.05 < len(changed) / len(plain) < 0.15


# ---- unequal lengths -----------------------------------------------------------------------------------------------


def quiet(model):
    """The model without dropout, which would differ between micro-batches."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(module, torch.nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def test_a_text_does_not_see_the_padding_beside_it():
    model = build_model(preset("docstrings")).eval()
    short, long = "Draw the edge.", "Compute the shortest path between two nodes of a weighted graph with a heap."
    with torch.no_grad():
        alone, together = (model(HashedWords()(texts, 64)) for texts in ([short], [short, long]))
    assert torch.allclose(alone[0], together[0], atol=1e-5)


def test_micro_batches_of_unequal_lengths_add_up_to_the_union():
    """Gradients weighted by samples: 3 short and 5 long texts, against all 8 at once. Tolerance 1e-6 of about 0.1."""
    model = quiet(build_model(preset("docstrings"))).train()
    texts = ["a b c", "d e", "f"] + [f"word{'x' * i} and more of it, " * (i + 2) for i in range(5)]
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])

    def gradients(parts: list[slice]) -> list[torch.Tensor]:
        model.zero_grad()
        for part in parts:
            weight = len(texts[part]) / len(texts)
            (weight * F.cross_entropy(model(HashedWords()(texts[part], 64)), labels[part])).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    union, summed = gradients([slice(0, 8)]), gradients([slice(0, 3), slice(3, 8)])
    assert max(gradient.abs().max() for gradient in union) > 0.01
    assert max((one - other).abs().max() for one, other in zip(union, summed, strict=True)) < 1e-6


def test_the_encoder_depends_on_the_seed_alone():
    recipe = preset("docstrings")
    torch.manual_seed(5)
    one = build_model(recipe).state_dict()
    other = build_model(recipe).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(build_model(replace(recipe, seed=1)).state_dict()["head.weight"], one["head.weight"])


def test_embeddings_are_spared_weight_decay():
    task = build_task(preset("docstrings"))
    without, decayed = task.configure_optimizers()["optimizer"].param_groups
    assert isinstance(task.model, TextEncoder)
    assert any(parameter is task.model.tokens.weight for parameter in without["params"])
    assert sum(one.numel() for group in (without, decayed) for one in group["params"]) == task.num_parameters


# ---- files of one's own, and AG News -------------------------------------------------------------------------------


def test_own_texts(own_texts):
    data = build_data(OWN_TEXTS, own_texts, batch_size=4)
    assert (data.num_train_samples, len(data.splits.val), data.splits.test) == (38, 2, None)
    assert data.splits.train[0][0] == "About b text 0 of b, "
    assert data.splits.train.labels.tolist()[:2] == [1, 0], "by the order of their names"
    with pytest.raises(InputError, match=rf"for csv, {own_texts / 'test.csv'};"):
        data.test_dataloader()
    write_csv(own_texts / "val.csv", [("a", "a text")])
    write_csv(own_texts / "test.csv", [("b", "a text"), ("a", "another")])
    data = build_data(OWN_TEXTS, own_texts, batch_size=4)
    assert (data.num_train_samples, len(data.splits.val), len(data.splits.test)) == (40, 1, 2)
    write_csv(own_texts / "others" / "train.csv", [(name, f"text {i}") for i in range(40) for name in ("a", "c")])
    assert build_data(OWN_TEXTS, own_texts / "others").digest != data.digest, "a label would mean something else there"


def held_out(folder, labels: str) -> tuple[dict[str, int], set[str], set[str]]:
    """Split a file with these classes row by row. Return validated rows of each class, and the texts of both parts."""
    write_csv(folder / "train.csv", [(label, f"text {place}") for place, label in enumerate(labels)])
    splits = build_data(replace(OWN_TEXTS, num_classes=len(set(labels))), folder, batch_size=4).splits
    names = sorted(set(labels))
    counts = Counter(names[label] for label in splits.val.labels.tolist())
    return dict(counts), set(splits.train.texts), set(splits.val.texts)


@pytest.mark.parametrize(
    ("labels", "counts"),
    [
        ("ab" * 200, {"a": 10, "b": 10}),
        ("abcd" * 100, {"a": 5, "b": 5, "c": 5, "d": 5}),
        ("a" * 380 + "b" * 20, {"a": 19, "b": 1}),
        ("ab" * 5, {"a": 1, "b": 1}),
        ("a" * 40 + "bb" + "c", {"a": 2, "b": 1}),
    ],
    ids=["two in turns", "four in turns", "sorted", "few", "rare"],
)
def test_texts_of_each_class_are_held_out_in_whatever_order_they_come(tmp_path, labels, counts):
    validated, trained, texts = held_out(tmp_path, labels)
    assert validated == counts
    assert len(trained) + len(texts) == len(labels), "nothing is in both parts, and nothing is lost"


def test_texts_that_excel_has_saved(own_texts):
    """The byte-order mark of the file belongs to no class. Otherwise the first row would have a class of its own."""
    write_csv(own_texts / "val.csv", [("a", "a text")])
    plain = build_data(OWN_TEXTS, own_texts, batch_size=4)
    for name in ("train.csv", "val.csv"):
        (own_texts / name).write_text((own_texts / name).read_text(encoding="utf-8"), encoding="utf-8-sig")
    marked = build_data(OWN_TEXTS, own_texts, batch_size=4)
    assert marked.digest == plain.digest
    assert marked.splits.train.labels.equal(plain.splits.train.labels)


@pytest.mark.parametrize(
    ("rows", "part_of_message"),
    [
        (None, "cannot be read"),
        ([], "no rows"),
        ([("a", "x"), ("b", "y")], "add rows, or a val.csv"),
        ([("a", "x"), ("b", " ")], "without a class or a text"),
        ([("a", "x"), ("b", "y"), ("c", "z")], "--num-classes 3"),
    ],
)
def test_own_texts_that_cannot_work(tmp_path, rows, part_of_message):
    if rows is not None:
        write_csv(tmp_path / "train.csv", rows)
    with pytest.raises(InputError, match=part_of_message) as caught:
        build_data(OWN_TEXTS, tmp_path).setup()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["train.csv", "val.csv", "test.csv"])
@pytest.mark.parametrize("later", ["", 'b,"a text in quotation marks"\n'])
def test_an_open_quotation_mark_takes_no_other_rows_for_a_text(own_texts, name, later):
    rows = [f"{'ab'[place % 2]},text number {place}\n" for place in range(1200)]
    rows[500] = 'a,"an open quotation mark\n'
    (own_texts / name).write_text("".join(rows) + later)
    with pytest.raises(InputError, match=rf"{name} is not a CSV file .* in the row that begins in line 501\)"):
        build_data(OWN_TEXTS, own_texts).setup()


def test_a_row_of_very_many_lines_is_told_of(own_texts, caplog):
    """Its quotation marks may belong to two rows, as where a quotation begins in one and ends in another."""
    rows = [f"{'ab'[place % 2]},text number {place}\n" for place in range(600)]
    rows[50], rows[500] = 'a,"it begins\n', 'b,it ends"\n'
    (own_texts / "train.csv").write_text("".join(rows))
    build_data(OWN_TEXTS, own_texts).setup()
    assert "train.csv: the row that begins in line 51 has 451 lines. Is a quotation mark missing?" in caplog.text


def test_texts_may_have_lines_and_quotation_marks(own_texts):
    write_csv(own_texts / "val.csv", [("a", "two\nlines"), ("b", 'says "so", and more')])
    (own_texts / "test.csv").write_text('a,5" screen and "more\n')
    splits = build_data(OWN_TEXTS, own_texts).splits
    assert list(splits.val.texts) == ["two\nlines", 'says "so", and more']
    assert list(splits.test.texts) == ['5" screen and "more']


def test_a_header_is_not_taken_for_a_class(own_texts):
    file = own_texts / "train.csv"
    file.write_text("label,title,text\n" + file.read_text())
    with pytest.raises(InputError, match="first row is the only one of its class, 'label': delete that row"):
        build_data(OWN_TEXTS, own_texts).setup()


def test_a_class_that_training_lacks(own_texts):
    write_csv(own_texts / "val.csv", [("c", "a text")])
    with pytest.raises(InputError, match=r"val\.csv has the class 'c'"):
        build_data(OWN_TEXTS, own_texts).setup()


def test_ag_news_that_cannot_be_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "AG_NEWS_URL", "http://127.0.0.1:9/")
    data = build_data(replace(preset("ag-news-distilbert"), model="transformer-encoder", pretrained=False), tmp_path)
    assert data.missing_download == "AG News (31 MB)"
    with pytest.raises(InputError, match=r"put train\.csv and test\.csv"):
        data.prepare_data()
    write_csv(tmp_path / "ag_news_csv" / "train.csv", [("1", "not", "the published file")])
    with pytest.raises(InputError, match="wrong checksum"):
        data.setup()


def test_a_complete_ag_news_is_taken_from_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """Here the lock file cannot be opened."""
    for name in corpora.AG_NEWS_MD5:
        write_csv(tmp_path / "ag_news_csv" / name, [("1", "a text")])
        content = (tmp_path / "ag_news_csv" / name).read_bytes()
        monkeypatch.setitem(corpora.AG_NEWS_MD5, name, hashlib.md5(content).hexdigest())
    (tmp_path / ".download.lock").mkdir()
    recipe = replace(preset("ag-news-distilbert"), model="transformer-encoder", pretrained=False)
    build_data(recipe, tmp_path).prepare_data()


def test_the_doctor_sees_texts(own_texts):
    manifest = RunManifest(PROTOCOL, "run", OWN_TEXTS)
    found = check_data(manifest.with_classes(build_data(OWN_TEXTS, own_texts).digest, own_texts), own_texts)
    assert (found.state, found.found) == ("ok", "csv: 38 training samples")
    assert check_data(replace(manifest, classes="others"), own_texts).state == "failed"
    assert check_data(replace(manifest, recipe=preset("ag-news-distilbert")), own_texts).state == "warning"


# ---- recipes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "part_of_message"),
    [
        ({"model": "resnet18"}, "--model transformer-encoder"),
        ({"max_tokens": None}, "--max-tokens"),
        ({"max_tokens": 513}, "from 8 to 512"),
        ({"image_size": 8}, "--image-size"),
        ({"augmentation": "randaugment"}, "--augmentation none"),
        ({"num_classes": 5}, "--num-classes 4"),
        ({"pretrained": True}, "--pretrained False"),
        ({"lora_rank": 4}, "--lora-rank"),
        ({"num_heads": 3}, "--num-heads"),
        ({"dataset": "digits", "num_classes": 10}, "is no timm model"),
        ({"model": "distilbert-base-uncased", "pretrained": True}, "--embed-dim"),
    ],
)
def test_contradictions_are_refused_in_one_sentence(changes, part_of_message):
    with pytest.raises(InputError, match=part_of_message) as caught:
        replace(preset("docstrings"), **changes)
    assert "\n" not in str(caught.value)


def test_images_have_no_length_and_no_adapters():
    with pytest.raises(InputError, match="--max-tokens"):
        replace(preset("digits"), max_tokens=64)
    with pytest.raises(InputError, match="--image-size"):
        replace(preset("digits"), image_size=None)
