"""Lies of a member: an honest peer of which one thing is changed, in its own process and in all that it forks.

`LIES` maps names to changes. Class names, which are part of the wire protocol, stay as they are.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from hivemind.compression import CompressionInfo
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from recipe.training.task import ClassificationTask
from swarm.averaging.allreduce import AllReduce
from swarm.averaging.audit.audits import Audits
from swarm.averaging.audit.seals import Seals, seal_with
from swarm.averaging.audit.statements import Receipt, hash_of, root_of
from swarm.averaging.meeting.lobby import Lobby
from swarm.averaging.meeting.matchmaking import Matchmaking
from swarm.averaging.meeting.matchmaking_messages import step_reply
from swarm.membership.progress_record import TRAINING, PeerProgress
from swarm.membership.progress_tracker import ProgressTracker
from swarm.protocol.wire import MAX_SAMPLES
from swarm.state_sync.state_server import StateServer
from swarm.state_sync.state_version import StateVersion
from swarm.state_sync.training_state import SharedState
from swarm.training.audit.work_log import CheckedLog
from swarm.training.gradient_buffer import GradientVector
from swarm.training.local_steps import PseudoGradient
from tests.helpers.attacks.false_gradients import FALSE_GRADIENTS, LABELS, Change, flip_labels
from tests.helpers.attacks.tools import check_address, listening_host

SLOW_SECONDS = 0.8
DRIP_SECONDS = 5.0
AHEAD, AHEAD_FROM = 20, 3
"""Updates by which it claims to be ahead, and its first step with a lie; by then all others have been in a group."""
MADE_UP = b"made up by a liar"[:16]
"""A false lineage, which names the updates that weights come from."""


def nan() -> None:
    """b3: every number of every part is NaN."""
    _send_parts_of(torch.nan)


def overflow() -> None:
    """b4: every number of every part is 3e38, which is finite; times a weight it is not."""
    _send_parts_of(3e38)


def _send_parts_of(number: float) -> None:
    honest = AllReduce.inputs_for

    async def false(self, reducer: PeerID) -> AsyncIterator:
        async for message in honest(self, reducer):
            if not message.tensor_part.size[0]:  # the member's own commitment to what it sends
                yield message
                continue
            part = self.codec.extract(message.tensor_part)
            spoilt = torch.full_like(part, number)
            message.tensor_part.CopyFrom(self.codec.compress(spoilt, CompressionInfo.from_tensor(spoilt)))
            yield message

    AllReduce.inputs_for = false


def bad_average() -> None:
    """d3: the average of the share that it reduces is NaN."""
    honest = AllReduce.encode_average

    def false(self, part_index: int, average: torch.Tensor):
        return honest(self, part_index, torch.full_like(average, torch.nan))

    AllReduce.encode_average = false


def scaled_average() -> None:
    """d1: the average of the share that it reduces x -10, the same for all members."""
    _average_instead(lambda average: -10 * average)


def garbage_average() -> None:
    """The average of the share that it reduces is noise of the same norm."""
    _average_instead(lambda average: average.norm() / max(1, len(average)) ** 0.5 * torch.randn_like(average))


def _average_instead(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    honest = AllReduce.encode_average

    def false(self, part_index: int, average: torch.Tensor):
        return honest(self, part_index, change(average))

    AllReduce.encode_average = false


def equivocate() -> None:
    """d2: sends the first other member of the group the average x -10, and a receipt that fits."""
    honest, keys = AllReduce.rpc_aggregate_part, []
    honest_seals = Seals.__init__

    def make(self, me, group, key, *more):
        honest_seals(self, me, group, key, *more)
        keys.append(key)

    async def false(self, stream, context) -> AsyncIterator:
        hashes, others = [], [peer for peer in self.group.peer_ids if peer != self.me]
        async for answer in honest(self, stream, context):
            if context.remote_id == others[0] and answer.code == averaging_pb2.AVERAGED_PART:
                if answer.tensor_part.size[0]:
                    average = -10 * self.codec.extract(answer.tensor_part)
                    tensor = self.codec.compress(average, CompressionInfo.from_tensor(average))
                    hashes.append(hash_of(tensor))
                else:
                    true = Receipt.from_bytes(answer.tensor_part.buffer)
                    tensor = seal_with(Receipt.sign(keys[0], true.stripe, root_of(hashes), true.counted).data)
                answer = averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=tensor)
            yield answer

    Seals.__init__, AllReduce.rpc_aggregate_part = make, false


def hide_inputs() -> None:
    """Falsifies its average as in d1, and refuses to show the inputs."""
    scaled_average()

    async def refuse(self, caller, data):
        raise ValueError("it is lost")

    Audits.answer = refuse


def slow() -> None:
    """Sends one part each 0.8 s, from its first round on."""
    honest = AllReduce.inputs_for

    async def late(self, reducer: PeerID) -> AsyncIterator:
        async for message in honest(self, reducer):
            await asyncio.sleep(SLOW_SECONDS)
            yield message

    AllReduce.inputs_for = late


def stuck() -> None:
    """Claims to be the oldest peer, so that it leads. Admits every joiner, and never tells it that the round begins."""
    honest = Lobby.serve

    async def serve(self, request, context):
        async for reply in honest(self, request, context):
            if reply.code == averaging_pb2.BEGIN_ALLREDUCE:
                await asyncio.Event().wait()
            yield reply

    Lobby.serve = serve
    _say_that_it_was_here_first()


def go_on_alone() -> None:
    """Claims to be the oldest peer, so that it leads. After some updates it goes on alone and tells joiners that the
    swarm has gone on; so it has a history and averages of its own to show."""
    honest_serve, honest_expect = Lobby.serve, Matchmaking.expect

    async def serve(self, request, context):
        if self.step >= AHEAD_FROM:
            yield step_reply(self.step + 2)  # the joiner may have made as many updates
            return
        async for reply in honest_serve(self, request, context):
            yield reply

    def expect(self, members):
        honest_expect(self, () if self.lobby.step >= AHEAD_FROM else members)

    Lobby.serve, Matchmaking.expect = serve, expect
    _say_that_it_was_here_first()


def other_history() -> None:
    """Claims to be the oldest peer, so that it leads. After some updates it tells joiners that it holds other weights
    of the same step, and hands over weights x -1 as these."""
    honest_serve, honest_record, honest_export = Lobby.serve, PeerProgress.to_bytes, SharedState.export

    async def serve(self, request, context):
        if self.step >= AHEAD_FROM:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.BAD_GROUP_KEY)
            return
        async for reply in honest_serve(self, request, context):
            yield reply

    def to_bytes(self) -> bytes:
        return honest_record(self if self.step < AHEAD_FROM else replace(self, lineage=MADE_UP, attested=None))

    def export(self, step: int, lineage: bytes):
        description, tensors = honest_export(self, step, lineage if step < AHEAD_FROM else MADE_UP)
        sign = 1 if step < AHEAD_FROM else -1
        num_model_tensors = len(self.model_tensors)
        return description, [*(sign * one for one in tensors[:num_model_tensors]), *tensors[num_model_tensors:]]

    Lobby.serve, PeerProgress.to_bytes, SharedState.export = serve, to_bytes, export
    _say_that_it_was_here_first()


def ahead() -> None:
    """a3: after some updates it claims to be 20 steps ahead. It sends its state and averages slowly."""
    honest_record, honest_answer = PeerProgress.to_bytes, StateServer.rpc_download_state

    def to_bytes(self) -> bytes:
        is_ahead = self.phase == TRAINING and self.step >= AHEAD_FROM
        return honest_record(replace(self, step=self.step + AHEAD * is_ahead))

    @functools.wraps(honest_answer)
    async def drip(self, requests, context):
        async for message in honest_answer(self, requests, context):
            if message.HasField("tensor_part") and self.rounds.step >= AHEAD_FROM:
                await asyncio.sleep(DRIP_SECONDS)
            yield message

    PeerProgress.to_bytes, StateServer.rpc_download_state = to_bytes, drip


def made_up_state() -> None:
    """a4: after some updates it claims to be 20 steps ahead, and hands over weights x -1 as those of that step.

    No other peer names the lineage that it claims for them."""
    honest_record, honest_export = PeerProgress.to_bytes, SharedState.export

    def to_bytes(self) -> bytes:
        if self.phase != TRAINING or self.step < AHEAD_FROM:
            return honest_record(self)
        return honest_record(replace(self, step=self.step + AHEAD, lineage=MADE_UP, attested=None))

    def export(self, step: int, lineage: bytes):
        if step < AHEAD_FROM:
            return honest_export(self, step, lineage)
        description, tensors = honest_export(self, step + AHEAD, MADE_UP)
        num_model_tensors = len(self.model_tensors)
        return description, [*(-one for one in tensors[:num_model_tensors]), *tensors[num_model_tensors:]]

    PeerProgress.to_bytes, SharedState.export = to_bytes, export


def false_statistics() -> None:
    """e2: hands over a state of tensors x -1, the optimizer's step among them, and claims to be the oldest peer."""
    _hand_over_negated(lambda number, num_model_tensors: True)


