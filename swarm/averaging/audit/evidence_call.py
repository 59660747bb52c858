"""The call by which members show each other receipts, what an average was made of, proofs, and lists of work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import get_logger
from hivemind.utils.asyncio import aiter_with_timeout, as_aiter

from swarm.averaging.audit.audits import Audits
from swarm.network.peer_service import PeerService
from swarm.protocol.admission import Admission
from swarm.runtime.async_utils import until_caller_hangs_up
from swarm.runtime.line_use import LineUse

logger = get_logger(__name__)

PIECE_BYTES = 2**16
"""Bytes of one piece of an answer: rounds and records get through between two pieces."""
PIECE_SECONDS = 10.0
"""Seconds for which the next piece of an answer is waited for."""
CALL_SECONDS = 60.0
"""Seconds for which the whole answer is waited for."""


async def ask_for(p2p: P2P, namespace: str, line: LineUse, peer: PeerID, request: bytes, most_bytes: int) -> bytes:
    """What a peer shows for a request.

    Raises:
        OSError: it shows nothing, or too late, or more than `most_bytes`
    """
    try:
        async with asyncio.timeout(CALL_SECONDS):
            stub, pieces, num_bytes = PeerService.get_stub(p2p, peer, namespace=namespace), [], 0
            stream = await stub.rpc_show_evidence(as_aiter(averaging_pb2.AveragingData(group_id=request)))
            async for answer in aiter_with_timeout(stream, PIECE_SECONDS):
                if answer.code != averaging_pb2.AVERAGED_PART:
                    break
                pieces.append(answer.tensor_part.buffer)
                num_bytes += len(pieces[-1])
                line.receive(answer.ByteSize())
                if num_bytes > most_bytes:
                    raise OSError("it shows too much")
                if answer.weight:  # the last one
                    return b"".join(pieces)
    except Exception as error:  # another peer's bytes can raise anything
        raise OSError(f"it shows nothing: {error!r}") from error
    raise OSError("it shows nothing")


async def show_evidence(
    audits: Audits | None,
    admission: Admission,
    line: LineUse,
    requests: AsyncIterator[averaging_pb2.AveragingData],
    context: P2PContext,
) -> AsyncIterator[averaging_pb2.AveragingData]:
    """Answer a request of `ask_for`. A peer that is no member any more is shown nothing: it would be gradients."""
    try:
        request = await anext(requests)
        if admission.has_left(context.remote_id):
            raise ValueError("it was removed from the run, or its certificate has ended")
        if audits is None:
            raise ValueError("averages are not checked in this run")
        shown = await audits.answer(context.remote_id, request.group_id)
    except (ValueError, StopAsyncIteration) as error:
        logger.debug(f"nothing is shown to {context.remote_id}: {error}")
        yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
        await until_caller_hangs_up()
        return
    for begin in range(0, len(shown), PIECE_BYTES):
        piece = runtime_pb2.Tensor(buffer=shown[begin : begin + PIECE_BYTES])
        answer = averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=piece)
        answer.weight = float(begin + PIECE_BYTES >= len(shown))
        await line.send(answer.ByteSize())
        if admission.has_left(context.remote_id):  # meanwhile
            return
        yield answer
    await until_caller_hangs_up()
