"""How many bytes an average is, and whether as many crossed the network."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from analysis.campaigns.cells import Cell
from analysis.campaigns.systems import SYSTEMS
from recipe.config import Recipe

WHOLE = 0.95
"""Share of the bytes that an all-reduce needs, from which on an average counts as whole."""


@cache
def _num_parameters(recipe: Recipe) -> int:
    from recipe.model import build_model  # imports torch

    return sum(one.numel() for one in build_model(recipe).parameters() if one.requires_grad)


def num_parameters(cell: Cell) -> int:
    """Of the cell's model."""
    # Of the recipe's fields, these do not change the model: one build for a whole sweep.
    alike = {"learning_rate": 1e-3, "target_batch_size": 1024, "total_steps": 200, "validate_every_steps": 50}
    return _num_parameters(replace(cell.full_recipe(), **alike, warmup_steps=0))


def payload_bytes(cell: Cell) -> float | None:
    """One gradient vector as the cell's system sends it; None where that is no fixed number of bytes per number."""
    each = SYSTEMS[cell.system].payload_bytes
    return None if each is None else each * num_parameters(cell)


def too_few_bytes(cell: Cell, result: dict[str, Any]) -> list[str]:
    """A problem, if less crossed the network than whole averages take, whatever the system reports about itself.

    At both ends of what was measured, an average may be on its way; of who averages beside computing a whole one.
    """
    system, payload = SYSTEMS[cell.system], payload_bytes(cell)
    sent, updates = _sent(result, system.joins)
    if cell.peers < 2 or cell.kill_at_step is not None or updates < 2 or payload is None:
        return []
    expected = 2 * (cell.least_peers - 1) * payload * (updates - (1.0 if system.overlaps else 0.5))
    if sent >= WHOLE * expected:
        return []
    return [f"averages were partial: {sent / 1e6:.1f} of {expected / 1e6:.1f} MB crossed the network"]


def _sent(result: dict[str, Any], joins: bool) -> tuple[float, int]:
    """Bytes that all hosts sent, and updates meanwhile; none where that is not known."""
    if "bytes_sent" in result:
        return (0.0, 0) if result["bytes_sent"] is None else (result["bytes_sent"], result["updates"])
    # Of an earlier version, which did not know when an update of several processes of DDP had ended.
    of_rounds = [item["bytes_sent"] for item in result.get("all_rounds") or () if item["bytes_sent"] is not None]
    return (sum(of_rounds), len(of_rounds)) if joins else (0.0, 0)
