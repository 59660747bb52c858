"""What a peer notes of each micro-batch that it computes, and how it recomputes one of another member."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from hivemind.utils import get_logger

from recipe.errors import InputError
from recipe.training.replay import Replay
from recipe.training.task import Batch
from swarm.protocol.messages import Ticket
from swarm.protocol.work import (
    MAX_LINES,
    Assignment,
    Line,
    OwnWork,
    WorkList,
    WorkVerdict,
    name_of,
    places,
    shortened,
)
from swarm.training.audit.earlier_weights import EarlierWeights
from swarm.training.audit.lot import chance_of_an_audit
from swarm.training.gradient_buffer import GradientVector, Place
from swarm.training.throughput import Noted, Work

WORK_TOLERANCE = 0.02
"""Largest relative distance between claimed and recomputed numbers at which a claim holds, in float32."""
MIXED_WORK_TOLERANCE = 0.2
"""Largest relative distance at which a claim holds, in bf16-mixed."""

logger = get_logger(__name__)

Loss = Callable[[Batch], torch.Tensor]
"""The training step of this peer's model: the mean loss of a micro-batch."""


class Weights(Protocol):
    """The weights on which a peer computes."""

    lineage: bytes


class WorkLog(ABC):
    """A process's notes on its micro-batches, from which other members can recompute them."""

    @abstractmethod
    def begin_backward(self) -> None:
        """Prepare for the backward pass of a micro-batch, which comes next and adds to the sum."""

    @abstractmethod
    def note(self, samples: int) -> list[Noted]:
        """Return notes on the micro-batch whose gradients, means over `samples`, have just been added."""

    def own(self, work: Work, num_processes: int) -> OwnWork | None:
        """Return what the averaging process needs before a round, of a peer of so many processes; None for nothing."""
        return None

    def check(self, assignment: Assignment | None) -> None:  # noqa: B027 (most logs check no work)
        """Recompute another member's work that was drawn, on weights that have not been updated yet."""

    def updating(self) -> AbstractContextManager[None]:
        """A context in which the weights are updated."""
        return nullcontext()


class NoWorkLog(WorkLog):
    """The log of a peer that takes no part in checks of work: it notes nothing."""

    def begin_backward(self) -> None:
        pass

    def note(self, samples: int) -> list[Noted]:
        return []


NO_WORK_LOG = NoWorkLog()


class NotingLog(WorkLog):
    """Notes the micro-batches of a process that trains a recipe.

    Args:
        replay: knows which samples a micro-batch has
        vector: the sum to which backward passes add
        version: the weights; their lineage decides at which places gradients are compared
    """

    def __init__(self, replay: Replay, vector: GradientVector, version: Weights):
        self._replay, self._vector, self._version = replay, vector, version
        self._lineage: bytes | None = None
        self._places: list[Place] = []

    def begin_backward(self) -> None:
        if self._lineage != self._version.lineage:  # other weights have other places
            self._lineage = self._version.lineage
            self._places = places(self._vector.sizes, self._lineage)
        self._vector.watch(self._places)

    def note(self, samples: int) -> list[Noted]:
        return [Noted(self._replay.first_position, samples, self._vector.watched(), self._lineage)]