def flip() -> None:
    """e1: hands over a state whose weights are x -1, with right digests, and claims to be the oldest peer."""
    _hand_over_negated(lambda number, num_model_tensors: number < num_model_tensors)


def _hand_over_negated(which: Callable[[int, int], bool]) -> None:
    honest_export = SharedState.export

    def export(self, step: int, lineage: bytes):
        description, tensors = honest_export(self, step, lineage)
        num_model_tensors = len(self.model_tensors)
        negated = [
            -tensor if tensor.is_floating_point() and which(number, num_model_tensors) else tensor
            for number, tensor in enumerate(tensors)
        ]
        return description, negated

    SharedState.export = export
    _say_that_it_was_here_first()


def _say_that_it_was_here_first() -> None:
    honest_begin, honest_come_back = ProgressTracker.__init__, ProgressTracker.came_back

    def begin(self, *args, **kwargs):
        honest_begin(self, *args, **kwargs)
        self._own = replace(self._own, joined=0.0)

    def come_back(self):
        honest_come_back(self)
        self.report(urgent=True, joined=0.0)

    ProgressTracker.__init__, ProgressTracker.came_back = begin, come_back


def false_gradient(change: Callable[[], Change]) -> Callable[[], None]:
    """Return a lie that changes the member's gradient, or the result of its local steps."""
    return lambda: _send_instead(change())


