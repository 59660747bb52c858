"""Members check reducers' averages, by lot and in the background, and prove to each other that one is false.

After a round each member draws, for each reducer, whether it asks for all that one part of the average was made of. It
draws for itself: the leader gives a round its name, so it could choose the outcome of a common lot. Before the next
round all members compare what reducers have signed, by a hash in their tickets. A member that can prove a lie says so
in its tickets. The others fetch the proof, check it themselves, and leave the guilty member out for good. A member that
is accused falsely is not left out, and its accuser is not listened to for a while. A member that was in the spoilt
round wants to go back to the last state before it, and says so in its tickets, too (`Group.back_to`).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Literal

import msgspec
from hivemind.p2p import PeerID
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey
from msgspec import Meta

from swarm.averaging.audit.given_work import GivenWork, PartWithPlaces, PlacesOf
from swarm.averaging.audit.judge import MAX_EVIDENCE_BYTES, Evidence, Judge, OtherOrders, can_be_judged
from swarm.averaging.audit.proofs import (
    MAX_PROOF_BYTES,
    Guilt,
    guilty,
    of_a_false_average,
    of_other_work,
    of_two_receipts,
    short_name,
)
from swarm.averaging.audit.seals import Seals, SignedPart
from swarm.averaging.audit.statements import MAX_PARTS, MAX_RECEIPT_BYTES, Receipt
from swarm.averaging.audit.work_audits import FALSE_ACCUSER_SECONDS, MAX_FALSE_ACCUSER_SECONDS, Ask, WorkAudits
from swarm.averaging.shares import MAX_STRIPES
from swarm.membership.backoff import Backoff, BlameBackoff
from swarm.protocol.messages import MAX_GROUP_SIZE, NOWHERE, TICKET_NONCE_BYTES, Blame, Group, Ticket
from swarm.protocol.wire import LINEAGE_BYTES, MAX_SAMPLES, Name, from_wire, to_wire
from swarm.runtime.async_utils import in_thread
from swarm.runtime.token_bucket import TokenBuckets

logger = get_logger(__name__)

AUDIT_SHARE = 1 / 8
"""Share of the updates in which each reducer is asked, by one of the others, for one part of its average."""
FEWEST = 3
"""Members that have to give samples. Of two, a reducer could claim to have given itself what explains the average."""
KEPT_ROUNDS = 2
"""Rounds of which a reducer keeps the parts. A member that checks a round asks before the next round but one."""
MAX_KEPT_BYTES = 2**29
"""Most bytes of one round that a reducer keeps. Where few reduce for many, it would be far more: then no member asks,
and all know it."""
KEPT_PROOFS = 8
"""Guilty members of which a peer keeps a proof."""
UNMET_AT_ONCE = 2.0
"""Proofs by one member against peers that this one has never met, which may be inventions of that member."""
UNMET_PER_SECOND = 1 / 600
"""Further such proofs by one member, in a second."""
KNOWN_AT_ONCE = 2.0
"""Times that one member is asked again for its proof against a guilty member, against which this peer has one."""
KNOWN_PER_SECOND = 1 / 600
"""Further such times, in a second."""
ASKED_AT_ONCE = 6.0
"""Audits of one reducer by one member that may follow each other at once; a reducer answers twice as many."""
ASKED_PER_SECOND = 0.5
"""Audits of one reducer by one member in a second, after these; a reducer answers twice as many."""
MAX_COMPARED = 3
"""Members with other receipts that are asked for them in one round."""
MAX_TASKS = 16
"""Checks at a time, in the background; what comes on top of that is not checked."""
MAX_PROOFS_AT_ONCE = MAX_TASKS // 2
"""Proofs of that, one from each accuser: liars that send theirs slowly leave room for audits."""
UNANSWERED = 3
"""Audits in a row without an answer, after which a reducer is left out for a while."""
LONGER_RECEIPTS = 2
"""How many times as long as this peer's own all receipts of a round may be, as another member shows them. They are as
many and about as long: numbers of parts take 1 to 5 bytes, beside a hash of 32."""
KEPT_MET = 4 * MAX_GROUP_SIZE
"""Peers that this one remembers to have met."""
KEPT_STEPS = 256
"""Stripes of which this peer remembers the step."""
HEAR_SECONDS = 5.0
"""Seconds for which a member of a group that wants to go back waits for a proof that it has not seen yet."""
MAX_REQUEST_BYTES = 64
ANSWER_SECONDS = 4.0
"""Seconds for which a reducer waits for a list that it compares with what it was given; nothing else waits
meanwhile."""

_REQUEST = msgspec.msgpack.Decoder(
    tuple[Literal["receipts", "part", "proof", "work"], Name, Annotated[int, Meta(ge=0, lt=MAX_PARTS)]]
)
_RECEIPTS = msgspec.msgpack.Decoder(
    Annotated[list[Annotated[bytes, Meta(max_length=MAX_RECEIPT_BYTES)]], Meta(max_length=MAX_STRIPES * MAX_GROUP_SIZE)]
)


@dataclass
class SealedRound:
    """What this peer has signed and seen signed in one round.

    Args:
        group: as it was closed
        seals: one for each stripe
    """

    group: Group
    seals: list[Seals] = field(default_factory=list)

    @property
    def receipts(self) -> list[Receipt]:
        """All receipts that have come, in the same order on all members."""
        found = [seals.receipts.get(peer) for seals in self.seals for peer in self.group.peer_ids]
        return [receipt for receipt in found if receipt is not None]

    @property
    def signed(self) -> bytes:
        """The receipts, as another member gets them."""
        return msgspec.msgpack.encode([receipt.data for receipt in self.receipts])


class Audits:
    """Checks other members' averages for one peer, and answers members that check it; lives in its averaging process.

    Args:
        me: this peer
        key: this peer's private key
        judge: makes averages again
        ask: fetches from another peer
        shunned: peers that are not met; a member that is proven guilty joins them
        share: share of the updates in which a reducer is audited
        largest: as of `WorkAudits`
        places_of: tells which numbers lists of work are about
    """

    def __init__(
        self,
        me: PeerID,
        key: RSAPrivateKey,
        judge: Judge,
        ask: Ask,
        shunned: BlameBackoff,
        share: float | None = None,
        largest: int = MAX_SAMPLES,
        places_of: PlacesOf = lambda lineage: (),
    ):
        self._me, self._key, self._judge, self._ask, self._shunned = me, key, judge, ask, shunned
        self._share = AUDIT_SHARE if share is None else share
        self.work = WorkAudits(me, ask, largest)
        """Checks what members have computed."""
        self._given_work = GivenWork(judge, places_of)
        self._lot = random.SystemRandom()
        self._rounds: deque[SealedRound] = deque(maxlen=KEPT_ROUNDS)
        self._present: SealedRound | None = None
        self._complete: SealedRound | None = None
        """The last round, if it has given this peer an average."""
        self._proofs: dict[PeerID, bytes] = {}
        """A proof against each guilty member."""
        self._undone: set[PeerID] = set()
        """Those of the guilty members that the swarm goes back for."""
        self._found: dict[PeerID, Blame] = {}
        self._steps: OrderedDict[bytes, int] = OrderedDict()
        """Steps of this peer's own rounds, by stripe. A liar can make up another one, to prove itself guilty of it."""
        self._spoilt: dict[PeerID, int] = {}
        """The step of the update that each liar is known to have spoilt."""
        self._met: OrderedDict[PeerID, None] = OrderedDict()
        """Peers that were in a group with this one, the latest last."""
        self._not_heard = Backoff(max_seconds=MAX_FALSE_ACCUSER_SECONDS)
        """Members that have accused others and proven nothing: they are not listened to for a while."""
        self._unmet = TokenBuckets(UNMET_AT_ONCE, UNMET_PER_SECOND)
        self._known = TokenBuckets(KNOWN_AT_ONCE, KNOWN_PER_SECOND)
        self._unanswered: Counter[PeerID] = Counter()
        self._asked = TokenBuckets(ASKED_AT_ONCE, ASKED_PER_SECOND)
        self._answered = TokenBuckets(2 * ASKED_AT_ONCE, 2 * ASKED_PER_SECOND)
        self._tasks: dict[tuple, asyncio.Task] = {}

    # ---- around a round ---------------------------------------------------------------------------------------------

    def found(self) -> dict[PeerID, Blame]:
        """Members that have been found out since this was asked last, and what they have done."""
        found, self._found = self._found, {}
        return self.work.found() | found

    def annotate(self, ticket: Ticket, sound: Sequence[int] = ()) -> Ticket:
        """The ticket, with what this peer has to say about the rounds before, and a nonce that no earlier ticket had.

        Args:
            sound: steps of the states to which it can go back
        """
        ticket = replace(self.work.with_doubt(ticket), nonce=os.urandom(TICKET_NONCE_BYTES))
        complete, accused = self._complete, [*self._proofs]
        if complete is not None and complete.group.group_id == ticket.lineage:
            ticket = replace(ticket, receipts=_hash_of_receipts(complete.signed))
        ticket = replace(ticket, back_to=self._back_to(ticket.back_to, sound))
        return replace(ticket, accuses=short_name(accused[ticket.step % len(accused)])) if accused else ticket

    def _back_to(self, wanted: int, sound: Sequence[int]) -> int:
        """The earliest state to which this peer has a reason to go back; `NOWHERE` if it has none.

        Args:
            wanted: step to which it wants to go back for another reason, or `NOWHERE`
            sound: as of `annotate`
        """
        reasons = [] if wanted == NOWHERE else [wanted]
        for spoilt in self._spoilt.values():
            before = [step for step in sound if step <= spoilt]
            if before:
                reasons.append(max(before))
        return min(reasons, default=NOWHERE)

    async def liars_since(self, step: int, group: Group) -> frozenset[PeerID]:
        """Members with false averages that a group undoes by going back to this step, as its members show.

        For false averages in rounds that this peer was not in, it believes members that name the liar and want to go
        back to this step.
        """
        self._hear_all(group)
        if heard := [task for what, task in self._tasks.items() if what[0] == "proof"]:
            await asyncio.wait(heard, timeout=HEAR_SECONDS)
        named = {ticket.accuses for ticket in group.tickets if ticket.back_to == step}
        elsewhere = {peer for peer in self._undone - self._spoilt.keys() if short_name(peer) in named}
        return frozenset(elsewhere | {peer for peer, spoilt in self._spoilt.items() if spoilt >= step})

    def begin(self, group: Group) -> None:
        """Take in a closed group: its tickets tell what was signed in the round before, and which members are accused.

        Args:
            group: as it was closed
        """
        self._present = SealedRound(group)
        for peer in group.peer_ids:
            self._met[peer] = None
            self._met.move_to_end(peer)
        while len(self._met) > KEPT_MET:
            self._met.popitem(last=False)
        self.work.begin(group)
        others = [(peer, ticket) for peer, ticket in group.members if peer != self._me]
        own = group.ticket_of(self._me)
        self._hear_all(group)
        if not own.receipts:
            return
        differ = [peer for peer, ticket in others if ticket.receipts and ticket.receipts != own.receipts]
        asked = [peer for peer in differ if peer not in self._not_heard]
        # By lot: the order of a group follows from peer ids, and a liar can choose its own.
        for peer in self._lot.sample(asked, min(MAX_COMPARED, len(asked))):
            name = group.ticket_of(peer).receipts
            self._go_and(("receipts", peer), self._compare(peer, self._complete, name))

    def _hear_all(self, group: Group) -> None:
        """Ask for the proofs that these members say they have, and this peer has not.

        A member that wants to go back further may have a proof of an earlier lie of the same liar, or of one that
        spoilt a round. It may also have another reason, such as a loss that has risen. So it is asked again for a proof
        against the same liar only a few times, and is heard all the same when it accuses another one.
        """
        convicted = {*map(short_name, self._proofs)}
        own = group.ticket_of(self._me).back_to
        for peer, ticket in group.members:
            goes_further = ticket.back_to != NOWHERE and (own == NOWHERE or ticket.back_to < own)
            is_new = ticket.accuses and (goes_further or ticket.accuses not in convicted)
            if is_new and peer != self._me and peer not in self._not_heard:
                self._hear_one(peer, ticket.accuses)

    def _hear_one(self, accuser: PeerID, name: bytes) -> None:
        """Ask for a proof, unless one of this accuser or against this member is on its way, or too many are."""
        coming = [what[1:] for what in self._tasks if what[0] == "proof"]
        is_asked = any(peer == accuser or accused == name for peer, accused in coming)
        if not is_asked and len(coming) < MAX_PROOFS_AT_ONCE:
            self._go_and(("proof", accuser, name), self._hear(accuser, name))

    def seals_of(self, stripe: Group) -> Seals:
        """What this peer signs and checks in this stripe of the present round."""
        seals = Seals(self._me, stripe, self._key, self._is_checked(self._present.group))
        self._present.seals.append(seals)
        return seals

    def _is_checked(self, group: Group) -> bool:
        """Whether reducers of this group keep what averages are made of, and are asked; all its members agree on it."""
        has_enough = sum(ticket.samples > 0 for ticket in group.tickets) >= FEWEST
        judge = self._judge.of(group)
        return has_enough and can_be_judged(judge.codec) and judge.bytes_given(group) <= MAX_KEPT_BYTES

    def end(self, has_average: bool) -> None:
        """End the present round, and draw what to check of it; this peer still shows what it has averaged itself."""
        ended, self._present = self._present, None
        self._rounds.append(ended)
        for seals in ended.seals:
            self._steps[seals.stripe] = ended.group.step
        while len(self._steps) > KEPT_STEPS:
            self._steps.popitem(last=False)
        self._complete = ended if has_average else None
        if not has_average or not self._is_checked(ended.group):
            return
        chance = self._share / (len(ended.group.peer_ids) - 1)
        for peer, ticket in ended.group.members:
            if peer != self._me and not ticket.client_mode and self._lot.random() < chance:
                self._audit(peer, ended)
        if (member := self.work.draw_to_compare(ended.group)) is not None and member not in self._shunned:
            self._go_and(("given", member), self._compare_with_list(member, ended))

    def _audit(self, reducer: PeerID, ended: SealedRound) -> None:
        stripe = self._lot.randrange(len(ended.seals))
        seals = ended.seals[stripe]
        if reducer in seals.receipts and reducer not in self._shunned and self._asked.take(reducer):
            part_index = self._lot.randrange(seals.num_averages(reducer))
            self._go_and(("part", reducer), self._check(reducer, ended.group, stripe, part_index, seals))

    def _go_and(self, what: tuple, work: Coroutine) -> None:
        """Do work in the background, unless the same is being done already, or too much is."""
        if what in self._tasks or len(self._tasks) >= MAX_TASKS:
            return work.close()
        self._tasks[what] = task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._tasks.pop(what, None))

    async def until_done(self) -> None:
        """Wait until nothing is being checked any more."""
        while self._tasks:
            await asyncio.wait([*self._tasks.values()])

    # ---- checking others --------------------------------------------------------------------------------------------

    async def _check(self, reducer: PeerID, group: Group, stripe: int, part_index: int, seals: Seals) -> None:
        receipt = seals.receipts[reducer]
        if await in_thread(self._judge.evidence_bytes, group, reducer, stripe) > MAX_EVIDENCE_BYTES:
            return
        try:
            data = await self._ask(reducer, to_wire("part", seals.stripe, part_index), MAX_EVIDENCE_BYTES)
        except OSError as error:
            logger.debug(f"{reducer} does not show a part of its average: {error!r}")
            self._unanswered[reducer] += 1
            if self._unanswered[reducer] >= UNANSWERED:
                self._suspect(reducer)
            return
        del self._unanswered[reducer]
        try:
            is_false = await in_thread(self._is_false, group, stripe, part_index, receipt, data)
        except OtherOrders as error:
            return logger.debug(f"the average of {reducer} is not judged: {error}")
        except ValueError as error:
            logger.debug(f"{reducer} does not show what it has averaged: {error}")
            return self._suspect(reducer)
        if is_false:
            proof = of_a_false_average(group, stripe, part_index, receipt, data)
            self._convict(Guilt(reducer, Blame.MADE_UP_AN_AVERAGE, receipt.stripe), proof)

    def _is_false(self, group: Group, stripe: int, part_index: int, receipt: Receipt, data: bytes) -> bool:
        evidence = Evidence.from_bytes(data)
        if self._judge.is_false(group, stripe, part_index, receipt, evidence):
            return True
        self._judge.check_commitments(group, receipt, evidence)
        return False

    async def _compare_with_list(self, member: PeerID, ended: SealedRound) -> None:
        """Check whether a member has given this reducer what it says that it has computed."""
        if not (signed := await in_thread(self._signed_by, member, ended)):
            return
        shown = await self.work.fetch_list(member, ended.group, ANSWER_SECONDS)
        if shown is None:
            return
        _, listed = shown
        try:
            lie = await in_thread(self._first_difference, ended.group, signed, listed)
        except ValueError as error:
            return logger.debug(f"what {member} gave is not compared with its list: {error}")
        if lie is not None:
            part, given = lie
            proof = of_other_work(ended.group, part.stripe, part.part_index, self._me, given, listed)
            self._convict(Guilt(member, Blame.GAVE_OTHER_WORK, ended.seals[part.stripe].stripe), proof)

    def _signed_by(self, member: PeerID, ended: SealedRound) -> list[tuple[PartWithPlaces, SignedPart]]:
        """The signed parts that a member has given to this reducer, and that contain places of its list."""
        parts = self._given_work.parts(ended.group, self._me, member)
        signed = [(part, ended.seals[part.stripe].signed_part(member, part.part_index)) for part in parts]
        return [(part, given) for part, given in signed if given is not None]

    def _first_difference(
        self, group: Group, signed: list[tuple[PartWithPlaces, SignedPart]], listed: bytes
    ) -> tuple[PartWithPlaces, SignedPart] | None:
        """The first part that is not what the list says; None if there is none."""
        for part, given in signed:
            if self._given_work.differs(group, part, given, listed):
                return part, given
        return None

    def _suspect(self, reducer: PeerID) -> None:
        """Leave a reducer out for a while. What it did cannot be proven to others, so this peer alone does so."""
        del self._unanswered[reducer]
        self._found.setdefault(reducer, Blame.HIDES_ITS_INPUTS)

    def _convict(self, guilt: Guilt, proof: bytes) -> None:
        """Take in a proven lie, if it is new to this peer."""
        peer, step = guilt.peer, self._steps.get(guilt.stripe) if guilt.what.is_undone else None
        is_earlier = step is not None and step < self._spoilt.get(peer, math.inf)
        if peer == self._me or (peer in self._proofs and not is_earlier):
            return
        if peer not in self._proofs:
            self._found[peer] = guilt.what
            self._shunned.blame(peer, guilt.what)
        self._proofs[peer] = proof
        if guilt.what.is_undone:
            self._undone.add(peer)
        if is_earlier:
            self._spoilt[peer] = step
        if len(self._proofs) > KEPT_PROOFS:  # the blame stays, and newcomers meet no peer that all leave out
            # What the swarm may have to go back for is kept longest: proofs against invented peers cost nothing.
            dropped = next((other for other in self._proofs if other not in self._spoilt), next(iter(self._proofs)))
            self._proofs.pop(dropped)
            self._spoilt.pop(dropped, None)
            self._undone.discard(dropped)

    async def _compare(self, peer: PeerID, own: SealedRound, name: bytes) -> None:
        """Compare receipts with a member that has other ones: some reducer has told members different things."""
        try:
            request, most = to_wire("receipts", own.group.group_id, 0), LONGER_RECEIPTS * len(own.signed)
            data = await self._ask(peer, request, most)
            if _hash_of_receipts(data) != name:
                raise ValueError("other receipts than those of its ticket")
            theirs = await in_thread(_read_receipts, data, most)
            # A member that has the average of a round has a receipt of each of its shares.
            if [(one.stripe, one.reducer) for one in theirs] != [(one.stripe, one.reducer) for one in own.receipts]:
                raise ValueError("receipts of other shares than those of the round")
        except (OSError, ValueError) as error:
            logger.debug(f"{peer} does not show its receipts: {error!r}")
            return self._not_heard.add(peer)
        # Where none contradicts another one, a reducer may have signed the same twice: the member need not be a liar.
        for ours, receipt in zip(own.receipts, theirs, strict=True):
            if ours.contradicts(receipt):
                guilt = Guilt(receipt.reducer, Blame.EQUIVOCATED, receipt.stripe)
                self._convict(guilt, of_two_receipts(ours, receipt))

    async def _hear(self, accuser: PeerID, name: bytes) -> None:
        """Fetch and check the proof of a lie that another member says it has."""
        if name in map(short_name, self._proofs):
            if not self._known.take((accuser, name)):
                return
        elif name not in map(short_name, self._met) and not self._unmet.take(accuser):
            return
        try:
            proof = await self._ask(accuser, to_wire("proof", name, 0), MAX_PROOF_BYTES)
            guilt = await in_thread(guilty, proof, self._judge, self._given_work)
            if short_name(guilt.peer) != name:
                raise ValueError("a proof against another peer")
        except Exception as error:  # anything can be wrong with another member's proof
            logger.debug(f"{accuser} accuses a member and proves nothing: {error!r}")
            return self._not_heard.add(accuser, FALSE_ACCUSER_SECONDS)
        self._convict(guilt, proof)

    # ---- answering others -------------------------------------------------------------------------------------------

    async def answer(self, caller: PeerID, data: bytes) -> bytes:
        """What this peer shows a member of one of its last groups.

        Raises:
            ValueError: it shows nothing for this request
        """
        kind, name, part_index = from_wire(_REQUEST, data, MAX_REQUEST_BYTES)
        rounds = [*self._rounds, *([self._present] if self._present is not None else [])]
        if not any(caller in sealed.group.peer_ids for sealed in rounds):
            raise ValueError("it was in no group with this peer")
        if kind == "work":
            return self.work.answer(caller, name)
        if not self._answered.take(caller):
            raise ValueError("it asks too often")
        if kind == "proof":
            proof = next((proof for peer, proof in self._proofs.items() if short_name(peer) == name), None)
            if proof is None:
                raise ValueError("there is no such proof")
            return proof
        if kind == "receipts":
            for sealed in self._rounds:
                if sealed.group.group_id == name:
                    return sealed.signed
            raise ValueError("that round is not known")
        for seals in chain.from_iterable(sealed.seals for sealed in rounds):
            if seals.stripe == name:
                return await in_thread(seals.show, part_index)
        raise ValueError("that round is not known")


def _hash_of_receipts(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:LINEAGE_BYTES]


def _read_receipts(data: bytes, most_bytes: int) -> list[Receipt]:
    return [Receipt.from_bytes(receipt) for receipt in from_wire(_RECEIPTS, data, most_bytes)]
