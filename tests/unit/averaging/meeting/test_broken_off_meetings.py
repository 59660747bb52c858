"""A leader that lets a peer in, keeps it waiting, and then gives it no group is blamed the second time in a row."""

import asyncio
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.proto.averaging_pb2 import MessageFromLeader

from swarm.averaging.meeting.matchmaking import Matchmaking
from swarm.averaging.meeting.matchmaking_messages import group_reply, orders_reply, redirect, refusal, step_reply
from swarm.membership.backoff import Backoff
from swarm.membership.failure_detector import FailureDetector
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.messages import Behind, Group, Member, Ticket
from swarm.protocol.wire import LINEAGE_BYTES
from tests.helpers.virtual_time import run_in_virtual_time

SENIOR, ME = (PeerID(bytes([18, 32, *[number] * 32])) for number in (1, 2))
TICKET, NONCE = Ticket(4, 64, False, 1.0, bytes(LINEAGE_BYTES)), bytes(LINEAGE_BYTES)
PATIENCE_SECONDS, LATE_SECONDS = 5.0, 12.0
"""A leader that is in time has closed its group after these 5 s, and 4 s more for a joiner."""
GROUP = group_reply(Group(NONCE, (SENIOR, ME), (TICKET, TICKET)), NONCE, [TICKET.to_bytes()] * 2)
CANCELLED = refusal(averaging_pb2.CANCELLED)
MALFORMED = MessageFromLeader(code=averaging_pb2.BEGIN_ALLREDUCE)
CLOSES = None


class Junior:
    """A peer whose only senior lets it in each time, and then says what the test says.

    Args:
        answers: after how many seconds the senior says what; the last one counts for all further times
    """

    def __init__(self, *answers: tuple[float, MessageFromLeader | None]):
        self._answers = list(answers)
        network = SimpleNamespace(
            peer_id=ME, call_protobuf_handler=self._is_there, iterate_protobuf_handler=self._let_in
        )
        detector = FailureDetector(network, "run")
        detector.exchange_took(0.1, [])
        self._meeting = Matchmaking(network, "run", b"", BatchTarget(64), detector, Backoff())
        self._meeting.met([SENIOR])

    async def _is_there(self, *_) -> averaging_pb2.DownloadData:
        return averaging_pb2.DownloadData()

    async def _let_in(self, *_):
        seconds, last = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

        async def says():
            yield refusal(averaging_pb2.ACCEPTED)
            await asyncio.sleep(seconds)
            if last is not CLOSES:
                yield last

        return says()

    async def meet(self) -> tuple[PeerID, ...]:
        """The members of its group."""
        members = [Member(SENIOR, 0.0, False), Member(ME, 1.0, False)]
        deadline = asyncio.get_running_loop().time() + 100
        return (await self._meeting.meet(TICKET, members, PATIENCE_SECONDS, deadline)).peer_ids

    @property
    def stuck(self) -> set[PeerID]:
        """Leaders that are to blame for the last meeting."""
        return self._meeting.knocker.stuck


@pytest.mark.parametrize(
    ("seconds", "last"),
    [
        (LATE_SECONDS, CANCELLED),
        (LATE_SECONDS, CLOSES),
        (LATE_SECONDS, step_reply(4)),
        (LATE_SECONDS, redirect(ME)),
        (LATE_SECONDS, orders_reply(b"x")),
        (0.0, MALFORMED),
    ],
    ids=[
        "a refusal",
        "a stream that is closed",
        "its own step",
        "this peer as leader",
        "false orders",
        "a malformed group",
    ],
)
def test_a_leader_that_breaks_off_twice_in_a_row_is_blamed(seconds, last, monkeypatch):
    async def test() -> None:
        junior = Junior((seconds, last))
        assert await junior.meet() == (ME,)
        assert junior.stuck == {SENIOR}

    run_in_virtual_time(test, monkeypatch, seconds=200)


def test_a_leader_that_breaks_off_once_in_a_while_is_not_blamed(monkeypatch):
    """As when its process dies. This peer leads then, and asks it again."""

    async def test() -> None:
        junior = Junior(*[(LATE_SECONDS, CLOSES), (0.0, GROUP)] * 3)
        for _ in range(3):
            assert await junior.meet() == (SENIOR, ME)
            assert not junior.stuck

    run_in_virtual_time(test, monkeypatch, seconds=200)


def test_a_leader_that_refuses_soon_is_not_blamed(monkeypatch):
    async def test() -> None:
        junior = Junior((1.0, CANCELLED))
        for _ in range(2):
            assert await junior.meet() == (ME,)
            assert not junior.stuck

    run_in_virtual_time(test, monkeypatch, seconds=200)


def test_a_leader_that_has_gone_on_is_not_blamed(monkeypatch):
    async def test() -> None:
        junior = Junior((LATE_SECONDS, step_reply(5)))
        for _ in range(3):
            with pytest.raises(Behind):
                await junior.meet()
            assert not junior.stuck

    run_in_virtual_time(test, monkeypatch, seconds=200)