class CheckedLog(NotingLog):
    """Notes the micro-batches of a peer that trains a recipe, and recomputes micro-batches of other members.

    A helper's log notes nothing of its own.

    Args:
        replay: makes any peer's micro-batches
        loss: computes the loss of a micro-batch
        vector, version: as in `NotingLog`
        kind: the kind of device on which this peer computes, as in `WorkList`
        earlier: keeps the weights before the latest update, where members also compute on those; else None
    """

    def __init__(
        self,
        replay: Replay,
        loss: Loss,
        vector: GradientVector,
        version: Weights,
        kind: str = "",
        earlier: EarlierWeights | None = None,
    ):
        super().__init__(replay, vector, version)
        self._loss, self._kind, self._earlier = loss, kind, earlier
        self._tolerance = MIXED_WORK_TOLERANCE if replay.is_mixed else WORK_TOLERANCE
        self._verdict: WorkVerdict | None = None

    def updating(self) -> AbstractContextManager[None]:
        return nullcontext() if self._earlier is None else self._earlier.kept_from(self._version)

    def own(self, work: Work, num_processes: int) -> OwnWork | None:
        verdict, self._verdict = self._verdict, None
        if not work.noted or not {one.lineage for one in work.noted} <= self._known_lineages:
            return OwnWork(verdict=verdict)
        numbers = torch.stack([one.numbers for one in work.noted]).tolist()
        lines = [
            Line(one.first_position, one.samples, tuple(row)) for one, row in zip(work.noted, numbers, strict=True)
        ]
        num_before = sum(one.lineage != self._version.lineage for one in work.noted)
        listed = listed_in(lines, num_before, self._kind)
        if not listed.is_dense:  # most of the work was dropped, and other members would reject this list
            return OwnWork(verdict=verdict)
        return OwnWork(
            listed.to_bytes(),
            chance_of_an_audit(len(lines) // num_processes),
            max(one.samples for one in lines),
            self._replay.has_slices,
            self._kind,
            verdict,
            self._earlier is not None,
        )

    @property
    def _known_lineages(self) -> set[bytes]:
        """Lineages of the weights on which other members can recompute this peer's work."""
        own, earlier = self._version.lineage, self._earlier
        return {own} if earlier is None or earlier.is_not_of(own) else {own, earlier.lineage}

    def check(self, assignment: Assignment | None) -> None:
        if assignment is not None:
            self._verdict = WorkVerdict(assignment.peer, self._holds(assignment))

    def _holds(self, assignment: Assignment) -> bool | None:
        """Whether a member's claim holds; None if this peer cannot tell."""
        peer, lineage, weights = assignment.peer.to_base58(), self._version.lineage, nullcontext()
        if assignment.is_before:
            if self._earlier is None or self._earlier.is_not_of(lineage):
                return None  # this peer has not made that update
            lineage, weights = self._earlier.lineage, self._earlier.in_place()
        try:
            with weights:
                found = self._numbers(peer, assignment.line, places(self._vector.sizes, lineage))
            return distance(found, torch.tensor(assignment.line.numbers)) <= self._tolerance
        except (InputError, OSError, RuntimeError, MemoryError) as error:  # also where memory is short
            logger.debug(f"a micro-batch of {peer} cannot be computed again: {error!r}")
            return None
        except ValueError as error:  # the claim names samples that no honest peer can have used
            logger.debug(f"a micro-batch of {peer} cannot have been computed: {error!r}")
            return False

    def _numbers(self, identity: str, line: Line, chosen: list[Place]) -> torch.Tensor:
        """The sum over samples of a line's gradients at these places, fp32, on the CPU."""
        samples, numbers = line.samples // line.micro_batches, torch.zeros(len(chosen))
        most = self._replay.micro_batch if self._replay.has_slices else samples
        for number in range(line.micro_batches):
            for one in self._replay.slices_of(identity, line.first_position + number * samples, samples, most):
                with one as batch, torch.enable_grad():
                    mean = self._vector.gradient_of(partial(self._loss, batch), chosen)
                    numbers += mean * len(batch[1])
        return numbers


def listed_in(lines: list[Line], num_before: int, kind: str) -> WorkList:
    """The list of these micro-batches, the first `num_before` of which were computed before the latest update."""
    before, after = lines[:num_before], lines[num_before:]
    if len(lines) > MAX_LINES:
        before, after = shortened(before, MAX_LINES // 2), shortened(after, MAX_LINES // 2)
    return WorkList(kind, [*before, *after], num_before=len(before))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The distance of two gradients at the same places, relative to the longer one; 0 if both are zero."""
    longer = max(float(one.norm()), float(other.norm()))
    return float((one - other).norm()) / longer if longer else 0.0


def with_work_name(ticket: Ticket, own: OwnWork | None) -> Ticket:
    """The same ticket, with the name of this peer's list of work, if there is one."""
    return replace(ticket, work=name_of(own.listed)) if own is not None and own.listed else ticket
