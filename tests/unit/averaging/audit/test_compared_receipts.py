"""A member asks those for their receipts that have other ones, and those that lie about them only once."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
from hivemind.p2p import PeerID

from swarm.averaging.audit.audits import MAX_COMPARED, Audits
from swarm.averaging.audit.statements import Counted, Receipt, root_of
from swarm.averaging.shares import stripe_of
from swarm.membership.backoff import BlameBackoff
from swarm.protocol.messages import MAX_GROUP_SIZE, Blame, Group
from swarm.protocol.wire import LINEAGE_BYTES
from tests.helpers.attacks.sealed_rounds import group_of, judge_of, key, peer

ME, REDUCER, OTHER = map(peer, range(3))


def compare(
    members: Sequence[PeerID],
    num_stripes: int,
    theirs_of: Callable[[list[Receipt]], list[Receipt]],
    times: int = 1,
    accomplices: Sequence[PeerID] = (),
) -> tuple[list[int], dict[PeerID, Blame]]:
    """One member has the receipts of a round, and OTHER says so many times that it has other ones.

    Args:
        theirs_of: what OTHER shows, of what this member has
        accomplices: members that say they have other receipts, and show none

    Returns:
        how many bytes each answer may have, and the members that were found out
    """
    asked: list[int] = []

    async def scenario() -> dict[PeerID, Blame]:
        ticket = group_of(range(3)).tickets[0]
        group = Group.close(bytes(16), tuple(members), (ticket,) * len(members))
        audits = Audits(ME, key(0), judge_of(), lambda *request: ask(*request), BlameBackoff(), share=0.0)
        audits.begin(group)
        own = []
        for number in range(num_stripes):
            seals = audits.seals_of(stripe_of(group, 0, number))
            own.append(Receipt.sign(key(1), seals.stripe, root_of([]), [Counted()] * len(members)))
            seals.receipts[REDUCER] = own[-1]
        audits.end(has_average=True)
        shown = msgspec.msgpack.encode([receipt.data for receipt in theirs_of(own)])

        async def ask(other: PeerID, request: bytes, most: int) -> bytes:
            asked.append(most)
            if other in accomplices:
                raise OSError("it shows nothing")
            if len(shown) > most:
                raise OSError("it shows too much")
            return shown

        mine = audits.annotate(replace(ticket, lineage=group.group_id))
        others = replace(mine, receipts=hashlib.sha256(shown).digest()[:LINEAGE_BYTES])
        brought = dict.fromkeys(accomplices, replace(mine, receipts=b"x" * LINEAGE_BYTES)) | {OTHER: others}
        tickets = tuple(brought.get(member, mine) for member in members)
        for number in range(times):
            audits.begin(Group.close(bytes([number] * 16), tuple(members), tickets))
            await audits.until_done()
        return audits.found()

    return asked, asyncio.run(scenario())


def contradicting(receipts: list[Receipt]) -> list[Receipt]:
    """The same, but the reducer has given the last average to OTHER as another one."""
    *others, last = receipts
    return [*others, Receipt.sign(key(1), last.stripe, root_of([bytes(32)]), last.counted)]


def made_up(receipts: list[Receipt]) -> list[Receipt]:
    """A receipt that OTHER has signed itself, of no share of the round."""
    return [Receipt.sign(key(2), bytes(16), root_of([]), receipts[0].counted)]


def signed_again(receipts: list[Receipt]) -> list[Receipt]:
    """What a lying reducer gives to one member, so that it looks like a liar."""
    return [Receipt.sign(key(1), one.stripe, one.averages, one.counted) for one in receipts]


def test_receipts_that_contradict_nothing_are_asked_for_once():
    asked, found = compare((ME, REDUCER, OTHER), 2, made_up, times=20)
    assert (len(asked), found) == (1, {})


def test_a_member_to_which_a_reducer_has_signed_twice_is_asked_again():
    """The next time the reducer may have told it something else."""
    asked, found = compare((ME, REDUCER, OTHER), 2, signed_again, times=5)
    assert (len(asked), found) == (5, {})


def test_a_reducer_that_contradicts_itself_is_found_out():
    assert compare((ME, REDUCER, OTHER), 2, contradicting)[1] == {REDUCER: Blame.EQUIVOCATED}


def test_accomplices_with_other_receipts_take_no_place_for_long():
    """As many as are asked in a round, first in the order of the group, kept all others from being asked."""
    accomplices = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(MAX_COMPARED)]
    members = (*accomplices, ME, REDUCER, OTHER)
    _, found = compare(members, 2, contradicting, times=2, accomplices=accomplices)
    assert found == {REDUCER: Blame.EQUIVOCATED}


def test_the_receipts_of_a_large_group_are_compared():
    """With 450 reducers they take more than 8 MiB; the member that was asked was not listened to for a while."""
    strangers = [PeerID(bytes([18, 32]) + number.to_bytes(32, "big")) for number in range(MAX_GROUP_SIZE - 3)]
    assert compare((ME, REDUCER, OTHER, *strangers), 240, contradicting)[1] == {REDUCER: Blame.EQUIVOCATED}
