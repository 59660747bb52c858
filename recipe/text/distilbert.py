"""DistilBERT with a classifier, trained as a whole or through LoRA adapters: from `transformers` and `peft`."""

import torch
from torch import nn

from recipe.config import Recipe
from recipe.errors import InputError, first_line
from recipe.seeding import seeded_on_cpu
from recipe.text.tokens import DISTILBERT_HUB, PAD, import_transformers

LORA_MODULES = ("q_lin", "v_lin")
"""Attention layers that get adapters, as in Hu et al. 2021, "LoRA"."""
CLASSIFIER = ("pre_classifier", "classifier")


class DistilBert(nn.Module):
    """Classifies texts given as tokens; padding is masked.

    Args:
        network: transformers' `DistilBertForSequenceClassification`, with or without adapters.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, num_classes) of tokens (batch, length)."""
        return self.network(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits


def build_distilbert(recipe: Recipe) -> nn.Module:
    """The recipe's DistilBERT; weights that are not pretrained depend on `recipe.seed` alone.

    Raises:
        InputError: a library is missing, or the weights cannot be loaded.
    """
    transformers = import_transformers()
    with seeded_on_cpu(recipe.seed):
        if recipe.pretrained:
            network = _pretrained(transformers, recipe)
        else:
            network = transformers.DistilBertForSequenceClassification(_config(transformers, recipe))
        if recipe.lora_rank is not None:
            network = _with_adapters(network, recipe.lora_rank)
    return DistilBert(network)


def _pretrained(transformers, recipe: Recipe) -> nn.Module:
    try:
        return transformers.DistilBertForSequenceClassification.from_pretrained(
            DISTILBERT_HUB, num_labels=recipe.num_classes, use_safetensors=True
        )
    except Exception as error:  # the hub's client and transformers each have their own errors
        raise InputError(
            f"The pretrained weights of {recipe.model} cannot be loaded ({first_line(error)}): connect this machine to "
            "the network, or add --pretrained False."
        ) from error


def _config(transformers, recipe: Recipe):
    shape = {"dim": recipe.embed_dim, "n_layers": recipe.depth, "n_heads": recipe.num_heads}
    given = {name: value for name, value in shape.items() if value is not None}
    if recipe.embed_dim is not None:
        given["hidden_dim"] = 4 * recipe.embed_dim
    return transformers.DistilBertConfig(num_labels=recipe.num_classes, **given)


def _with_adapters(network: nn.Module, rank: int) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise InputError(f"LoRA needs peft ({error}): pip install -e '.[text]', or leave out --lora-rank.") from error
    # `lora_alpha` is twice the rank, so that adapters of every rank change the weights alike.
    options = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(LORA_MODULES), modules_to_save=list(CLASSIFIER)
    )
    return peft.get_peft_model(network, options)
