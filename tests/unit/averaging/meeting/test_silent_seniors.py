"""Silent seniors cost their juniors one wait in all, and not one each."""

import asyncio
from types import SimpleNamespace

from hivemind.p2p import PeerID

from swarm.averaging.meeting.matchmaking import Matchmaking
from swarm.membership.backoff import Backoff
from swarm.membership.failure_detector import FailureDetector
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Member, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from tests.helpers.virtual_time import run_in_virtual_time

SENIORS, ME = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(3)], PeerID(bytes([18, 32, *[9] * 32]))


async def never(*_, **__) -> None:
    """Wait for ever, as a call to a frozen process does: the call is taken and nothing is said."""
    await asyncio.Event().wait()


def test_silent_seniors_are_given_up_together(monkeypatch):
    async def meet() -> None:
        network = SimpleNamespace(peer_id=ME, call_protobuf_handler=never, iterate_protobuf_handler=never)
        detector, loop = FailureDetector(network, "run"), asyncio.get_running_loop()
        detector.exchange_took(0.1, [])
        peer = Matchmaking(network, "run", b"", BatchTarget(64), detector, Backoff())
        members = [Member(senior, float(place), False) for place, senior in enumerate([*SENIORS, ME])]
        ticket, began = Ticket(4, 64, False, 1.0, bytes(LINEAGE_BYTES)), loop.time()
        group = await peer.meet(ticket, members, patience_seconds=30.0, deadline=began + 100)
        silence_seconds = DEFAULT_TIMEOUTS.silence_seconds
        assert group.peer_ids == (ME,)
        assert silence_seconds <= loop.time() - began < 1.5 * silence_seconds

    run_in_virtual_time(meet, monkeypatch, seconds=200)
