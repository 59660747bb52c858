"""The first process of an island whose processes share one model: it reads and writes the pieces of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from recipe.errors import InputError
from recipe.training.replay import Replay
from swarm.protocol.work import Assignment
from swarm.training.audit.earlier_weights import EarlierWeights
from swarm.training.audit.work_log import CheckedLog, Loss, Weights
from swarm.training.gradient_buffer import GradientVector, Place
from swarm.training.island.channel import Channel, Word
from swarm.training.island.lead import Lead
from swarm.training.island.sharded.pieces import COUNT, STATISTICS, Pieces, is_divided, local_of, piece_of


class ShardedLog(CheckedLog):
    """A `CheckedLog` with which all processes recompute another member's micro-batch together.

    It must not fail where the processes wait for each other. So only a size that this peer uses itself is recomputed,
    or slices of such a size.
    """

    def _holds(self, assignment: Assignment) -> bool | None:
        samples = assignment.line.samples // assignment.line.micro_batches
        if not self._replay.has_slices and not 2 <= samples <= self._replay.micro_batch:
            return None
        return super()._holds(assignment)


class ShardedLead(Lead):
    """The first of several processes that share one model; it tells the others what to do with their pieces.

    It asks the others for something only while they listen for words, even if another thread of this process asks. To
    ensure this, it holds the channel's lock from a word that lets all processes compute until all have computed.

    Args:
        channel: the connection to the others
        model: the divided model
        roots: the models in it, each of which all processes compute together
        optimizer: the optimizer over the pieces of this process
    """

    def __init__(
        self, channel: Channel, model: nn.Module, roots: Sequence[nn.Module], optimizer: torch.optim.Optimizer
    ):
        super().__init__(channel)
        self.module = model
        self.pieces = Pieces(channel, model, optimizer)
        self._buffers = list(model.buffers())
        self._is_computing = False
        self._goes_back = False
        """Whether a backward pass follows when the others next compute along (`Word.LEND`)."""
        self._computed: set[int] = set()
        """The numbers of the roots that micro-batches have computed."""
        for number, root in enumerate(roots):
            self._borrow_for(root, number)

    # ---- what is computed together ----------------------------------------------------------------------------------

    def _borrow_for(self, root: nn.Module, number: int) -> None:
        """Let the others compute along when this process computes alone, as in validation: it needs their pieces."""

        def begin(module: nn.Module, inputs: Any) -> None:
            if self._is_computing:
                self._computed.add(number)
                return
            self._channel.hold()
            if number not in self._computed:  # the others compute along on the inputs of their latest micro-batch
                raise InputError(
                    "Processes that share one model (fsdp) can evaluate it only after their first micro-batch: let "
                    "callbacks evaluate it later, or take inside='ddp'."
                )
            self._channel.tell(Word.LEND, number, int(self._goes_back))

        def end(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if not self._is_computing:
                self._channel.release()

        root.register_forward_pre_hook(begin, prepend=True)
        root.register_forward_hook(end, always_call=True)

    def kind_of(self, replay: Replay) -> str:
        with self._channel.speaking():
            if replay.kind:
                self._channel.tell(Word.KIND)
            return super().kind_of(replay)

    def log_of(
        self, replay: Replay, loss: Loss, vector: GradientVector, version: Weights, earlier: EarlierWeights | None
    ) -> CheckedLog:
        return ShardedLog(replay, loss, vector, version, self.kind_of(replay), earlier)

    def gradient_of(self, loss: Callable[[], torch.Tensor], places: Sequence[Place]) -> torch.Tensor:
        """As in `GradientVector`. The others compute along, and no process keeps anything of it."""
        self._channel.hold()
        self._goes_back = True
        try:
            value = loss()
            self.pieces.own.watch(places)
            with self._channel.computing():
                value.backward()
        except Exception:  # the others wait in the middle of this computation, and cannot be brought out of it
            self._channel.give_up()
            raise
        finally:
            numbers = self.pieces.own.watched()
            self.pieces.release()
            self._goes_back = False
            self._channel.release()
        return numbers.cpu()

    def begin_micro_batch(self, step: int, lineage: bytes) -> None:
        self._channel.hold()
        self._is_computing = True
        super().begin_micro_batch(step, lineage)

    def add_up(self, samples: int, loss: torch.Tensor | float) -> tuple[int, torch.Tensor | float]:
        total = super().add_up(samples, loss)
        self._is_computing = False
        self._channel.release()
        return total

    def end(self) -> None:
        super().end()
        if self._is_computing:  # a micro-batch has failed; a thread that waits for the lock then gets an error
            self._is_computing = False
            self._channel.release()

    @property
    def is_between(self) -> bool:
        """Whether the others are there and listen for a word."""
        return not self._is_computing and self._channel.is_heard and not self._channel.is_lost

    def _count_changes(self) -> int:
        """How often buffers have changed: weights never travel."""
        return self._updates

    def _travelling(self, is_first_time: bool) -> list[torch.Tensor]:
        return self._buffers

    def _add_gradients(self, vector: GradientVector) -> None:
        """Do nothing: gradients stay where they are until a round needs them."""

    # ---- gradients --------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Set the sums of all processes to zero."""
        self._own = self._others = self._turns = 0
        self.pieces.forget()
        self._channel.tell(Word.FORGET)

    def is_finite(self) -> bool:
        """Whether the sums are finite, on all processes."""
        unsound = torch.tensor([0.0 if self.pieces.is_finite else 1.0])
        with self._channel.speaking():
            self._channel.tell(Word.LOOK)
            self._channel.reduce_numbers(unsound)
        return not unsound

    @torch.no_grad()
    def collect(self, views: Sequence[torch.Tensor]) -> None:
        """Read the whole sums, and set them to zero.

        Args:
            views: tensors on the CPU to which the sums are copied
        """
        with self._channel.speaking():
            self._channel.tell(Word.GIVE)
            for number, view in enumerate(views):
                self._read(self.pieces.sum_of(number), view)
        self.pieces.forget()

    @torch.no_grad()
    def hand_out(self, views: Sequence[torch.Tensor], factor: float | torch.Tensor, adds: bool) -> None:
        """Hand out gradients, times a factor: each process gets its pieces.

        Args:
            views: the whole gradients, on the CPU
            factor: the factor
            adds: add them to the sums; otherwise they replace the sums, as gradients of the next update
        """
        with self._channel.speaking():
            self._channel.tell(Word.TAKE, int(adds))
            for number, view in enumerate(views):
                own, *others = self._cut(view)
                for rank, piece in enumerate(others, 1):
                    self._channel.send(piece * factor, rank)
                self.pieces.put(number, own * factor, adds)
        if not adds:
            self.pieces.show_average()

    def note_update(self) -> None:
        with self._channel.speaking():
            self._channel.tell(Word.STEP)
            self._channel.exchange(self.pieces.settings)
        super().note_update()

    # ---- weights and statistics -------------------------------------------------------------------------------------

    def read(self, kind: int, number: int) -> torch.Tensor:
        """Return a whole weight or statistic, on the CPU if it is divided."""
        with self._channel.speaking():
            tensor = self.pieces.tensor(kind, number)
            if not is_divided(tensor):
                return tensor.detach()
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._channel.tell(Word.READ, kind, number)
            self._read(local_of(tensor), whole)
        return whole

    @torch.no_grad()
    def write(self, kind: int, number: int, whole: torch.Tensor) -> None:
        """Write a whole weight or statistic into the pieces of all processes."""
        with self._channel.speaking():
            self._channel.tell(Word.WRITE, kind, number)
            own, *others = [whole.reshape(())] * self._channel.size if kind == COUNT else self._cut(whole)
            into = local_of(self.pieces.tensor_for(kind, number))
            for rank, piece in enumerate(others, 1):
                self._channel.send(piece.to("cpu", into.dtype), rank)
            into.copy_(own)

    def write_statistic(self, number: int, name: str, whole: torch.Tensor) -> None:
        """Write a statistic, given by its name, into the pieces of all processes."""
        self.write(1 + STATISTICS.index(name), number, whole)

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Take over the whole `state_dict` of an optimizer."""
        self.pieces.optimizer.load_state_dict(state | {"state": {}})
        self.renew()
        for number, statistics in state["state"].items():
            for name, value in statistics.items():
                if isinstance(value, torch.Tensor):
                    self.write_statistic(number, name, value)

    def renew(self) -> None:
        """Forget all statistics on all processes, before they are written anew."""
        self._channel.tell(Word.RENEW)
        self.pieces.renew()

    def note_written(self) -> None:
        """Note that a state was written, so that the others get the buffers with the next micro-batch."""
        super().note_update()

    def _cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [piece_of(whole, rank, self._channel.size) for rank in range(self._channel.size)]

    def _read(self, own: torch.Tensor, whole: torch.Tensor) -> None:
        first, *others = self._cut(whole)
        first.copy_(own)
        for rank, piece in enumerate(others, 1):
            self._channel.receive(piece, rank)
