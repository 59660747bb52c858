"""The messages and errors of a round: its members, what each member brings, and how it ended.

A *round* is the communication that ends a step. Everything here crosses the boundary of a process or of a machine, so
it is small, picklable, bounded and checked.
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
"""Members of a group."""
MAX_TICKET_BYTES = 354
MAX_LINE_KBPS = 10**9
TICKET_NONCE_BYTES = 8
ANY_LINEAGE = b"\xff" * LINEAGE_BYTES
"""Lineage in the ticket of a listener, which does not know yet which weights the other members will have."""
NOWHERE = -1
"""`back_to` in the ticket of a member that does not want to go back to any step."""
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
    """The stream of one member has ended early. The round's outcome tells what that means for the round."""


class Blame(StrEnum):
    """What a peer is blamed for, as the end of a sentence that begins with the peer's name."""

    SENT_NONSENSE = "sent numbers that are not finite, far too large or cannot be read"
    SENT_ANOTHER_SHAPE = "sent a part of the wrong size"
    SENT_A_BAD_AVERAGE = "sent an impossible average"
    SENT_A_BAD_COMMITMENT = "sent parts without signing them"
    SENT_A_BAD_RECEIPT = "sent averages without a valid receipt"
    HIDES_ITS_INPUTS = "does not show the inputs of its averages"
    MADE_UP_AN_AVERAGE = "signed a false average, which is proven"
    EQUIVOCATED = "signed different averages for different members, which is proven"
    HIDES_ITS_WORK = "does not show its micro-batches"
    NAMES_NO_WORK = "claims samples and does not list its micro-batches"
    MADE_UP_WORK = "sent gradients that differ when they are computed again from its samples"
    GAVE_OTHER_WORK = "sent other gradients than those of the micro-batches that it lists, which is proven"
    TOO_SLOW = "holds up every round for far too long"
    STUCK = "let this peer into its group and never started the round"
    GOES_ON_ALONE = "claims a later step, which no other peer confirms"

    @property
    def is_proven(self) -> bool:
        """Whether every member can check it, so that all leave the peer out for good."""
        return self in (Blame.MADE_UP_AN_AVERAGE, Blame.EQUIVOCATED, Blame.GAVE_OTHER_WORK)

    @property
    def is_undone(self) -> bool:
        """Whether the swarm goes back to the state before it. Gradients of one member are clipped; averages are not."""
        return self in (Blame.MADE_UP_AN_AVERAGE, Blame.EQUIVOCATED)


class RoundEnded(Exception):  # noqa: N818 (reads as what happened)
    """A round has ended without an average for this peer."""

    blamed: Mapping[PeerID, Blame] = MappingProxyType({})
    """Peers that have spoilt the round or held it up, and what they did."""
    group_id: bytes = b""
    """Name of its group, of which other members may have an average; empty if there was no group."""

    def blames(self, blamed: Mapping[PeerID, Blame]) -> RoundEnded:
        """Add peers that are to blame; return this error."""
        self.blamed = {**self.blamed, **blamed}
        return self


class RoundFailed(RoundEnded):
    """The round did not give this peer a complete average. Nothing was applied, and no accumulated samples are lost.

    Args:
        reason: why, as the end of a sentence
        lost: members that are not there any more
    """

    def __init__(self, reason: str, lost: frozenset[PeerID] = frozenset()):
        super().__init__(reason, lost)
        self.lost = lost

    def __str__(self) -> str:
        return self.args[0]


class Behind(RoundEnded):
    """The swarm has gone on without this peer, which has to download the swarm's state.

    Args:
        step: the swarm's step
        leader: the leader that says so; None if this peer has found it out itself
    """

    def __init__(self, step: int, leader: PeerID | None = None):
        super().__init__(step, leader)
        self.step, self.leader = step, leader

    def __str__(self) -> str:
        return "the swarm has gone on without this peer"


class ShortBatch(RoundEnded):
    """A group has closed before it had the samples of an update. All its members compute on.

    Args:
        group: that group
    """

    def __init__(self, group: Group):
        super().__init__(group)
        self.group = group

    def __str__(self) -> str:
        return f"the group closed with {self.group.samples} samples, too few for an update"


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
    """The leader follows other orders of the organiser. They count for this peer, too, before the next round.

    Args:
        signed: the leader's list of orders, as members pass it on
    """

    def __init__(self, signed: bytes):
        super().__init__(signed)
        self.signed = signed

    def __str__(self) -> str:
        return "the group follows an order of the organiser that this peer did not have yet"


