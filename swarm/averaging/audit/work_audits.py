"""Members compute again what other members say that they have computed: by lot, a micro-batch at a time.

After a round each member draws for itself, privately, whether it checks one of the others, and which of its
micro-batches. The averaging process draws, asks for the list, and acts on what comes out; the trainer computes. What is
found cannot be proven to others: only a member that computes it again can tell. So no accuser is believed. A member
that has found something says so in its tickets, and the others look for themselves.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from swarm.averaging.audit.proofs import short_name
from swarm.membership.backoff import Backoff
from swarm.protocol.messages import MAX_GROUP_SIZE, Blame, Group, Ticket
from swarm.protocol.wire import MAX_SAMPLES, to_wire
from swarm.protocol.work import MAX_LIST_BYTES, Assignment, OwnWork, WorkList, WorkVerdict
from swarm.runtime.async_utils import in_thread

logger = get_logger(__name__)

FEWEST = 3
"""Members that have to give samples: of two, each could only claim something against the other."""
LARGEST = 4
"""How many times its own largest micro-batch a peer computes at once; a larger one it computes in slices only."""
DIFFERENCES = 2
"""Differences after which a member is left out. A single one can come of a flipped bit."""
SUSPECT_AUDITS = 8
"""Updates in a row in which a member is checked after its work has differed once."""
HINTED_AUDITS = 6
"""Updates in a row in which a member is checked that another member doubts."""
MAX_REFUSALS = 4.0
"""A member is left out at so many points: each refusal adds 1, each answer takes off `POINTS_PER_ANSWER`. Samples
without a list are a refusal as well, with points of their own."""
POINTS_PER_ANSWER = 1 / 8
"""It is little, so that a member that refuses only where it has something to hide is left out as well."""
SUSPECT_PASSES = 16
"""Passes that a peer makes for a suspect, each as costly as its own largest micro-batch. Work that takes more is
computed again as much less often: else an honest suspect with costly lines would hold all members up for good."""
SHOW_SECONDS = 2.0
"""Seconds for which a peer waits for a list of which it computes a line again; its update waits as long."""
SAY_UPDATES = 8
"""Updates, from the first doubt in any ticket on, for which no member acts on it. So all can find the same, and leave a
member out at the same step. Else a group would come apart: some would meet that member and others would not."""
DOUBT_UPDATES = 16
"""Updates for which a peer says in its tickets that it doubts a member."""
DOUBT_MEMORY_UPDATES = 64
"""Updates after the last doubt in any ticket for which a peer remembers that there was one."""
MAX_HINTS = 2.0
"""Members that may be checked at once because other members doubt them."""
HINTS_PER_UPDATE = 1 / 50
"""Further members that may be checked for that reason, in an update."""
FALSE_ACCUSER_SECONDS = 60.0
"""Seconds for which a member that has doubted honest work is not listened to, the first time; then twice as long."""
MAX_FALSE_ACCUSER_SECONDS = 600.0
"""Seconds for which such a member is not listened to at most."""
KEPT_LISTS = 16
"""Rounds of which a peer keeps its lists."""
MOST_SHOWN = 2
"""How often a peer shows a list to the same member: once for each of the two checks."""
OUTSIZED_SHARE = 1 / 2
"""Share of audits in which a line with numbers far too large for its samples is drawn, if the list has such lines."""
COMPARED_SHARE = 1 / 2
"""Share of the updates in which a reducer compares what one member gave it with what that member says it has
computed."""

Ask = Callable[[PeerID, bytes, int], Awaitable[bytes]]
"""Fetches what another peer shows for a request, at most so many bytes; raises an OSError if it shows nothing."""


@dataclass
class Suspect:
    """A member that is checked in each update for a while.

    Args:
        audits_left: updates in which it is still checked
        accuser: member that has doubted its work before this peer had a reason of its own; None if no member has
        since: the step at which that was
        holds: whether some of its work has come out as it was said
    """

    audits_left: int
    accuser: PeerID | None = None
    since: int = 0
    holds: bool = False


@dataclass(frozen=True)
class Doubted:
    """When members of this peer's group have said in their tickets that a member's work does not hold.

    Args:
        first_step: the first step at which one of them has said so
        last_step: the last step at which one of them has said so
    """

    first_step: int
    last_step: int


@dataclass(frozen=True)
class ShownList:
    """A list of what this peer has computed for a round.

    Args:
        data: the list as other members get it
        shown_to: how often each member has seen it
    """

    data: bytes
    shown_to: Counter[PeerID] = field(default_factory=Counter)


class WorkAudits:
    """Draws what work of others one peer computes again, and acts on what it finds; lives in its averaging process.

    Args:
        me: this peer
        ask: fetches from another peer
        largest: most samples of a micro-batch in this run; the same for all members
    """

    def __init__(self, me: PeerID, ask: Ask, largest: int = MAX_SAMPLES):
        self._me, self._ask, self._largest = me, ask, largest
        self._lot = random.SystemRandom()
        self._own: OwnWork | None = None
        self._group: Group | None = None
        self._step = 0
        self._lists: OrderedDict[bytes, ShownList] = OrderedDict()
        """This peer's own lists, by round."""
        self._suspects: dict[PeerID, Suspect] = {}
        self._found: dict[PeerID, Blame] = {}
        """Members that are left out soon, and what for."""
        self._differences: dict[PeerID, int] = {}
        """How often each member's work has differed. It outlasts the time as a suspect: a liar may be honest then."""
        self._unanswered: dict[PeerID, float] = {}
        """Points of each member for questions without an answer."""
        self._unlisted: dict[PeerID, float] = {}
        """Points of each member for samples without a list."""
        self._doubts: dict[PeerID, int] = {}
        """Until which step this peer says that a member's work does not hold."""
        self._doubted: dict[PeerID, Doubted] = {}
        """Members that were doubted in tickets; equal on all members of this peer's group."""
        self._not_heard = Backoff(max_seconds=MAX_FALSE_ACCUSER_SECONDS)
        self._hints = MAX_HINTS

    # ---- around a round ---------------------------------------------------------------------------------------------

    def take(self, own: OwnWork | None, step: int) -> None:
        """Take in, before a round, what this peer has computed for it, and what it has found since the last one."""
        self._own, self._step = own, step
        if own is not None and own.verdict is not None:
            self._note(own.verdict)

    def found(self) -> dict[PeerID, Blame]:
        """Members that are left out from now on, and what for."""
        since = {peer: doubted.first_step for peer, doubted in self._doubted.items()}
        due = {
            peer: what for peer, what in self._found.items() if self._step >= since.get(peer, math.inf) + SAY_UPDATES
        }
        for peer in due:
            del self._found[peer]
        return due

    def with_doubt(self, ticket: Ticket) -> Ticket:
        """The ticket, with a member that this peer doubts, if there is one; with each in turn, if there are several."""
        self._doubts = {peer: until for peer, until in self._doubts.items() if until > self._step}
        doubted = sorted(map(short_name, self._doubts.keys() | self._found.keys()))
        return replace(ticket, doubts=doubted[self._step % len(doubted)]) if doubted else ticket

    def begin(self, group: Group) -> None:
        """Take in a closed group: what its members have computed cannot be changed any more."""
        self._group = group
        if self._own is not None and self._own.listed:
            self._lists[group.group_id] = ShownList(self._own.listed)
            while len(self._lists) > KEPT_LISTS:
                self._lists.popitem(last=False)
        self._hints = min(MAX_HINTS, self._hints + HINTS_PER_UPDATE)
        for known in (self._suspects, self._found, self._differences, self._unanswered, self._unlisted):
            while len(known) > MAX_GROUP_SIZE:  # identities cost a stranger nothing
                del known[next(iter(known))]
        by_name = {short_name(peer): peer for peer in group.peer_ids if peer != self._me}
        for accuser, ticket in group.members:
            doubted = by_name.get(ticket.doubts)
            if doubted is None or accuser == doubted:
                continue
            before = self._doubted.get(doubted)
            goes_on = before is not None and self._step - before.last_step <= DOUBT_UPDATES
            self._doubted[doubted] = Doubted(before.first_step if goes_on else self._step, self._step)
            if accuser != self._me:
                self._hear(accuser, doubted)
        oldest = self._step - DOUBT_MEMORY_UPDATES
        self._doubted = {peer: doubt for peer, doubt in self._doubted.items() if doubt.last_step > oldest}

    def _hear(self, accuser: PeerID, doubted: PeerID) -> None:
        """Check a member soon, since an accuser doubts its work: the doubt itself counts for nothing."""
        is_known = doubted in self._suspects or doubted in self._found
        if is_known or self._is_looking_into(accuser) or accuser in self._not_heard or self._hints < 1:
            return
        self._hints -= 1
        self._suspects[doubted] = Suspect(HINTED_AUDITS, accuser, self._step)

    def _is_looking_into(self, accuser: PeerID) -> bool:
        """Whether another member that this accuser has named is being checked, and nothing has come of it yet.

        After `DOUBT_UPDATES` that does not count any more: the member may have left, or cannot be asked.
        """
        return any(
            suspect.accuser == accuser and peer not in self._differences and self._step - suspect.since <= DOUBT_UPDATES
            for peer, suspect in self._suspects.items()
        )

    # ---- checking others --------------------------------------------------------------------------------------------

    def draw_to_compare(self, group: Group) -> PeerID | None:
        """The member of which this reducer compares what it was given with the list: by lot, in half of the updates."""
        listed = [peer for peer, ticket in group.members if peer != self._me and ticket.samples and ticket.work]
        return self._lot.choice(listed) if listed and self._lot.random() < COMPARED_SHARE else None

    async def assign(self) -> Assignment | None:
        """Draw what this peer has to compute again, if anything; called after a round that has given an average."""
        group, self._group = self._group, None
        if group is not None:
            self._note_lists(group)
        peer = None if group is None else self._draw(group)
        if peer is None:
            return None
        shown = await self.fetch_list(peer, group, SHOW_SECONDS)
        if shown is None:
            return None
        listed, _ = shown
        number = self._draw_line(listed)
        line, own = listed.lines[number], self._own
        num_passes = line.micro_batches * math.ceil(line.samples / line.micro_batches / own.largest)
        most = SUSPECT_PASSES if peer in self._suspects else 1
        is_too_dear = self._lot.random() * num_passes > most  # costlier lines are computed again less often
        cannot_tell = listed.kind != own.kind or (line.samples > LARGEST * own.largest and not own.has_slices)
        if cannot_tell or is_too_dear:
            self._note(WorkVerdict(peer, None))
            return None
        return Assignment(peer, line, number < listed.num_before)

    def _draw_line(self, listed: WorkList) -> int:
        """Draw the line of a random sample: so a large made-up micro-batch cannot be hidden among many small ones.

        A member that gives something else than it has computed can make up one line, of few samples, that explains all
        of it. So every other time the draw is among lines with a gradient far too large for their samples, if any.
        """
        if (outsized := listed.outsized) and self._lot.random() < OUTSIZED_SHARE:
            return self._lot.choice(outsized)
        return self._lot.choices(range(len(listed.lines)), [line.samples for line in listed.lines])[0]

    async def fetch_list(self, peer: PeerID, group: Group, timeout_seconds: float) -> tuple[WorkList, bytes] | None:
        """The list of what a member has computed for this round; None if it shows none, which is held against it.

        Returns:
            the list, and the same as it came
        """
        ticket = group.ticket_of(peer)
        try:
            async with asyncio.timeout(timeout_seconds):
                data = await self._ask(peer, to_wire("work", group.group_id, 0), MAX_LIST_BYTES)
        except (OSError, TimeoutError) as error:
            logger.debug(f"{peer} does not show what it has computed: {error!r}")
            self._note_no_answer(peer)
            return None
        try:
            listed = await in_thread(WorkList.from_bytes, data, ticket.work, ticket.samples, self._largest)
            self._check_fits_run(listed)
        except ValueError as error:
            logger.debug(f"{peer} shows no work that fits its ticket: {error}")
            self._find(peer, Blame.HIDES_ITS_WORK)
            return None
        self._take_off(self._unanswered, peer)
        return listed, data

    def _check_fits_run(self, listed: WorkList) -> None:
        """Check that a member of this run can have such a list.

        Raises:
            ValueError: no member can
        """
        own = self._own
        if own is None or not own.listed:  # this peer computes nothing, and does not know
            return
        if listed.kind and not own.kind:
            raise ValueError("a kind of device, where devices draw nothing")
        if listed.num_before and not own.has_earlier:
            raise ValueError("micro-batches on earlier weights, in a run in which no member has any")

    def _note_lists(self, group: Group) -> None:
        """Count members that name no list for their samples; all members see the same tickets."""
        givers = {peer: ticket for peer, ticket in group.members if ticket.samples}
        if self._own is None or len(givers) < FEWEST:
            return
        for peer, ticket in givers.items():
            if peer == self._me:
                continue
            if ticket.work:
                self._take_off(self._unlisted, peer)
            elif self._adds_up(self._unlisted, peer) and peer not in self._found:
                self._find(peer, Blame.NAMES_NO_WORK)

    def _draw(self, group: Group) -> PeerID | None:
        """Draw the member that this peer checks; None if it checks none."""
        givers = {peer: ticket for peer, ticket in group.members if ticket.samples}
        if self._own is None or not self._own.listed or len(givers) < FEWEST or self._me not in givers:
            return None
        no_calls = givers[self._me].client_mode  # two that cannot be called do not reach each other
        others = [
            peer
            for peer, ticket in givers.items()
            if peer not in (self._me, *self._found) and ticket.work and not (no_calls and ticket.client_mode)
        ]
        suspects = [peer for peer in others if peer in self._suspects]
        if not suspects and self._lot.random() >= self._own.chance:
            return None
        return self._lot.choice(suspects or others) if others else None

    def _note_no_answer(self, peer: PeerID) -> None:
        self._suspects.setdefault(peer, Suspect(SUSPECT_AUDITS))
        if self._adds_up(self._unanswered, peer):
            self._find(peer, Blame.HIDES_ITS_WORK)

    @staticmethod
    def _adds_up(refusals: dict[PeerID, float], peer: PeerID) -> bool:
        """Count one more refusal; returns whether that is too many, and then forgets them."""
        refusals[peer] = refusals.get(peer, 0.0) + 1
        if refusals[peer] < MAX_REFUSALS:
            return False
        del refusals[peer]
        return True

    @staticmethod
    def _take_off(refusals: dict[PeerID, float], peer: PeerID) -> None:
        left = refusals.pop(peer, 0.0) - POINTS_PER_ANSWER
        if left > 0:
            refusals[peer] = left

    def _note(self, verdict: WorkVerdict) -> None:
        peer, suspect = verdict.peer, self._suspects.get(verdict.peer)
        if verdict.holds is False:
            self._differences[peer] = self._differences.get(peer, 0) + 1
            accuser, since = (None, 0) if suspect is None else (suspect.accuser, suspect.since)
            self._suspects[peer] = Suspect(SUSPECT_AUDITS, accuser, since)
            if self._differences[peer] >= DIFFERENCES:
                self._find(peer, Blame.MADE_UP_WORK)
        elif suspect is not None:
            suspect.audits_left -= 1
            suspect.holds |= bool(verdict.holds)
            if suspect.audits_left <= 0:
                del self._suspects[peer]
                if suspect.accuser is not None and suspect.holds and peer not in self._differences:
                    self._not_heard.add(suspect.accuser, FALSE_ACCUSER_SECONDS)

    def _find(self, peer: PeerID, what: Blame) -> None:
        """Leave a member out soon, and doubt it in tickets: without a proof, others have to find it by themselves."""
        self._suspects[peer] = Suspect(SUSPECT_AUDITS)  # for when it comes back
        self._differences.pop(peer, None)
        self._found.setdefault(peer, what)
        self._doubts[peer] = self._step + DOUBT_UPDATES

    # ---- answering others -------------------------------------------------------------------------------------------

    def answer(self, caller: PeerID, name: bytes) -> bytes:
        """This peer's list of the round of that name.

        Raises:
            ValueError: there is none, or the caller has seen it too often
        """
        if name not in self._lists:
            raise ValueError("that round is not known")
        listed = self._lists[name]
        if listed.shown_to[caller] >= MOST_SHOWN:
            raise ValueError("it has seen that list")
        listed.shown_to[caller] += 1
        return listed.data
