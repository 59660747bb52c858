"""What an average carries: each trained number once, and nothing else."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from recipe.model import build_model
from recipe.optimizer import build_optimizer
from recipe.presets import preset
from swarm.training.gradient_buffer import GradientVector, averaged_tensors


def vector_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> GradientVector:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return GradientVector(*averaged_tensors(model, optimizer))


def num_trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class Tied(nn.Module):
    """A small language model whose embedding is also the output layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.embedding(tokens).mean(1))


def test_tied_weights_travel_once_and_their_gradients_add_up():
    torch.manual_seed(0)
    model = Tied()
    tokens, labels = torch.tensor([[1, 2], [3, 3], [4, 5]]), torch.tensor([1, 3, 4])
    nn.functional.cross_entropy(model(tokens), labels).backward()
    expected = model.embedding.weight.grad.clone()
    model.zero_grad(set_to_none=True)
    vector = vector_of(model)
    assert vector.wire.numel() == num_trained(model) == 40
    for part in (slice(0, 1), slice(1, 3)):
        samples = len(labels[part])
        vector.receive(samples)
        (nn.functional.cross_entropy(model(tokens[part]), labels[part])).backward()
        vector.collect()
    vector.average_alone(samples=3)
    vector.hand_over()
    assert torch.allclose(model.embedding.weight.grad, expected, atol=1e-7)


def test_dropped_work_takes_no_average_of_running_statistics_with_it():
    """With `overlap` an average comes while the next step is computed, which may have to be forgotten."""
    model = nn.BatchNorm1d(1)
    vector = vector_of(model)
    vector.to_wire(4)
    average = torch.full_like(vector.wire, 7.0)
    vector.take(average)
    model.running_mean.fill_(1.0)  # as a micro-batch that is not finite would
    vector.drop()
    assert model.running_mean.item() == 7.0


def test_frozen_layers_do_not_travel():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    assert vector_of(model).wire.numel() == num_trained(model) == 18


def test_embeddings_of_words_that_have_not_been_seen_get_a_gradient_of_zero():
    recipe = preset("docstrings")
    model = build_model(recipe)
    vector = vector_of(model, build_optimizer(model, recipe))
    assert vector.wire.numel() == num_trained(model)
    vector.receive(2)
    model(torch.tensor([[5, 6, 7], [6, 0, 0]])).sum().backward()
    vector.collect()
    vector.average_alone(samples=2)
    vector.hand_over()
    touched = model.tokens.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert touched == [5, 6, 7]


def test_of_a_model_with_adapters_only_these_and_the_classifier_travel():
    pytest.importorskip("peft", reason="the extra `text` is not installed")
    recipe = replace(preset("ag-news-distilbert"), pretrained=False, embed_dim=32, depth=2, num_heads=2, lora_rank=4)
    model = build_model(recipe)
    vector = vector_of(model, build_optimizer(model, recipe))
    assert vector.wire.numel() == num_trained(model) < 0.05 * sum(one.numel() for one in model.parameters())
