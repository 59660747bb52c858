"""DistilBERT's code path, with a tiny model of random weights and a vocabulary of a few words. It needs no network.

What the published weights reach on AG News is not tested here.
"""

import sys
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from recipe.errors import InputError
from recipe.model import build_model
from recipe.presets import preset
from recipe.registry import build_data
from tests.helpers.texts.csv_files import write_csv

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "stocks", "rise", "fall", "team", "wins", "##ning", "again", ".")
TINY = replace(
    preset("ag-news-distilbert"),
    dataset="csv",
    pretrained=False,
    num_classes=2,
    embed_dim=32,
    depth=1,
    num_heads=2,
    max_tokens=16,
)


@pytest.fixture
def news(tmp_path):
    """Files as those of AG News (class, title, description), and the vocabulary."""
    pytest.importorskip("transformers", reason="the extra `text` is not installed")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    rows = [("3", "Stocks", "stocks rise again."), ("2", "Team", "team wins.")] * 20
    write_csv(tmp_path / "train.csv", rows)
    return tmp_path


def test_without_transformers_a_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    write_csv(tmp_path / "train.csv", [("a", "x"), ("b", "y")] * 20)
    for use in (lambda: build_model(TINY), build_data(TINY, tmp_path).setup):
        with pytest.raises(InputError, match=r"pip install -e '\.\[text\]'") as caught:
            use()
        assert "\n" not in str(caught.value)


def test_without_network_a_sentence_says_what_is_missing(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.setattr("recipe.text.tokens.DISTILBERT_HUB", str(tmp_path / "nowhere"))
    monkeypatch.setattr("recipe.text.distilbert.DISTILBERT_HUB", str(tmp_path / "nowhere"))
    write_csv(tmp_path / "train.csv", [("a", "x"), ("b", "y")] * 20)
    with pytest.raises(InputError, match=r"vocab\.txt into --data-dir"):
        build_data(TINY, tmp_path).setup()
    with pytest.raises(InputError, match="--pretrained False") as caught:
        build_model(replace(TINY, pretrained=True, embed_dim=None, depth=None, num_heads=None))
    assert "\n" not in str(caught.value)


def test_word_pieces(news):
    data = build_data(replace(TINY, augmentation="light"), news, batch_size=38)
    tokens, labels = next(iter(data.train_dataloader()))
    assert set(labels.tolist()) == {0, 1}
    assert (tokens[:, 0] == WORDS.index("[CLS]")).all()
    assert (tokens == WORDS.index("[SEP]")).any(1).all()
    assert (tokens == WORDS.index("[MASK]")).any(), "augmentation hides some words"
    data = build_data(TINY, news)
    digest = data.digest
    assert data.tokenizer(["Stocks rise again."], 16).tolist() == [[2, 5, 6, 11, 12, 3]]
    (news / "vocab.txt").write_text("\n".join((*WORDS, "more")) + "\n")
    assert build_data(TINY, news).digest != digest, "peers with another vocabulary cannot train together"


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_it_learns(news, lora_rank):
    if lora_rank:
        pytest.importorskip("peft")
    recipe = replace(TINY, lora_rank=lora_rank)
    model = build_model(recipe).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = {name: one.clone() for name, one in model.named_parameters() if not one.requires_grad}
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    batches = iter(build_data(recipe, news, batch_size=8).train_dataloader())
    losses = []
    for _ in range(60):
        tokens, labels = next(batches)
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < losses[0]
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], before) for name, before in frozen.items())


def test_a_new_model_leaves_the_generators_of_the_gpus_alone(monkeypatch):
    """With one seed, all GPUs that train together would draw the same dropout."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPUs were seeded"))
    build_model(TINY)


def test_adapters_are_all_that_is_trained():
    pytest.importorskip("peft")
    model = build_model(replace(TINY, lora_rank=4))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name or "classifier" in name for name in names)
    num_trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    adapters, classifier = 2 * (32 * 4 + 4 * 32), (32 * 32 + 32) + (32 * 2 + 2)
    assert num_trained == adapters + classifier
    again = dict(build_model(replace(TINY, lora_rank=4)).named_parameters())
    assert all(torch.equal(one, again[name]) for name, one in model.named_parameters()), "equal on every machine"
