"""Members of one group in one process: their all-reduces send to each other without a network between them.

The following measures what seals cost three members, with vectors of so many numbers, in so many pairs of exchanges:

    python -m tests.helpers.attacks.sealed_exchange 20000000 5
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection

import torch
from hivemind.p2p import P2PContext, PeerID

from swarm.averaging.allreduce import AllReduce
from swarm.averaging.audit.seals import Seals
from swarm.averaging.compression.codec import CODECS
from swarm.averaging.compression.error_feedback import ErrorFeedback
from swarm.averaging.lines.line_meter import Waits
from swarm.averaging.robust_mean import Combination
from swarm.averaging.send_window import SendWindow
from swarm.averaging.shares import stripe_of
from swarm.membership.failure_detector import FailureDetector
from swarm.protocol.messages import Group
from swarm.runtime.line_use import LineUse
from tests.helpers.attacks.sealed_rounds import group_of, key, peer

RULE = Combination(clips=True)


class Exchange:
    """One stripe of one round.

    Args:
        group: the group, as it was closed
        vectors: what each member gives in this stripe, shape [n]
        seals_of: makes the seals of a member in a stripe; None where averages are not checked
        feedbacks: what earlier rounds have left out, by member
        kinds: members whose all-reduce is of another class
        stripe: number of this one
        stripes: number of stripes of the vector
        rule: how reducers combine what they are given
        detectors: failure detectors of members, for what they remember of earlier rounds
        cut: pairs of members, of which the first cannot call the second
        num_buffers: numbers at the end of the vectors that are buffers of the model
    """

    def __init__(
        self,
        group: Group,
        vectors: dict[PeerID, torch.Tensor],
        codec: str = "none",
        seals_of: Callable[[PeerID, Group], Seals] | None = None,
        feedbacks: dict[PeerID, ErrorFeedback] | None = None,
        kinds: dict[PeerID, type[AllReduce]] | None = None,
        seconds: float = 5.0,
        stripe: int = 0,
        stripes: int = 1,
        rule: Combination = RULE,
        detectors: dict[PeerID, FailureDetector] | None = None,
        cut: Collection[tuple[PeerID, PeerID]] = (),
        num_buffers: int = 0,
    ):
        self.waits = {me: Waits() for me in group.peer_ids}
        part, kinds = stripe_of(group, 0, stripe), kinds or {}
        self.members: dict[PeerID, AllReduce] = {}
        for me in group.peer_ids:
            coder, vector = CODECS[codec](), vectors[me].clone()
            feedback = feedbacks[me] if feedbacks else ErrorFeedback(coder, len(vector))
            self.members[me] = kinds.get(me, AllReduce)(
                me=me,
                group=part,
                vector=vector,
                num_buffers=num_buffers,
                feedback=feedback,
                codec=coder,
                rule=rule,
                stripes=stripes,
                detector=(detectors or {}).get(me) or FailureDetector(None, "all-reduces without a network"),
                windows={peer: SendWindow() for peer in group.peer_ids},
                stub_of=lambda peer, me=me: Stub(self.members[peer], me, (me, peer) not in cut),
                line=LineUse(),
                stream_seconds=seconds,
                seals=seals_of and seals_of(me, part),
                waits=self.waits[me],
            )

    async def run(self) -> dict[PeerID, torch.Tensor | Exception]:
        """Run the exchange; returns the result of each member."""
        for member in self.members.values():
            member.add_left_out()
        outcomes = await asyncio.gather(*(member.run() for member in self.members.values()), return_exceptions=True)
        for member, outcome in zip(self.members.values(), outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                member.keep_left_out()
        return dict(zip(self.members, outcomes, strict=True))

    def lose(self, peer: PeerID) -> None:
        """Remove this peer: the others find out, and it hears from no member."""
        for other, member in self.members.items():
            if other != peer:
                member.lose(peer)
                self.members[peer].lose(other)


class Stub:
    """How one member calls another."""

    def __init__(self, called: AllReduce, caller: PeerID, is_reached: bool = True):
        self._called, self._caller, self._is_reached = called, caller, is_reached

    async def rpc_aggregate_part(self, inputs: AsyncIterator) -> AsyncIterator:
        if not self._is_reached:
            raise ConnectionError("nobody answers there")
        context = P2PContext(handle_name="", local_id=self._called.me, remote_id=self._caller)
        return _in_a_task(self._called.rpc_aggregate_part(_copied(inputs), context))


async def _copied(messages: AsyncIterator) -> AsyncIterator:
    async for message in messages:
        yield type(message).FromString(message.SerializeToString())  # a copy, as the network delivers it


async def _in_a_task(answers: AsyncIterator) -> AsyncIterator:
    """Yield answers from a task of its own, as a server does; the task ends when the caller hangs up."""
    queue: asyncio.Queue = asyncio.Queue(4)

    async def serve() -> None:
        async for answer in answers:
            await queue.put(type(answer).FromString(answer.SerializeToString()))
        await queue.put(None)

    serving = asyncio.ensure_future(serve())
    try:
        while (answer := await _next_of(queue, serving)) is not None:
            yield answer
    finally:
        serving.cancel()


async def _next_of(queue: asyncio.Queue, serving: asyncio.Future):
    """Return the next answer, or raise a ConnectionError if there will be none."""
    coming = asyncio.ensure_future(queue.get())
    try:
        await asyncio.wait({coming, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done() and serving.done():
            raise ConnectionError("the stream has ended")
        return await coming
    finally:
        coming.cancel()


async def _measure(group: Group, vectors: dict[PeerID, torch.Tensor], is_sealed: bool) -> tuple[float, int]:
    """Return the processor time in seconds, and the bytes sent and received, of all members together."""
    keys = {peer(number): key(number) for number in range(len(group.peer_ids))}
    seals_of = (lambda me, stripe: Seals(me, stripe, keys[me])) if is_sealed else None
    exchange, began = Exchange(group, vectors, "fp16", seals_of, seconds=60.0), time.process_time()
    for outcome in (await exchange.run()).values():
        if isinstance(outcome, BaseException):
            raise outcome
    num_bytes = sum(member.bytes_sent + member.bytes_received for member in exchange.members.values())
    return time.process_time() - began, num_bytes


def main(size: int, pairs: int) -> None:
    """Exchange in turns with and without seals, and print what they cost."""
    torch.set_num_threads(1)
    group, found = group_of((0, 1, 2)), {True: [], False: []}
    vectors = {member: torch.randn(size) for member in group.peer_ids}
    for number in range(pairs + 1):
        for is_sealed in (number % 2 == 0, number % 2 == 1):
            measured = asyncio.run(_measure(group, vectors, is_sealed))
            if number:  # the first ones warm up
                found[is_sealed].append(measured)
    ratios = [sealed[0] / plain[0] for sealed, plain in zip(found[True], found[False], strict=True)]
    plain, sealed = (statistics.mean(seconds for seconds, _ in found[kind]) for kind in (False, True))
    spread = statistics.stdev(ratios)
    print(f"{plain:.3f} s of processor time without seals, {sealed:.3f} s with them (n = {pairs} pairs)")
    print(f"ratio of pairs: {statistics.mean(ratios):.3f}, standard deviation {spread:.3f}")
    print(f"bytes: {found[True][0][1] / found[False][0][1]:.5f} times as many")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
