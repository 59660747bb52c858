"""What a peer notes of each micro-batch that it computes, and how it computes one of another member again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from recipe.data.sampler import stable_seed
from recipe.errors import InputError
from recipe.training.replay import Replay
from recipe.training.task import Batch
from swarm.protocol.messages import MAX_GROUP_SIZE, Group, Ticket
from swarm.protocol.work import (
    MAX_MICRO_BATCHES,
    NUM_PLACES,
    Assignment,
    MicroBatch,
    OwnWork,
    Verdict,
    WorkList,
    name_of,
)
from swarm.state_sync.state_version import StateVersion
from swarm.training.audit.lot import chance_of_an_audit
from swarm.training.gradient_buffer import GradientVector
from swarm.training.throughput import Noted, Work

TOLERANCE, MIXED_TOLERANCE = 0.02, 0.2
"""Relative distance between what was said and what comes out again, up to which it holds: float32 and bf16-mixed."""

logger = get_logger(__name__)

Loss = Callable[[Batch], torch.Tensor]
"""The training step of this peer's model: the mean loss of a micro-batch."""


class WorkLog:
    """Of a peer whose work nobody can compute again, and that looks at nobody's."""

    def begin_backward(self) -> None:
        """The backward pass of a micro-batch comes next, and adds to the sum."""

    def note(self, samples: int) -> list[Noted]:
        """What there is to say of the micro-batch whose gradients have been added, means over `samples`."""
        return []

    def own(self, work: Work) -> OwnWork | None:
        """What the averaging process has to know before a round; None if there is nothing."""
        return None

    def check(self, assignment: Assignment | None) -> None:
        """Compute again what the lot has drawn, on weights that have not been updated yet."""

    def silent(self, group: Group) -> list[PeerID]:
        """Who gives samples and does not say what it has computed; each is named once."""
        return []


NO_LOG = WorkLog()


class CheckedLog(WorkLog):
    """Of a peer that trains a recipe, in a swarm whose members check each other.

    Args:
        replay: makes anybody's micro-batches
        loss: of one
        vector: to which backward passes add
        version: of the weights; their lineage says at which places gradients are compared
    """

    def __init__(self, replay: Replay, loss: Loss, vector: GradientVector, version: StateVersion):
        self._replay, self._loss, self._vector, self._version = replay, loss, vector, version
        self._tolerance = MIXED_TOLERANCE if replay.is_mixed else TOLERANCE
        self._lineage, self._places = b"", []
        self._index = torch.empty(0, dtype=torch.long)
        self._before = torch.empty(0)
        self._verdict: Verdict | None = None
        self._named: set[PeerID] = set()

    def _choose_places(self) -> None:
        """Others on other weights."""
        if self._lineage != self._version.lineage:
            self._lineage = self._version.lineage
            self._places = places(self._vector.params, self._lineage)
            self._index = self._vector.index_of(self._places)

    def begin_backward(self) -> None:
        self._choose_places()
        self._before = self._vector.sum_at(self._index)

    def note(self, samples: int) -> list[Noted]:
        return [Noted(self._replay.first_position, samples, self._vector.sum_at(self._index) - self._before)]

    def own(self, work: Work) -> OwnWork | None:
        verdict, self._verdict = self._verdict, None
        if not 0 < len(work.noted) <= MAX_MICRO_BATCHES:
            return OwnWork(verdict=verdict)
        numbers = torch.stack([one.numbers for one in work.noted]).tolist()
        lines = [
            MicroBatch(one.first_position, one.samples, tuple(row))
            for one, row in zip(work.noted, numbers, strict=True)
        ]
        kind, largest = self._replay.kind, max(one.samples for one in lines)
        return OwnWork(WorkList(kind, lines).to_bytes(), chance_of_an_audit(len(lines)), largest, kind, verdict)

    def check(self, assignment: Assignment | None) -> None:
        if assignment is None:
            return
        self._choose_places()
        said, peer = assignment.micro_batch, assignment.peer.to_base58()
        try:
            found = self._numbers(peer, said.first_position, said.samples)
            holds = distance(found, torch.tensor(said.numbers)) <= self._tolerance
        except (InputError, OSError, RuntimeError, MemoryError) as error:  # also where memory is short
            logger.debug(f"a micro-batch of {peer} cannot be computed again: {error!r}")
            holds = None
        except ValueError as error:  # of samples with which no honest peer can have computed, either
            logger.debug(f"a micro-batch of {peer} cannot have been computed: {error!r}")
            holds = False
        self._verdict = Verdict(assignment.peer, holds)

    def silent(self, group: Group) -> list[PeerID]:
        members = zip(group.peer_ids, group.tickets, strict=True)
        found = [peer for peer, ticket in members if ticket.samples and not ticket.work and peer not in self._named]
        if len(self._named) > MAX_GROUP_SIZE:
            self._named.clear()
        self._named.update(found)
        return found

    def _numbers(self, identity: str, first_position: int, samples: int) -> torch.Tensor:
        """The sum of a micro-batch's gradients at the places of this step, fp32, on the CPU."""
        tensors = sorted({tensor for tensor, _ in self._places})
        with self._replay.of(identity, first_position, samples) as batch, torch.enable_grad():
            # Not in `param.grad`: there the gradients of this peer are added up, and the average is.
            loss, chosen = self._loss(batch), [self._vector.params[tensor] for tensor in tensors]
            gradients = torch.autograd.grad(loss, chosen, allow_unused=True)
        by_tensor = dict(zip(tensors, gradients, strict=True))
        zero = torch.zeros((), device=loss.device)
        numbers = [
            zero if by_tensor[tensor] is None else by_tensor[tensor].flatten()[place].float()
            for tensor, place in self._places
        ]
        return (torch.stack(numbers) * samples).cpu()


def places(params: list[torch.nn.Parameter], lineage: bytes) -> list[tuple[int, int]]:
    """Of the numbers of a gradient that are compared: (number of the tensor, place in it).

    They are in as many tensors as possible, so that a large embedding, most rows of which no micro-batch touches, does
    not take all of them. Nobody knows them before the round that has made these weights.
    """
    seed = lineage.hex()
    tensors = sorted(range(len(params)), key=lambda number: stable_seed(seed, "tensor", number))
    chosen = [tensors[number % len(tensors)] for number in range(NUM_PLACES)]
    return [
        (tensor, stable_seed(seed, "place", number) % params[tensor].numel()) for number, tensor in enumerate(chosen)
    ]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Between two gradients at the same places, relative to the longer one; 0 if both are zero."""
    longer = max(float(one.norm()), float(other.norm()))
    return float((one - other).norm()) / longer if longer else 0.0


def signed(ticket: Ticket, own: OwnWork | None) -> Ticket:
    """The same, with the name of the list."""
    return replace(ticket, work=name_of(own.listed)) if own is not None and own.listed else ticket