def idle() -> None:
    """c1: sends zeros, and claims as many samples as a ticket can hold."""
    honest = StateVersion.ticket

    def ticket(self, *arguments):
        return replace(honest(self, *arguments), samples=MAX_SAMPLES)

    StateVersion.ticket = ticket
    _send_instead(torch.zero_)


def half() -> None:
    """Skips every second micro-batch: its gradient is that of the one before, a little longer."""
    honest, last = ClassificationTask.training_step, []

    def compute(self, batch, batch_idx):
        params = [param for param in self.parameters() if param.requires_grad]
        if last:
            gradients = last.pop()
            loss = sum((param * gradient).sum() for param, gradient in zip(params, gradients, strict=True))
            return loss - loss.detach() + 1.0
        loss = honest(self, batch, batch_idx)
        last.append([1.01 * gradient for gradient in torch.autograd.grad(loss, params, retain_graph=True)])
        return loss

    ClassificationTask.training_step = compute
    CheckedLog.check = lambda self, assignment: None  # nor does it recompute micro-batches of other members


def silent() -> None:
    """Publishes no list of its micro-batches, as if it could not."""
    CheckedLog.own = lambda self, work, num_processes: None


def _send_instead(change: Change) -> None:
    for kind in (GradientVector, PseudoGradient):
        kind.to_wire = _changed(kind.to_wire, change)


def _changed(honest: Callable, change: Change) -> Callable:
    def to_wire(self, samples: int) -> None:
        honest(self, samples)
        change(self.wire)

    return to_wire


LIES: dict[str, Callable[[], None]] = {
    "nan": nan,
    "overflow": overflow,
    "bad-average": bad_average,
    "scaled-average": scaled_average,
    "garbage-average": garbage_average,
    "equivocate": equivocate,
    "hide": hide_inputs,
    "slow": slow,
    "stuck": stuck,
    "goes-on-alone": go_on_alone,
    "other-history": other_history,
    "ahead": ahead,
    "made-up-state": made_up_state,
    "false-statistics": false_statistics,
    "flip": flip,
    "idle": idle,
    "half": half,
    "silent": silent,
    LABELS: flip_labels,
    **{name: false_gradient(change) for name, change in FALSE_GRADIENTS.items()},
}


def train(lie: str, initial_peers: Sequence[str], seconds: float, output_dir: Path) -> int:
    """Join the run as a peer that lies; returns its exit status.

    Raises:
        InputError: an address that no attacker may call
    """
    for address in initial_peers:
        check_address(address)
    LIES[lie]()
    from swarm.peer.main import main

    arguments = ["--initial-peers", *initial_peers, "--public-name", "mallory", "--output-dir", str(output_dir)]
    arguments += ["--max-time", f"00:{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"]
    status = main([*arguments, "--host-maddrs", f"/ip4/{listening_host()}/tcp/0"])
    sys.stdout.flush()
    os._exit(status)
