"""Messages to the averager process arrive whole, however many peers they name."""

import hashlib
import multiprocessing
import os
import threading
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hivemind.p2p import PeerID

from swarm.protocol.messages import MAX_GROUP_SIZE, Member, first_members
from swarm.runtime.pipes import WholePipe
from tests.helpers.averaging_rounds import (
    averager_for,
    contribution,
    meet_everyone,
    run_one_round,
    run_round,
    say_goodbye,
)
from tests.helpers.swarm_peers import running_dht

pytestmark = pytest.mark.timeout(120)
STRANGERS = 2046


def peer(number: int) -> PeerID:
    return PeerID(b"\x12\x20" + hashlib.sha256(b"%d" % number).digest())


@pytest.mark.parametrize("duplex", [True, False])
def test_what_is_larger_than_the_pipe_arrives_in_order_from_any_thread(duplex):
    inner, outer = map(WholePipe, multiprocessing.Pipe(duplex=duplex))
    os.set_blocking(inner.fileno(), False)  # as uvloop does
    said = [(number, bytes([number]) * 1_000_000) for number in range(8)]
    threads = [threading.Thread(target=outer.send, args=(message,), daemon=True) for message in said]
    for thread in threads:
        thread.start()
    heard = []
    for _ in said:
        assert inner.poll(20)
        heard.append(inner.recv())
    for thread in threads:
        thread.join(20)
    assert sorted(heard) == said
    assert not inner.poll()
    inner.close()
    outer.close()


class Slow:
    """A message whose writing blocks until it may go on."""

    def __init__(self):
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def __reduce__(self):
        self.has_begun.set()
        self.may_go_on.wait(60)
        return str, ("slow",)


def test_a_process_that_was_forked_while_a_thread_wrote_can_write():
    inner, outer = map(WholePipe, multiprocessing.Pipe())
    slow = Slow()
    writing = threading.Thread(target=outer.send, args=(slow,), daemon=True)
    writing.start()
    assert slow.has_begun.wait(20)
    child = multiprocessing.get_context("fork").Process(target=outer.send, args=("from the child",))
    child.start()
    try:
        assert inner.poll(20)
        assert inner.recv() == "from the child"
        slow.may_go_on.set()
        assert inner.poll(20)
        assert inner.recv() == "slow"
        child.join(20)
        assert child.exitcode == 0
    finally:
        slow.may_go_on.set()
        child.kill()
        writing.join(20)


def test_of_too_many_members_the_proven_ones_are_taken_first():
    me = Member(peer(0), 9.0, False)
    strangers = [Member(peer(number), float(-number), False) for number in range(1, 2048)]
    proven = [Member(peer(number), 5.0, False, proven=True) for number in range(3000, 3010)]
    chosen = first_members([*strangers, me, *proven], me.peer_id)
    assert len(chosen) == MAX_GROUP_SIZE
    assert chosen[0] == me
    assert chosen[1:11] == sorted(proven, key=lambda member: member.seniority)
    assert chosen[11] == strangers[-1], "the senior of the others"
    assert first_members([me], me.peer_id) == [me]


def one_round_among_many(name, initial_peers, line, vector, samples):
    """Run a peer that is told of 2,046 other peers besides the present ones."""
    with running_dht(initial_peers, line) as dht:
        averager = averager_for(vector, dht, "none")
        there = [replace(member, proven=True) for member in meet_everyone(line, dht)]
        others = [Member(peer(number), -1.0, False, awaited=False) for number in range(STRANGERS)]
        # Lists that no code shortens arrive, too: at 34 bytes each, these are more than the buffer of a socket.
        with patch("swarm.averaging.averager.MAX_GROUP_SIZE", 20_000):
            averager.expect([*map(peer, range(20_000))])
        averager.expect([member.peer_id for member in there])
        report = run_round(averager, [*others, *there], vector, samples, 7)
        assert averager.is_alive()
        say_goodbye(line, averager)
        return averager.vector.clone(), report


def test_two_peers_meet_among_two_thousand_records():
    given = {name: contribution(name, 1000, 0) for name in ("a", "b")}
    results = run_one_round(given, one_round_among_many)
    samples = sum(weight for _, weight in given.values())
    mean = sum(vector.double() * weight for vector, weight in given.values()) / samples
    for vector, report in results.values():
        assert len(report.group.peer_ids) == 2
        torch.testing.assert_close(vector.double(), mean, rtol=1e-4, atol=1e-6)