class WentBack(RoundEnded):
    """The group does not average. Instead, all its members go back to an earlier state.

    Args:
        group: the group that has decided so
        step: step of that state
        liars: members whose false averages are undone by it; empty if the reason is that the loss has risen for good
    """

    def __init__(self, group: Group, step: int, liars: frozenset[PeerID] = frozenset()):
        super().__init__(group, step, liars)
        self.group, self.step, self.liars = group, step, liars

    def __str__(self) -> str:
        names = " and ".join(sorted(liar.to_base58() for liar in self.liars))
        why = f"averages of {names} were proven false" if names else "the loss has risen and stays high"
        return f"went back to step {self.step}: {why}"


@dataclass(frozen=True)
class Member:
    """A peer that is expected in the next round, as its progress record says.

    Args:
        peer_id: libp2p peer id
        since: seconds since 1970; the server-mode peer with the smallest value is the senior, and leads. For a proven
            peer in a run by invitation, it is when the peer became a member, as the organiser has signed. Else it is
            when the peer joined or came back, as the peer says
        client_mode: whether it cannot be dialled, so that it neither leads nor reduces
        awaited: whether a group waits for it before closing
        proven: whether it has been in a group with this peer since it joined; else its claims are unproven
    """

    peer_id: PeerID
    since: float
    client_mode: bool
    awaited: bool = True
    proven: bool = False

    @property
    def seniority(self) -> tuple[bool, float, bytes]:
        """Sort key that all peers that have met compute alike. The first server-mode peer in this order leads."""
        return not self.proven, self.since, self.peer_id.to_bytes()


def first_members(members: Iterable[Member], me: PeerID) -> list[Member]:
    """As many peers as a group can have: this peer, then the others by seniority, proven peers first."""
    return sorted(members, key=lambda member: (member.peer_id != me, member.seniority))[:MAX_GROUP_SIZE]


