"""Makes an order of the organiser and hands it to a run, together with all earlier orders.

Any process with a DHT and the key can do so, as the command `swarm control` does. It need not be a peer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hivemind.p2p import PeerID

from recipe.errors import InputError
from swarm.membership.progress_record import AVERAGING, TRAINING, PeerProgress, step_of_most, under_way
from swarm.membership.progress_store import progress_records
from swarm.membership.run_manifest import RunManifest
from swarm.network.record_push import MORE_RECEIVERS, push_until_taken
from swarm.network.signed_records import ORDERS
from swarm.protocol.admission import Admission
from swarm.protocol.auto_mode import MOST_LOCAL_STEPS
from swarm.protocol.certificates import NotSigned, Signer
from swarm.protocol.order_book import MAX_DEPUTIES
from swarm.protocol.orders import MAX_OF_DEPUTY, MAX_ORDERS, Order, Orders, What
from swarm.protocol.signed_lists import SignedLists

if TYPE_CHECKING:
    from swarm.network.dht_process import SwarmDHT

ANSWER_SECONDS = 15.0
TRIES = 3
"""Attempts to hand over a list: a peer that has a newer order meanwhile takes only a list that includes it."""
PUSH_SECONDS = 5.0
"""Seconds of one attempt. Within it the list is pushed again as long as no peer takes it."""
TOO_BUSY = (
    "The peers there are too busy to answer, or none answers any more: look with swarm control show, and try again."
)
FASTEST = 64
"""A peer is believed to be at most this many times as fast as the median: a GPU beside laptops."""
AHEAD_SECONDS = 30.0
"""Seconds until an order counts, if no step is given: by then all peers have heard of it."""
AHEAD_STEPS = 2
"""Fewest steps until an order counts: all peers have to know it a round before."""


@dataclass(frozen=True)
class Situation:
    """The step, the orders and the peers of a run at one moment.

    Args:
        manifest: the run's manifest
        orders: the newest list of orders
        records: progress records of the run's peers
    """

    manifest: RunManifest
    orders: Orders
    records: dict[PeerID, PeerProgress]

    @property
    def step(self) -> int:
        """The step for which most peers compute. Joiners do not count: until they have the state, they say step 0.

        Raises:
            InputError: no peer trains
        """
        if not self.records:
            run_id = self.manifest.run_id
            raise InputError(
                f"No peer trains run {run_id} now: an order needs a run that is under way, so start a peer."
            )
        return step_of_most([record.round for record in under_way(self.records.values())])

    @property
    def is_paused(self) -> bool:
        """Whether the run is paused at the present step."""
        return self.orders.is_paused(self.step)

    @property
    def planned_steps(self) -> int:
        """Updates of the whole run, with all orders; fewer where `--averaging auto` makes several local steps."""
        return self.orders.total_steps(math.inf, self.manifest.recipe.total_steps)

    @property
    def fewest_steps(self) -> int:
        """Updates that the whole run has at least, also with `--averaging auto`, where one may count for several."""
        may_be_fewer = self.manifest.recipe.averaging == "auto" and not self.orders.ends_by_order(math.inf)
        return self.planned_steps // MOST_LOCAL_STEPS if may_be_fewer else self.planned_steps

    @cached_property
    def updates_per_second(self) -> float:
        """Updates per second at the present pace, by the peers' own rates; 0 where no peer computes.

        With `--averaging auto` it is that of updates of one local step, so that orders come late rather than early.
        """
        rates = [record.rate for record in self.records.values() if record.phase in (TRAINING, AVERAGING)]
        most = FASTEST * statistics.median_low(rates) if rates else 0.0  # so one false rate does not delay the order
        target = self.orders.target_batch_size(self.step, self.manifest.recipe.target_batch_size)
        return sum(min(rate, most) for rate in rates) / target

    @property
    def nearest(self) -> int:
        """The first step from which an order can still count on all peers alike."""
        return self.step if self.is_paused else self.step + AHEAD_STEPS

    def order(self, what: What, value: float = 0.0, at_step: int | None = None) -> Order:
        """Make an order that makes sense now.

        Args:
            what: kind of order
            value: its number, if this kind has one
            at_step: step from which it counts; None: in about 30 s, or where the run stands, if it is paused

        Raises:
            InputError: such an order makes no sense
        """
        at_step = self._at_step(what, at_step)
        try:
            order = Order(at_step, what, value)
        except ValueError as error:
            raise InputError(str(error)) from None
        self._check(order)
        return order

    def seconds_until(self, order: Order) -> float:
        """Seconds until the order counts, about; 0 if it counts at once, nan if the pace is not known."""
        if order.at_step == self.step:
            return 0.0
        is_known = self.updates_per_second and self.manifest.recipe.averaging != "auto"
        return (order.at_step - self.step) / self.updates_per_second if is_known else math.nan

    def _at_step(self, what: What, at_step: int | None) -> int:
        if at_step is not None:
            return at_step
        if what is What.RESUME:
            return self._where_it_goes_on()
        if what is What.EXTEND and (ends := self._coming(What.END)):
            return ends[0].at_step  # an extension at this step takes the end back
        if self.is_paused:
            return self.step
        ahead = self.step + max(AHEAD_STEPS, math.ceil(AHEAD_SECONDS * self.updates_per_second))
        # An extension that comes late in the run counts when it would have ended, as far as that is known.
        return max(self.nearest, min(ahead, self.fewest_steps)) if what is What.EXTEND else ahead

    def _coming(self, what: What) -> list[Order]:
        return [order for order in self.orders.coming(self.step) if order.what is what]

    def _where_it_goes_on(self) -> int:
        if self.is_paused:
            return self.step
        if pauses := self._coming(What.PAUSE):
            return pauses[0].at_step  # resuming at this step takes the pause back
        raise InputError("The run is not paused, and no pause is coming: there is nothing to resume.")

    def _check(self, order: Order) -> None:
        """Check that the order has an effect, and the same one on all peers.

        Raises:
            InputError: it has not
        """
        at_step, planned, least = order.at_step, self.planned_steps, self.nearest
        if order.what is What.EXTEND:
            if order.value <= self.fewest_steps:
                raise InputError(f"The run has {self.fewest_steps:,} updates already: extend it to more than that.")
            if at_step > planned:
                raise InputError(f"The run ends at step {planned}: extend it from an earlier step on.")
        elif at_step >= planned:
            raise InputError(
                f"The run ends at step {planned}, and this order would count from step {at_step} on, when all peers "
                f"have it: extend the run first (swarm control extend {2 * at_step}), or give an earlier --at-step."
            )
        if order.what is What.PAUSE and self.orders.is_paused(at_step):
            raise InputError(f"The run is paused at step {at_step} already: swarm control resume lets it go on.")
        if order.what is What.RESUME and not self.orders.is_paused(at_step):
            raise InputError(f"The run is not paused at step {at_step}: there is nothing to resume.")
        if order.what is What.RESUME and at_step > self.step and self.orders.is_paused(at_step - 1):
            stands = self._where_it_goes_on()
            raise InputError(
                f"The run makes no update after step {stands}, where it is paused, so it never reaches step {at_step}: "
                "leave out --at-step."
            )
        if order.what is What.RESUME and at_step < least and not self.is_paused:
            raise InputError(
                f"The pause at step {at_step} is too near to be cancelled on all peers: wait until the run is paused, "
                "then resume it."
            )
        if at_step < least:
            raise InputError(
                f"The swarm is at step {self.step}, and an order for step {at_step} would reach some peers too late: "
                f"give --at-step {least} or more."
            )


@dataclass(frozen=True)
class Given:
    """What became of an order.

    Args:
        order: the order as it was signed
        seconds: until it counts, as `Situation.seconds_until`
        num_peers: peers that have taken the list
    """

    order: Order
    seconds: float
    num_peers: int


def newest_orders(dht: SwarmDHT, manifest: RunManifest) -> Orders:
    """All orders of a run, as far as its peers know them.

    Args:
        dht: DHT that knows the run (`SwarmDHT.take_part`)

    Raises:
        InputError: no peer answers
    """
    return newest_lists(dht, manifest).orders


def newest_lists(dht: SwarmDHT, manifest: RunManifest) -> SignedLists:
    """The newest signed lists of a run; for arguments and errors see `newest_orders`."""
    lists = Admission(manifest.authority).lists
    if manifest.authority is None:
        return lists
    try:
        dht.get(f"{manifest.key_prefix}.{ORDERS}", latest=True, return_future=True).result(ANSWER_SECONDS)
        if signed := dht.newest_list(ORDERS, ANSWER_SECONDS):
            lists.take(ORDERS, signed)
    except NotSigned as error:
        raise InputError(f"The newest list of orders {error}: set this machine's clock right.") from None
    except (TimeoutError, CancelledError, OSError, RuntimeError):
        raise InputError(TOO_BUSY) from None
    return lists


def hand_over(dht: SwarmDHT, manifest: RunManifest, signed: bytes, to: Sequence[PeerID]) -> int:
    """Give a list to the peers of a run, together with orders that have been given meanwhile.

    Args:
        signed: the list
        to: peers that can be called

    Returns:
        number of peers that have taken it

    Raises:
        InputError: no peer answers
    """
    for _ in range(TRIES):
        lists = newest_lists(dht, manifest)
        lists.take(ORDERS, signed)
        all_orders, receivers = lists.signed(ORDERS), tuple(to[:MORE_RECEIVERS])
        try:
            taken = push_until_taken(dht, manifest.key_prefix, ORDERS, all_orders, receivers, PUSH_SECONDS)
        except (TimeoutError, CancelledError, OSError, RuntimeError):
            raise InputError(TOO_BUSY) from None
        if taken:
            return taken
    return 0


def situation(dht: SwarmDHT, manifest: RunManifest) -> Situation:
    """Read the orders and records of a run; for arguments and errors see `newest_orders`."""
    orders = newest_orders(dht, manifest)
    try:
        records = progress_records(dht, manifest, timeout_seconds=ANSWER_SECONDS)
    except (TimeoutError, CancelledError, OSError, RuntimeError):
        raise InputError(TOO_BUSY) from None
    return Situation(manifest, orders, records)


def give_order(
    dht: SwarmDHT, manifest: RunManifest, signer: Signer, what: What, value: float = 0.0, at_step: int | None = None
) -> Given:
    """Sign an order and hand it to the peers of the run, which pass it on.

    Args:
        dht: DHT that knows the run (`SwarmDHT.take_part`)
        signer: the organiser's key, or that of a deputy with `Right.CONTROL`
        what, value, at_step: as in `Situation.order`

    Raises:
        InputError: the key may not order, the order makes no sense now, or no peer has taken it
    """
    if manifest.authority is None:
        raise InputError(f"Run {manifest.run_id} has no organiser, so it takes no orders: start one with swarm start.")
    now = situation(dht, manifest)
    order = now.orders.with_order(now.order(what, value, at_step)).given[-1]
    signed = Orders(manifest.key_prefix, given=(order,)).signed_by(signer)
    lists = newest_lists(dht, manifest)
    left = lists.book.number_left(signer)
    try:
        lists.take(ORDERS, signed)
    except NotSigned as error:
        raise InputError(
            f"This key cannot order anything in run {manifest.run_id}: what it signs {error}. Take the organiser's "
            "key, or that of a deputy with the right control."
        ) from None
    if signer.public_key in lists.orders.revoked:
        raise InputError(
            f"This key cannot order anything in run {manifest.run_id} any more: the organiser has revoked it. Ask the "
            "organiser for another one (swarm deputy)."
        )
    if left < 1:
        raise InputError(
            f"This key has used up its orders (a run takes {MAX_OF_DEPUTY} from each of {MAX_DEPUTIES} deputies and "
            f"{MAX_ORDERS} from the organiser): use another deputy's key, or the organiser's own."
        )
    can_be_called = [peer_id for peer_id, record in now.records.items() if not record.client_mode]
    num_peers = hand_over(dht, manifest, signed, can_be_called)
    if not num_peers:
        raise InputError("No peer has taken the order: look with swarm control show, and try again.")
    return Given(order, now.seconds_until(order), num_peers)
