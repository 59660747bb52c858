"""Senders are led to the all-reduce of their group."""

import asyncio
from types import SimpleNamespace

from swarm.averaging.running_groups import RunningGroups
from tests.helpers.attacks.sealed_rounds import peer


async def nothing():
    """The stream of a sender that hangs up before it sends anything."""
    for message in ():
        yield message


def test_a_sender_that_sends_nothing_gets_no_answer_and_raises_no_error():
    async def test():
        groups = RunningGroups()
        answers = [answer async for answer in groups.rpc_aggregate_part(nothing(), SimpleNamespace(remote_id=peer(0)))]
        assert answers == []
        await asyncio.wait_for(groups.until_all_read(), 5)

    asyncio.run(test())
