"""A small transformer encoder that classifies texts."""

import torch
from torch import nn

from recipe.config import Recipe
from recipe.seeding import seeded_on_cpu
from recipe.text.tokens import PAD, VOCABULARY

WIDTH, DEPTH, HEADS = 128, 4, 4
"""Shape of the encoder where a recipe gives none."""
DROPOUT = 0.1


class TextEncoder(nn.Module):
    """Embeddings of tokens and positions, pre-norm transformer blocks, and the mean over a text's tokens.

    Padding (`PAD`) takes part in no attention and in no mean: the logits of a text do not depend on the texts beside
    it.

    Args:
        num_classes: number of logits.
        max_tokens: length of the longest text.
        width: features per token.
        depth: number of blocks.
        num_heads: attention heads of each block.
        dropout: dropout probability in the blocks.
    """

    def __init__(
        self, num_classes: int, max_tokens: int, width: int, depth: int, num_heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.positions = nn.Parameter(torch.empty(max_tokens, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, num_heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay, as timm's models name them.

        Embeddings of words that a batch lacks have no gradient, and decay alone would shrink them.
        """
        return {"positions", "tokens.weight"}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, num_classes) of tokens (batch, length)."""
        is_padding = tokens == PAD
        hidden = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=is_padding)
        is_word = (~is_padding).unsqueeze(-1)
        mean = (self.norm(hidden) * is_word).sum(1) / is_word.sum(1)
        return self.head(mean)


def build_encoder(recipe: Recipe) -> TextEncoder:
    """The recipe's encoder; its weights depend on `recipe.seed` alone."""
    with seeded_on_cpu(recipe.seed):
        return TextEncoder(
            recipe.num_classes,
            recipe.max_tokens,
            recipe.embed_dim or WIDTH,
            recipe.depth or DEPTH,
            recipe.num_heads or HEADS,
            DROPOUT,
        )
