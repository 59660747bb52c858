"""Computes how many bytes an average takes, and checks whether as many crossed the network."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from analysis.campaigns.cells import Cell
from analysis.campaigns.systems import SYSTEMS
from recipe.config import Recipe

WHOLE = 0.95
"""Share of an all-reduce's bytes from which an average counts as whole."""


@cache
def _num_parameters(recipe: Recipe) -> int:
    from recipe.model import build_model  # imports torch

    return sum(one.numel() for one in build_model(recipe).parameters() if one.requires_grad)


def num_parameters(cell: Cell) -> int:
    """Number of trained parameters of the cell's model."""
    # These fields of the recipe do not change the model, so one model is built for a whole sweep.
    alike = {"learning_rate": 1e-3, "target_batch_size": 1024, "total_steps": 200, "validate_every_steps": 50}
    return _num_parameters(replace(cell.full_recipe(), **alike, warmup_steps=0))


def payload_bytes(cell: Cell) -> float | None:
    """Bytes of one gradient vector as the cell's system sends it; None if bytes per number are not fixed."""
    each = SYSTEMS[cell.system].payload_bytes
    return None if each is None else each * num_parameters(cell)


def too_few_bytes(cell: Cell, result: dict[str, Any]) -> list[str]:
    """A problem if fewer bytes crossed the network than whole averages take, whatever the system reports about itself.

    An average may be under way at both ends of the measured time. A system that averages beside computing may lack a
    whole one.
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
    """Bytes that all hosts sent, and number of updates meanwhile; zeros if that is not known."""
    if "bytes_sent" in result:
        return (0.0, 0) if result["bytes_sent"] is None else (result["bytes_sent"], result["updates"])
    # A result of an earlier version, which did not know when an update of several processes of DDP had ended.
    of_rounds = [item["bytes_sent"] for item in result.get("all_rounds") or () if item["bytes_sent"] is not None]
    return (sum(of_rounds), len(of_rounds)) if joins else (0.0, 0)
