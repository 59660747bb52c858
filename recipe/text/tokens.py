"""Splits texts into tokens: by hashing words, which needs no file, or with DistilBERT's own vocabulary."""

import hashlib
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from recipe.errors import InputError, first_line

PAD = 0
"""Token that fills up shorter texts, in all tokenizers; models ignore it."""

VOCABULARY = 8192
"""Number of tokens of `HashedWords`, `PAD` and `HIDDEN` included."""
HIDDEN = 1

_WORD = re.compile(r"[^\W\d_]+|\d|[^\w\s]|_")
DISTILBERT_HUB = "distilbert/distilbert-base-uncased"


class Tokenizer(Protocol):
    """Splits texts into tokens."""

    hidden: int
    """Token that stands for a word that augmentation hides."""
    special: frozenset[int]
    """Tokens that augmentation leaves alone."""

    def __call__(self, texts: Sequence[str], max_tokens: int) -> torch.Tensor:
        """Tokens, int64 (num_texts, length): cut off at `max_tokens`, padded with `PAD` to the longest of these
        texts."""


class HashedWords:
    """Words, digits and signs, each as its CRC-32 modulo the vocabulary (Weinberger et al. 2009, "Feature hashing").

    So peers with different texts agree on every token without a common vocabulary. A few words share a token.
    """

    hidden = HIDDEN
    special = frozenset({PAD})

    def __call__(self, texts: Sequence[str], max_tokens: int) -> torch.Tensor:
        """See `Tokenizer`; a text without any word is one hidden token."""
        rows = [torch.tensor(_hashes(text, max_tokens) or [HIDDEN]) for text in texts]
        return pad_sequence(rows, batch_first=True, padding_value=PAD)


def _hashes(text: str, most: int) -> list[int]:
    words = _WORD.findall(text.lower())[:most]
    return [2 + zlib.crc32(word.encode()) % (VOCABULARY - 2) for word in words]


class WordPieces:
    """DistilBERT's own tokens, with `transformers`.

    Args:
        vocabulary: file with one token per line; None for the published one, which is downloaded once.

    Raises:
        InputError: the vocabulary cannot be loaded.
    """

    def __init__(self, vocabulary: Path | None) -> None:
        transformers = import_transformers()
        try:
            if vocabulary is None:
                self._tokenizer = transformers.AutoTokenizer.from_pretrained(DISTILBERT_HUB)
            else:
                self._tokenizer = transformers.DistilBertTokenizerFast(str(vocabulary), do_lower_case=True)
        except Exception as error:  # the hub's client, tokenizers and transformers each have their own errors
            raise InputError(
                f"The tokenizer of distilbert-base-uncased cannot be loaded ({first_line(error)}): connect this "
                "machine to the network, or put its vocab.txt into --data-dir."
            ) from error
        self.hidden = self._tokenizer.mask_token_id
        self.special = frozenset(self._tokenizer.all_special_ids)

    @property
    def digest(self) -> str:
        """Digest of all tokens and their numbers, 16 hex digits."""
        tokens = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]

    @property
    def size(self) -> int:
        """Number of different tokens."""
        return len(self._tokenizer)

    def __call__(self, texts: Sequence[str], max_tokens: int) -> torch.Tensor:
        """See `Tokenizer`; a text begins with [CLS] and ends with [SEP]."""
        found = self._tokenizer(list(texts), truncation=True, max_length=max_tokens, padding=True, return_tensors="pt")
        return found["input_ids"]


def import_transformers():
    """Imports `transformers` and silences it.

    Raises:
        InputError: the library is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"distilbert-base-uncased needs transformers ({error}): pip install -e '.[text]', or choose --recipe "
            "docstrings."
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
