"""The words of a round: who takes part, what each brings, how it ended.

A *round* is the communication that ends a step. Everything here crosses a process or a network boundary, so it is
small, picklable, bounded and checked.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

import msgspec
from hivemind.p2p import PeerID
from msgspec import Meta

from swarm.protocol.auto_mode import Mode, Pace, Plan, plan_of
from swarm.protocol.batch_target import BatchTarget
from swarm.protocol.orders import DIGEST_BYTES
from swarm.protocol.wire import (
    LINEAGE_BYTES,
    MAX_SAMPLES,
    MAX_STEP,
    Lineage,
    Name,
    Samples,
    Sketch,
    Step,
    from_wire,
    to_wire,
)

MAX_GROUP_SIZE = 1024
MAX_TICKET_BYTES = 354
MAX_LINE_KBPS = 10**9
TICKET_NONCE_BYTES = 8
ANY_LINEAGE = b"\xff" * LINEAGE_BYTES
"""In the ticket of a listener, who does not know yet which weights the others will have."""
NOWHERE = -1
"""In the ticket of who does not want to go back to any step."""
_OrdersName = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
BackTo = Annotated[int, Meta(ge=NOWHERE, le=MAX_STEP)]
LineKbps = Annotated[int, Meta(ge=0, le=MAX_LINE_KBPS)]
TicketNonce = Annotated[bytes, Meta(max_length=TICKET_NONCE_BYTES)]
_TICKET = msgspec.msgpack.Decoder(
    tuple[
        Step,
        Samples,
        bool,
        float,
        Lineage,
        Sketch,
        bool,
        _OrdersName,
        Name,
        Name,
        BackTo,
        Pace | None,
        LineKbps,
        Name,
        Name,
        TicketNonce,
    ]
)


class ExchangeBroken(ConnectionError):  # noqa: N818 (reads as what happened)
    """The stream of one member has ended early; what becomes of the round is told by its outcome."""


class Blame(StrEnum):
    """What a peer is blamed for: the end of a sentence that begins with its name."""

    SENT_NONSENSE = "sent numbers that are not finite, far too large or cannot be read"
    SENT_ANOTHER_SHAPE = "sent a part of another shape"
    SENT_A_BAD_AVERAGE = "sent an average that cannot be one"
    SENT_A_BAD_COMMITMENT = "sent parts and did not sign for them"
    SENT_A_BAD_RECEIPT = "sent averages and did not sign for what it was given and made of it"
    HIDES_ITS_INPUTS = "does not show what its averages were made of"
    MADE_UP_AN_AVERAGE = "has signed an average that cannot come of what it was given, which is proven"
    EQUIVOCATED = "has given members different averages and signed both, which is proven"
    HIDES_ITS_WORK = "does not show what it has computed"
    NAMES_NO_WORK = "claims samples and does not say what it has computed"
    MADE_UP_WORK = "gave gradients that its samples do not give when they are computed again"
    GAVE_OTHER_WORK = "gave other gradients than those that it says it has computed, which is proven"
    TOO_SLOW = "holds up every round for far too long"
    STUCK = "let this peer into its group and never began"
    GOES_ON_ALONE = "says that the swarm has gone on, and nobody else has"

    @property
    def is_proven(self) -> bool:
        """Whether everybody can check it, so that all leave the peer out for good."""
        return self in (Blame.MADE_UP_AN_AVERAGE, Blame.EQUIVOCATED, Blame.GAVE_OTHER_WORK)

    @property
    def is_undone(self) -> bool:
        """Whether the swarm goes back to before it. What one member gives is clipped; a false average is not."""
        return self in (Blame.MADE_UP_AN_AVERAGE, Blame.EQUIVOCATED)


class RoundEnded(Exception):  # noqa: N818 (reads as what happened)
    """A round has ended without an average for this peer."""

    blamed: Mapping[PeerID, Blame] = MappingProxyType({})
    """Peers that have spoilt the round or held it up, and what they did."""
    group_id: bytes = b""
    """Of its group, which others may have an average of; empty if there was none."""

    def blames(self, blamed: Mapping[PeerID, Blame]) -> RoundEnded:
        """The same, with those who are to blame as well."""
        self.blamed = {**self.blamed, **blamed}
        return self


class RoundFailed(RoundEnded):
    """The round did not give this peer a complete average; nothing was applied and nothing accumulated is lost.

    Args:
        reason: the end of a sentence
        lost: members that are not there any more
    """

    def __init__(self, reason: str, lost: frozenset[PeerID] = frozenset()):
        super().__init__(reason, lost)
        self.lost = lost

    def __str__(self) -> str:
        return self.args[0]


class Behind(RoundEnded):
    """The swarm has gone on without this peer: its state has to be downloaded.

    Args:
        step: of the swarm
        leader: who says so; None: this peer has found it out itself
    """

    def __init__(self, step: int, leader: PeerID | None = None):
        super().__init__(step, leader)
        self.step, self.leader = step, leader

    def __str__(self) -> str:
        return "the swarm has gone on without this peer"


class ShortBatch(RoundEnded):
    """A `group` met before it had the samples of an update: all its members compute on."""

    def __init__(self, group: Group):
        super().__init__(group)
        self.group = group

    def __str__(self) -> str:
        return f"{self.group.samples} samples are too few"


class Refused(RoundEnded):
    """A leader says that it averages another model.

    Args:
        leader: its peer id
    """

    def __init__(self, leader: PeerID):
        super().__init__(leader)
        self.leader = leader

    def __str__(self) -> str:
        return f"{self.leader} averages another model"


class OtherOrders(RoundEnded):
    """The others follow other orders of the organiser: those count here, too, before the next round.

    Args:
        signed: the list
    """

    def __init__(self, signed: bytes):
        super().__init__(signed)
        self.signed = signed

    def __str__(self) -> str:
        return "the organiser has ordered something that this peer had not heard of"


class WentBack(RoundEnded):
    """The group does not average: its update is that an earlier state counts again.

    Args:
        group: that has decided so
        step: of that state
        liars: whose false averages are undone by it; none: the loss has risen for good
    """

    def __init__(self, group: Group, step: int, liars: frozenset[PeerID] = frozenset()):
        super().__init__(group, step, liars)
        self.group, self.step, self.liars = group, step, liars

    def __str__(self) -> str:
        names = " and ".join(sorted(liar.to_base58() for liar in self.liars))
        why = f"averages of {names} were false, which is proven" if names else "the loss has risen for good"
        return f"went back to step {self.step}: {why}"


@dataclass(frozen=True)
class Member:
    """A peer that is expected in the next round, as its progress record says.

    Args:
        peer_id: libp2p peer id
        since: seconds since 1970; the senior (smallest) server-mode peer leads. In a run by invitation, of who is
            proven, it is when it became a member, as the organiser has signed; else when it joined or came back, as it
            says
        client_mode: it cannot be dialled, so it neither leads nor reduces
        awaited: a group closes without it if it is not
        proven: it has been in a group with this peer since it joined; who has not, may say what it likes
    """

    peer_id: PeerID
    since: float
    client_mode: bool
    awaited: bool = True
    proven: bool = False

    @property
    def seniority(self) -> tuple[bool, float, bytes]:
        """Sort key that all who have met compute alike: the first server-mode peer in this order leads."""
        return not self.proven, self.since, self.peer_id.to_bytes()


def first_members(members: Iterable[Member], me: PeerID) -> list[Member]:
    """As many as a group can have: this peer, those who have been in a group with it, then by seniority."""
    return sorted(members, key=lambda member: (member.peer_id != me, member.seniority))[:MAX_GROUP_SIZE]


@dataclass(frozen=True)
class Ticket:
    """What a member brings to a round; every member sees every ticket before any gradient travels.

    Args:
        step: the global update that this peer wants to finish
        samples: samples in its gradient, which is its weight in the average; 0 means that it gives nothing
        client_mode: it cannot be dialled
        loss: mean training loss over its samples
        lineage: name of the round that its weights came out of; equal steps of different histories never mix.
            `ANY_LINEAGE` for a listener
        sketch: of these weights (`swarm.state_sync.weight_sketch`); empty if it is not known
        warm: whether its PowerSGD goes on from the round of this lineage
        orders: of the organiser that it follows (`swarm.protocol.orders.Orders.digest`); equal in a group
        receipts: hash over what reducers have signed in the round of this lineage; empty if it has not all of it
        accuses: name of a proof against a member, which it shows to who asks; empty if it has none
        back_to: the step of a state to which it wants to go back, since what came after that is spoilt, or `NOWHERE`
        pace: what it has measured, with `--averaging auto`; else None
        line_kbps: what its line carries, in kbit/s, as it has measured; 0: not known. Shares follow it
        work: name of the list of what it has computed (`swarm.protocol.work`); empty if nobody can compute it again
        doubts: name of a member whose work was another one when this peer computed it again; empty if there is none
        nonce: 8 random bytes where averages are checked. No round has the name of an earlier one, whatever its leader
            does, so this peer never signs two averages under one name
    """

    step: int
    samples: int
    client_mode: bool
    loss: float
    lineage: bytes
    sketch: tuple[float, ...] = ()
    warm: bool = False
    orders: bytes = b""
    receipts: bytes = b""
    accuses: bytes = b""
    back_to: int = NOWHERE
    pace: Pace | None = None
    line_kbps: int = 0
    work: bytes = b""
    doubts: bytes = b""
    nonce: bytes = b""

    @classmethod
    def of_listener(cls, step: int, client_mode: bool, orders: bytes = b"", pace: Pace | None = None) -> Ticket:
        """Of a peer that has the weights of this step soon: it gives nothing, and has the average with the others."""
        return cls(step, 0, client_mode, 0.0, ANY_LINEAGE, orders=orders, pace=pace)

    @property
    def mode(self) -> Mode:
        """In which its sender would average, with `--averaging auto`."""
        return plan_of([self.pace], self.step).at(self.step)

    @property
    def listens(self) -> bool:
        """Whether it comes without weights."""
        return self.lineage == ANY_LINEAGE

    def to_bytes(self) -> bytes:
        return to_wire(*vars(self).values())

    @classmethod
    def from_bytes(cls, data: bytes) -> Ticket:
        """Raises ValueError: whatever is wrong with it; the sender is not trusted"""
        step, samples, client_mode, loss, lineage, sketch, *rest = from_wire(_TICKET, data, MAX_TICKET_BYTES)
        if lineage == ANY_LINEAGE and samples:
            raise ValueError("a listener has no samples")
        if not all(map(math.isfinite, sketch)):
            sketch = ()
        return cls(step, samples, client_mode, loss if math.isfinite(loss) else math.nan, lineage, sketch, *rest)


@dataclass(frozen=True)
class Group:
    """A closed group: the same on all its members.

    Args:
        group_id: name of this round
        peer_ids: members; their shares of the vector come in this order (client-mode members: no share)
        tickets: one for each member, in the same order
        nonce: 16 random bytes, of which the name was made, with the run and the next
        said: the tickets as they came, before `bounded`
        most: samples for which a member counts
    """

    group_id: bytes
    peer_ids: tuple[PeerID, ...]
    tickets: tuple[Ticket, ...]
    nonce: bytes = b""
    said: tuple[Ticket, ...] = ()
    most: int = MAX_SAMPLES

    @classmethod
    def close(cls, nonce: bytes, peer_ids: tuple[PeerID, ...], tickets: tuple[Ticket, ...], run: str = "") -> Group:
        """A group that is named after all that its members have to agree on.

        Whom its leader tells otherwise asks for a round of another name, and never averages with these.

        Args:
            nonce: 16 random bytes
            run: start of its keys: what is signed under this name proves nothing in another run
        """
        as_read = [Ticket.from_bytes(ticket.to_bytes()) for ticket in tickets]  # not finite is not finite
        content = [run, nonce, *(peer.to_bytes() for peer in peer_ids), *(ticket.to_bytes() for ticket in as_read)]
        name = hashlib.sha256(to_wire(*content)).digest()[:LINEAGE_BYTES]
        return cls(name, peer_ids, tickets, nonce, tuple(as_read))

    def bounded(self, target: BatchTarget) -> Group:
        """The same group, in which nobody counts for more than two updates, whatever it says; all bound alike."""
        most = target.most_of(MAX_SAMPLES)
        tickets = tuple(replace(ticket, samples=min(ticket.samples, most)) for ticket in self.tickets)
        return replace(self, tickets=tickets, most=most)

    @property
    def members(self) -> list[tuple[PeerID, Ticket]]:
        """Each with its ticket, in the order of the group."""
        return [*zip(self.peer_ids, self.tickets, strict=True)]

    def ticket_of(self, peer_id: PeerID) -> Ticket:
        """Raises ValueError: it is no member"""
        return self.tickets[self.peer_ids.index(peer_id)]

    @property
    def samples(self) -> int:
        return sum(ticket.samples for ticket in self.tickets)

    @property
    def step(self) -> int:
        """That its members want to finish."""
        return self.tickets[0].step

    @property
    def back_to(self) -> int | None:
        """The step to which this group goes back instead of averaging: the one that more than half of it name, if any.

        Those count who give samples, as they do for the average: names without samples cost their sender nothing. Where
        nobody gives any, as when no gradient is finite any more, those count who want to go back. All members of a
        group have the same tickets, and so they decide alike. Who waited for the others in vain decides nothing:
        unlike an average, this takes no samples, and the others would find that it has gone on without them.
        """
        if len(self.tickets) < 2:
            return None
        heard = [ticket for ticket in self.tickets if not ticket.listens]
        givers = [ticket for ticket in heard if ticket.samples]
        voters = givers or [ticket for ticket in heard if ticket.back_to != NOWHERE]
        named = Counter(ticket.back_to for ticket in voters)
        step = max(named, key=named.__getitem__, default=NOWHERE)
        return step if step != NOWHERE and 2 * named[step] > named.total() else None

    @property
    def plan(self) -> Plan:
        """With `--averaging auto`, what its members follow: by the tickets alone, so that all have the same.

        Who gives nothing has no say: a listener costs its sender nothing.
        """
        givers = [ticket for ticket in self.tickets if ticket.samples] or self.tickets
        return plan_of([ticket.pace for ticket in givers], self.step)

    @property
    def mode(self) -> Mode:
        """With `--averaging auto`, in which its members average."""
        return self.plan.at(self.step)

    @property
    def lineage(self) -> bytes:
        """Of the weights that its average belongs to."""
        return next((ticket.lineage for ticket in self.tickets if not ticket.listens), ANY_LINEAGE)
