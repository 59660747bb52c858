"""Whatever a member sends in place of evidence, the asking peer learns that the member shows nothing."""

import asyncio

import pytest
from hivemind.p2p import P2P

from swarm.averaging.audit.evidence_call import ask_for
from swarm.network.peer_service import PeerService
from swarm.runtime.line_use import LineUse

NAMESPACE = "numbers"
MESSAGE, ERROR = P2P.MESSAGE_MARKER, P2P.ERROR_MARKER


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x07",
        MESSAGE + (4).to_bytes(8, "big") + b"\xff" * 4,
        MESSAGE + (2**60).to_bytes(8, "big"),
        MESSAGE + (0).to_bytes(8, "big"),
        ERROR + (4).to_bytes(8, "big") + b"\xff" * 4,
    ],
    ids=["nothing", "no marker", "no message", "too long", "empty", "no error"],
)
def test_an_answer_that_cannot_be_read_is_none(answer):
    async def answers_so(_, reader, writer):
        await reader.read(1)
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def scenario():
        liar = await P2P.create()
        asker = await P2P.create(initial_peers=await liar.get_visible_maddrs())
        try:
            handle = PeerService.handle_name(NAMESPACE, PeerService.rpc_show_evidence.__name__)
            await liar.add_binary_stream_handler(handle, answers_so)
            with pytest.raises(OSError, match="it shows nothing"):
                await ask_for(asker, NAMESPACE, LineUse(), liar.peer_id, b"x", 1000)
        finally:
            await asker.shutdown()
            await liar.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), 60))