@dataclass(frozen=True)
class Ticket:
    """What a member brings to a round. Every member sees every ticket before any gradient travels.

    Args:
        step: number of finished updates: the round makes the one that follows them
        samples: samples in its gradient, which are its weight in the average; 0 if it gives no gradient
        client_mode: whether it cannot be dialled
        loss: mean training loss over its samples
        lineage: name of the round that its weights came out of, so that equal steps of different histories never mix;
            `ANY_LINEAGE` for a listener
        sketch: sketch of these weights (`swarm.state_sync.weight_sketch`); empty if it is not known
        warm: whether its PowerSGD goes on from the round of this lineage
        orders: digest of the organiser's orders that it follows (`swarm.protocol.orders.Orders.digest`); equal in a
            group
        receipts: hash over what reducers have signed in the round of this lineage; empty if it lacks some of it
        accuses: name of a proof against a member, which it shows on request; empty if it has none
        back_to: step of the state to which it wants to go back, since later ones are spoilt; or `NOWHERE`
        pace: its measurements, with `--averaging auto`; else None
        line_kbps: measured speed of its line in kbit/s, by which shares are sized; 0 if it is not known
        work: name of the list of what it has computed (`swarm.protocol.work`); empty if other members cannot compute it
            again
        doubts: name of a member whose work gave other results when this peer computed it again; empty if there is none
        nonce: 8 random bytes where averages are checked. With them no leader can give a round the name of an earlier
            one, so this peer never signs two averages under one name
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
        """The ticket of a peer that will soon have the weights of this step: it gives nothing and gets the average."""
        return cls(step, 0, client_mode, 0.0, ANY_LINEAGE, orders=orders, pace=pace)

    @property
    def mode(self) -> Mode:
        """The mode in which its sender would average, with `--averaging auto`."""
        return plan_of([self.pace], self.step).at(self.step)

    @property
    def listens(self) -> bool:
        """Whether it is the ticket of a listener, which does not have the weights of this step yet."""
        return self.lineage == ANY_LINEAGE

    def to_bytes(self) -> bytes:
        return to_wire(*vars(self).values())

    @classmethod
    def from_bytes(cls, data: bytes) -> Ticket:
        """Read a ticket. A sketch or loss that is not finite counts as unknown.

        Raises:
            ValueError: anything else is wrong with it; the sender is not trusted
        """
        step, samples, client_mode, loss, lineage, sketch, *rest = from_wire(_TICKET, data, MAX_TICKET_BYTES)
        if lineage == ANY_LINEAGE and samples:
            raise ValueError("a listener has no samples")
        if not all(map(math.isfinite, sketch)):
            sketch = ()
        return cls(step, samples, client_mode, loss if math.isfinite(loss) else math.nan, lineage, sketch, *rest)


@dataclass(frozen=True)
class Group:
    """A closed group. It is the same on all its members.

    Args:
        group_id: name of this round: a hash of the run, `nonce`, `peer_ids` and `said`
        peer_ids: the members; their shares of the vector come in this order. Client-mode members have no share
        tickets: one for each member, in the same order
        nonce: 16 random bytes of the leader
        said: the tickets as they came, before `bounded`
        most: samples for which a member counts at most
    """

    group_id: bytes
    peer_ids: tuple[PeerID, ...]
    tickets: tuple[Ticket, ...]
    nonce: bytes = b""
    said: tuple[Ticket, ...] = ()
    most: int = MAX_SAMPLES

    @classmethod
    def close(cls, nonce: bytes, peer_ids: tuple[PeerID, ...], tickets: tuple[Ticket, ...], run: str = "") -> Group:
        """A group whose name is a hash over everything that its members have to agree on.

        A member to which the leader tells anything else asks for a round of another name, and never averages with them.

        Args:
            nonce: 16 random bytes
            peer_ids: the members
            tickets: one for each member, in the same order
            run: start of the run's keys, so that a signature under this name proves nothing in another run
        """
        as_read = [Ticket.from_bytes(ticket.to_bytes()) for ticket in tickets]  # one form of "not finite" for all
        content = [run, nonce, *(peer.to_bytes() for peer in peer_ids), *(ticket.to_bytes() for ticket in as_read)]
        name = hashlib.sha256(to_wire(*content)).digest()[:LINEAGE_BYTES]
        return cls(name, peer_ids, tickets, nonce, tuple(as_read))

    def bounded(self, target: BatchTarget) -> Group:
        """The same group, in which no member counts for more than two updates of samples. All members bound alike."""
        most = target.most_of(MAX_SAMPLES)
        tickets = tuple(replace(ticket, samples=min(ticket.samples, most)) for ticket in self.tickets)
        return replace(self, tickets=tickets, most=most)

    @property
    def members(self) -> list[tuple[PeerID, Ticket]]:
        """Each member with its ticket, in the order of the group."""
        return [*zip(self.peer_ids, self.tickets, strict=True)]

    def ticket_of(self, peer_id: PeerID) -> Ticket:
        """The ticket of a member.

        Raises:
            ValueError: it is no member
        """
        return self.tickets[self.peer_ids.index(peer_id)]

    @property
    def samples(self) -> int:
        return sum(ticket.samples for ticket in self.tickets)

    @property
    def step(self) -> int:
        """Number of finished updates: this group makes the one that follows them."""
        return self.tickets[0].step

    @property
    def back_to(self) -> int | None:
        """The step to which this group goes back instead of averaging; None if it averages.

        It is the step that more than half of the voters name. The voters are the members that give samples, as for the
        average: names without samples cost their sender nothing. If no member gives samples, as when no gradient is
        finite any more, the members that want to go back are the voters. All members of a group have the same tickets,
        so they decide alike. A peer alone in its group never goes back. Unlike an average, going back takes no samples,
        so a peer that waited for the others in vain would go on without them.
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
        """With `--averaging auto`, the plan that its members follow: by the tickets alone, so that all have the same.

        Members without samples have no say: their tickets cost them nothing. If no member has samples, all have one.
        """
        givers = [ticket for ticket in self.tickets if ticket.samples] or self.tickets
        return plan_of([ticket.pace for ticket in givers], self.step)

    @property
    def mode(self) -> Mode:
        """With `--averaging auto`, the mode in which its members average."""
        return self.plan.at(self.step)

    @property
    def lineage(self) -> bytes:
        """Lineage of the weights that its average belongs to; `ANY_LINEAGE` if all members are listeners."""
        return next((ticket.lineage for ticket in self.tickets if not ticket.listens), ANY_LINEAGE)
