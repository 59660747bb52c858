"""`TextData`: the recipe's texts for Lightning, in this peer's own order."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from recipe.config import Recipe
from recipe.data.peer_data import PeerData
from recipe.data.sampler import sample_randomness
from recipe.data.splits import Splits
from recipe.errors import InputError
from recipe.text.corpora import Texts, open_splits, prepare
from recipe.text.tokens import HashedWords, Tokenizer, WordPieces

HIDDEN_SHARE = 0.1
"""Share of the words of a training text that augmentation "light" hides."""
DISTILBERT_TOKENS = 30_522
"""Size of the published vocabulary, and of the model's embedding."""
MOST_TOKENS = 512
"""Largest `max_tokens` that a recipe allows. It spaces the random numbers of samples, so that no two share one."""


class TextView(Dataset):
    """A part of the data, split into tokens one micro-batch at a time.

    Args:
        source: texts and their classes.
        tokenizer: splits them into tokens.
        recipe: gives `max_tokens` and the augmentation.
        key: seed of the random changes; None for no changes.
    """

    gives_batches = True

    def __init__(self, source: Texts, tokenizer: Tokenizer, recipe: Recipe, key: int | None) -> None:
        self.source, self.tokenizer, self.key = source, tokenizer, key
        self.max_tokens = recipe.max_tokens
        self.hides = recipe.augmentation == "light"

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, entries: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (batch, length of the longest) and labels (batch,)."""
        if self.key is None:
            return self._tokens(entries)
        positions, indices = np.asarray(entries, dtype=np.int64).T
        tokens, labels = self._tokens(indices.tolist())
        return (self._hidden(tokens, positions) if self.hides else tokens), labels

    def _tokens(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        texts = [self.source.texts[index] for index in indices]
        return self.tokenizer(texts, self.max_tokens), self.source.labels[indices]

    def _hidden(self, tokens: torch.Tensor, positions: np.ndarray) -> torch.Tensor:
        """Tokens with some words hidden. The choice depends on the position in the peer's order alone, as for
        images."""
        words = sample_randomness(self.key, positions[:, None] * MOST_TOKENS + np.arange(tokens.shape[1]))
        is_chosen = torch.from_numpy(words < np.uint64(HIDDEN_SHARE * 2**64))
        is_special = torch.isin(tokens, torch.tensor(sorted(self.tokenizer.special)))
        return torch.where(is_chosen & ~is_special, self.tokenizer.hidden, tokens)


class TextData(PeerData):
    """Training, validation and test texts of a recipe.

    Inputs are tokens, int64 (batch, length): as long as the longest text of the batch, the others padded. The folder
    has `ag_news_csv/` (downloaded there if missing), or `train.csv` and perhaps `val.csv` and `test.csv`. For
    DistilBERT it may have a `vocab.txt`, which replaces the published one.
    """

    def __init__(self, recipe: Recipe, *arguments: Any, **options: Any) -> None:
        super().__init__(recipe, *arguments, **options)
        self.tokenizer: Tokenizer = HashedWords()

    def prepare_data(self) -> None:
        """Downloads AG News if it is missing."""
        prepare(self.recipe, self.data_dir)

    @property
    def missing_download(self) -> str:
        """AG News, if the recipe needs it and it is missing; else empty."""
        if self.recipe.dataset != "ag-news":
            return ""
        folder = self.data_dir / "ag_news_csv"
        return "" if all((folder / name).is_file() for name in ("train.csv", "test.csv")) else "AG News (31 MB)"

    def open(self) -> Splits:
        """Opens the texts as `Texts`. The digest also covers DistilBERT's vocabulary."""
        splits = open_splits(self.recipe, self.data_dir)
        if self.recipe.model == "transformer-encoder":
            return splits
        vocabulary = self.data_dir / "vocab.txt"
        self.tokenizer = tokenizer = WordPieces(vocabulary if vocabulary.exists() else None)
        if tokenizer.size > DISTILBERT_TOKENS:
            raise InputError(
                f"{vocabulary} has {tokenizer.size:,} tokens, and distilbert-base-uncased {DISTILBERT_TOKENS:,}: put "
                "its own vocab.txt there."
            )
        return replace(splits, digest=splits.digest + tokenizer.digest)

    def view(self, part: Texts, key: int | None) -> TextView:
        """The part as tokens, some of which are hidden as the recipe says."""
        return TextView(part, self.tokenizer, self.recipe, key)
