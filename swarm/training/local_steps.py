"""Local training (DiLoCo): each peer makes optimizer steps of its own, and the swarm averages the changes of weights.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105).
An average is applied when it arrives, and local steps made meanwhile stay on top of it. With several fragments each
update averages one of them, in turn (Streaming DiLoCo, arXiv 2501.18512).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hivemind.utils import get_logger
from torch import nn

from swarm.state_sync.training_state import SharedState
from swarm.training.averaging_mode import Averaging, LocalSteps
from swarm.training.coordinator import Coordinator
from swarm.training.gradient_buffer import GradientVector, averaged_tensors

logger = get_logger(__name__)


class PseudoGradient(GradientVector):
    """What a round averages: how far local steps have moved the weights away from the swarm's weights, the *anchors*.

    The gradients are added up for the next local step only, and serve this peer alone. An average is used where it
    has arrived, on the wire or in a download, and is not copied: each vector of n numbers costs memory.

    Args:
        params: the weights that local steps change, n numbers in all
        buffers: float buffers, averaged as they are
        local: settings of the outer optimizer, and the number of fragments
        step_of: returns the step of the next update, which decides which fragment is averaged

    Raises:
        InputError: there are fewer parameters than fragments
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        buffers: list[torch.Tensor],
        local: LocalSteps,
        step_of: Callable[[], int] = lambda: 0,
    ):
        self.anchors = [nn.Parameter(param.detach().clone()) for param in params]
        self._sent = [param.detach().clone() for param in params]
        self.outer = torch.optim.SGD(self.anchors, local.learning_rate, local.momentum, nesterov=local.momentum > 0)
        self.samples = 0
        """Number of samples whose gradients have not been used for a local step yet."""
        self._owed: torch.Tensor | None = None
        """What the next round gets besides the pseudo-gradient: what error feedback had added to that of a failed
        round, less what it kept of it. A sum over samples, in the shape of the present fragment."""
        self._good_buffers: list[torch.Tensor] = []
        self._has_given = False
        """Whether the round has the local changes of the fragment up to its start; if not, they wait for the next."""
        self._step_of = step_of
        super().__init__(params, buffers, fragments=local.fragments)
        self.average = self.wire

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights that all peers have in common: the anchors."""
        return self.anchors

    @property
    def own_tensors(self) -> list[torch.Tensor]:
        return [self._sum, *self.anchors, *self._sent]

    def _now(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the present fragment, out of a list with one for each parameter."""
        return [tensors[place] for place in self.fragments.tensors_at(self._step_of())]

    @property
    def _averaged(self) -> torch.Tensor:
        """The numbers that travel for the present fragment: a view of the wire."""
        return self.wire[: self.fragments.size_at(self._step_of())]

    def _split(self, averaged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the fragment's numbers and of the buffers."""
        num_params = sum(param.numel() for param in self._now(self.params))
        return averaged[:num_params], averaged[num_params:]

    def hand_over_own(self) -> None:
        """Put the mean of this peer's own gradients into `param.grad`, for a local step."""
        self._sum.mul_(self._unit / self.samples)
        self._hand_over(self.params, self._sum)

    def end_own_step(self) -> None:
        """End a local step, and begin the next one."""
        self._clear()
        self.samples, self._good_buffers = 0, [buffer.clone() for buffer in self._buffers]
        self.release()

    def drop_own(self) -> int:
        """Forget gradients if they are not finite; return the number of samples dropped."""
        if self._has_finite_sum:
            return 0
        self._clear()
        for buffer, good in zip(self._buffers, self._good_buffers, strict=True):
            buffer.copy_(good)
        dropped, self.samples = self.samples, 0
        return dropped

    @torch.no_grad()
    def reset(self) -> None:
        super().reset()
        self.samples, self._owed, self._good_buffers = 0, None, self._buffers_before

    @torch.no_grad()
    def adopt(self) -> None:
        for param, anchor in zip(self.params, self.anchors, strict=True):
            anchor.copy_(param)
        super().adopt()

    @torch.no_grad()
    def drop(self) -> None:
        """Forget the local steps that are in no average yet, and undo their effect on the buffers."""
        self._drop_sum()
        self.show_anchors()

    def _drop_sum(self) -> None:
        super().drop()
        self.samples, self._owed, self._good_buffers = 0, None, self._buffers_before
        self._has_given = False

    @torch.no_grad()
    def show_anchors(self) -> None:
        """Put the swarm's weights into the model; local steps are lost unless the caller keeps them elsewhere."""
        for param, anchor in zip(self.params, self.anchors, strict=True):
            param.copy_(anchor)

    @property
    def is_finite(self) -> bool:
        return all(torch.isfinite(tensor).all() for tensor in (*self.params, *self._buffers))

    @torch.no_grad()
    def _write_pseudo_gradient(self) -> None:
        """Write the pseudo-gradient and the buffers onto the wire, and note the weights that it was made from."""
        params, anchors, sent = self._now(self.params), self._now(self.anchors), self._now(self._sent)
        numbers, buffers = self._split(self._averaged)
        for param, anchor, kept, view in zip(params, anchors, sent, self.views_of(numbers, params), strict=True):
            kept.copy_(param)
            view.copy_(anchor - kept)
        buffers.copy_(self.buffers)

    @torch.no_grad()
    def to_wire(self, samples: int) -> None:
        """Write the pseudo-gradient and the buffers onto the wire. Local steps go on from the present weights.

        Args:
            samples: samples of this step; with 0 the peer gives nothing, not even local changes of earlier steps
        """
        self._write_pseudo_gradient()
        self._has_given = samples > 0
        self._add_owed(samples)

    def _add_owed(self, samples: int) -> None:
        """Add the error feedback of a failed round, as a mean over these samples, to what is written."""
        if self._owed is not None and samples:
            self._split(self._averaged)[0].add_(self._owed, alpha=1 / samples)
            self._owed = None

    @torch.no_grad()
    def take_back(self, samples: int) -> None:
        """Take back what a failed round was given: the weights still hold it, so the next round sends it again.

        The weights do not hold what `ErrorFeedback` added to it, less the part that error feedback kept. That
        difference is owed to the next round.
        """
        anchors, added = self._now(self.anchors), self._split(self._averaged)[0].clone()
        for anchor, sent, view in zip(anchors, self._now(self._sent), self.views_of(added, anchors), strict=True):
            view.sub_((anchor - sent).to(view.device))
        if samples and added.any():
            self._owed = added.mul_(samples)

    def depart(self) -> None:
        """Begin a step whose round already runs; this peer gives nothing to that round."""
        super().depart()
        self._has_given = False

    def from_wire(self) -> None:
        self.take(self._averaged)

    @torch.no_grad()
    def take(self, average: torch.Tensor) -> None:
        """Take over an average of the present fragment and the buffers."""
        self.average = average
        self.take_buffers(self._split(average)[1])
        self._buffers_before = self._good_buffers = [buffer.clone() for buffer in self._buffers]

    def average_alone(self, samples: int) -> None:
        """Take this peer's own pseudo-gradient as the average, for an update without other peers.

        What is owed is added. It is negative where error feedback kept numbers of a failed round, which it sends later.
        """
        self._write_pseudo_gradient()
        self._add_owed(samples)
        self._has_given = True
        self.average = self._averaged

    def show(self) -> None:
        """Do nothing: the average of this peer alone is on the wire already, for peers that follow its updates."""

    @torch.no_grad()
    def follow(self, average: torch.Tensor) -> None:
        """Make the outer step of an update that other peers have made; forget local steps of its fragment."""
        self._drop_sum()
        for param, anchor in zip(self._now(self.params), self._now(self.anchors), strict=True):
            param.copy_(anchor)
        self.take(average)
        self.hand_over()

    @torch.no_grad()
    def hand_over(self) -> None:
        """Make the outer step. What local steps have changed since the round began stays on top of the new anchors."""
        params, anchors = self._now(self.params), self._now(self.anchors)
        # Reuses `_sent`, which the next round overwrites: first it holds the weights sent, then local progress since.
        progress = self._now(self._sent)
        since = progress if self._has_given else anchors
        for param, before, local_progress in zip(params, since, progress, strict=True):
            torch.sub(param, before, out=local_progress)
        self._hand_over(anchors, self.average)
        self.average = self.wire  # lets go of an average that was downloaded
        self.outer.step()
        for param, anchor, local_progress in zip(params, anchors, progress, strict=True):
            anchor.grad = None
            param.copy_(anchor).add_(local_progress)


def _nothing() -> None:
    """Do nothing: the outer step is made when the average is handed over."""


class LocalCoordinator(Coordinator):
    """One peer's part in a swarm whose peers make local steps.

    The optimizer step that follows a true `contribute` is a local one. Global updates are made in `contribute`, or
    after the local step.
    """

    def __init__(self, *arguments, averaging: Averaging, **options):
        self.local, self._weights_may_be_why = averaging.local_steps, False
        self._aside: list[torch.Tensor] = []
        """The weights of this peer while the swarm's are validated."""
        super().__init__(*arguments, averaging=averaging, **{**options, "apply": _nothing})

    def _share(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[PseudoGradient, SharedState]:
        params, buffers = averaged_tensors(model, optimizer)
        vector = PseudoGradient(params, buffers, self.local, lambda: self.step)
        anchors = dict(zip(params, vector.anchors, strict=True))
        return vector, SharedState(model, [optimizer, vector.outer], anchors)

    @property
    def local_batch_size(self) -> float:
        """Samples of a local step, such that equally fast peers make `local.steps` of them for a global update."""
        auto, steps = self.control.auto, self.local.steps
        if auto is not None:
            steps = auto.local_steps(self.tracker.own.round)
        return self.target.samples / (steps * max(1, self.tracker.swarm.num_trainers))

    def contribute(self, samples: int, loss: torch.Tensor | float) -> bool:
        """Count a micro-batch after its backward pass, as in `Coordinator`.

        Returns:
            True when a local step is due: make it within `updating`. False: go on with the next micro-batch.
        """
        samples = self._count(samples, loss)
        if self._probation.gives_nothing:  # its gradients are dropped, and zeros would wear out Adam's statistics
            self._synchronise_all()
            return False
        vector = self._gradients
        vector.samples += samples
        may_begin = not self._round.is_running and not self.catching_up.is_behind
        is_last = may_begin and self._is_over  # a round begins with all that has been computed
        is_due = is_last or vector.samples >= self.local_batch_size
        if is_due:
            self._contribution.gather()
        if is_due and (dropped := vector.drop_own()):
            return self._leave_out(dropped)
        if not is_due:  # a round that began now would count samples that no local step has used
            if self._round.is_running:
                self._synchronise_all()
            else:
                self.catching_up.keep_up()
            return False
        self._contribution.keep()
        self._weights_may_be_why = False
        return True

    def attend(self) -> bool:
        """Take part as any helper: make a global update at once. No local step is ever due, so return False."""
        if super().attend():
            with super().updating():
                pass
        return False

    def _leave_out(self, samples: int) -> bool:
        """Leave out a local step that is not finite; after several in a row, replace the weights."""
        logger.warning(f"A local step after step {self.step} is not finite: its {samples} samples are dropped")
        self._weights_may_be_why |= self._contribution.discount(samples)
        self.tracker.report(samples=self.samples)
        if self._weights_may_be_why and not self._round.is_running:
            donor = self._healers.find_healer(self._follower.last_donor)
            # Without a donor now, try again after the next bad step: the other peers may be making an update.
            self._weights_may_be_why = donor is None and bool(self.tracker.others)
            if donor is not None:
                self.catching_up.begin(donor)
                return False
            self._gradients.drop()  # back to the weights of the last global update
            self._contribution.forget_samples()
            self.tracker.report(samples=0, loss=math.nan)
        self._synchronise_all()
        return False

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """A context for the local optimizer step; then a round begins, or its average is applied, if it is time."""
        with self.version.lock:  # no peer may download a half-made step
            self._gradients.hand_over_own()
            yield
            self._contribution.note_update()
        self._gradients.end_own_step()
        self._synchronise_all()

    def _synchronise_all(self) -> None:
        if self._synchronise():
            with super().updating():
                pass  # the outer optimizer has made its step when the average was handed over

    def before_validation(self) -> None:
        """Put the swarm's weights into the model, which are validated, and set this peer's own aside."""
        super().before_validation()
        self._aside = [param.detach().clone() for param in self._gradients.params]
        self._gradients.show_anchors()

    def after_validation(self) -> None:
        """Put this peer's own weights back: local steps go on where they were."""
        with torch.no_grad():
            for param, aside in zip(self._gradients.params, self._aside, strict=True):
                param.copy_(aside)
        self._aside = []
        super().after_validation()

    def shared(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's state with the weights of the swarm in place of this peer's."""
        anchors = zip(self._gradients.params, self._gradients.anchors, strict=True)
        by_address = {param.data_ptr(): anchor.detach() for param, anchor in anchors}
        return {name: by_address.get(tensor.data_ptr(), tensor) for name, tensor in state_dict.items()}

    def outer_state(self) -> dict[str, Any]:
        return self._gradients.outer.state_dict() if self.local.momentum else {}

    def load_outer_state(self, state: dict[str, Any]) -> None:
        if self.local.momentum:
            self._gradients.outer.load_state_dict({**state, "param_groups": self.outer_state()["param_groups"]})

    def leave(self) -> None:
        """Leave the swarm and stop; the model keeps the weights of the swarm."""
        super().leave()
        self._gradients.show_anchors()
