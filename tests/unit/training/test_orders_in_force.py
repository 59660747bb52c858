"""Which orders the trainer follows: those of the newest list that it has looked at.

It notes if a list came too late.
"""

from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.network.signed_records import peer_of
from swarm.protocol.certificates import Right, Signer, warrant
from swarm.protocol.order_book import MAX_DEPUTIES, revoke
from swarm.protocol.orders import Order, Orders, What
from swarm.training.rounds.step_orders import StepOrders
from swarm.training.run_control import RunControl
from tests.helpers.owners import Organiser, subkey_of

ORGANISER = Organiser()
LIST = Orders("run").with_order(Order(7, What.TARGET, 128)).with_order(Order(9, What.END))
SIGNED = LIST.signed_by(ORGANISER.signer)


@pytest.fixture
def control() -> RunControl:
    return RunControl(ORGANISER.admission(peer_of(subkey_of("ada"))), 64, 100)


def test_a_list_counts_once_the_peer_has_looked_at_it(control):
    control.take(SIGNED)
    assert control.target(8).samples == 64
    control.look(5)
    assert (control.target(6).samples, control.target(7).samples) == (64, 128)
    assert (control.total_steps(8), control.is_over(8), control.is_over(9)) == (100, False, True)


@pytest.mark.parametrize(("step", "is_late"), [(6, False), (7, False), (8, True)])
def test_an_order_is_late_where_an_update_was_made_without_it(control, step, is_late, caplog):
    control.take(SIGNED)
    control.look(step)
    control.look(step)
    assert control.take_missed() == is_late
    assert not control.take_missed(), "once"
    assert ("learns of it only at step 8" in caplog.text) == is_late


@pytest.mark.parametrize(
    "signed", [b"", b"nonsense", LIST.signed_by(Organiser().signer)], ids=["nothing", "nonsense", "by a stranger"]
)
def test_a_list_without_the_organisers_signature_changes_nothing(control, signed):
    control.take(signed)
    control.look(5)
    assert not control.take_missed()
    assert control.orders == Orders("run")


def test_a_peer_that_has_followed_a_revoked_deputy_is_late_where_its_orders_fall_away(control):
    key = Ed25519PrivateKey.generate()
    allowed = warrant(ORGANISER.signer, "run", key.public_key().public_bytes_raw(), Right.CONTROL, 0, 2**32)
    deputy = Signer(key, allowed)
    control.take(LIST.signed_by(deputy))
    control.look(5)
    control.take(revoke(deputy.public_key, [], ORGANISER.signer, ORGANISER.authority).to_bytes())
    assert not control.take_missed()
    control.look(8)
    assert control.take_missed(), "it has made an update of another size than the peers that knew in time"
    assert (control.target(8).samples, control.is_over(9)) == (64, False)


def test_a_deputy_whose_orders_take_the_place_of_others_is_followed_too():
    """Of the orders of too many deputies fewer count than before. Rounds compare the orders that count."""

    def of_deputy(begin: int, given: list[Order]) -> bytes:
        key = Ed25519PrivateKey.generate()
        allowed = warrant(ORGANISER.signer, "run", key.public_key().public_bytes_raw(), Right.CONTROL, begin, 2**32)
        return Orders("run", 0, tuple(given)).signed_by(Signer(key, allowed))

    admission = ORGANISER.admission(peer_of(subkey_of("ada")))
    control = RunControl(admission, 64, 100)
    for number in range(MAX_DEPUTIES):
        at = 10**6 * (100 + number)
        control.take(of_deputy(10 + number, [Order(50 + number, What.TARGET, 128, at + two) for two in range(2)]))
    control.look(5)
    control.take(of_deputy(1, [Order(40, What.PAUSE, 0, 10**9)]))
    control.look(5)
    assert control.orders.is_paused(40)
    assert control.orders.digest(60) == admission.lists.orders.digest(60)


def test_a_peer_that_has_missed_an_order_looks_once_for_weights_that_have_followed_it(control):
    others = {"same": SimpleNamespace(lineage=b"own"), "other": SimpleNamespace(lineage=b"other")}
    own = SimpleNamespace(round=8, lineage=b"own")
    tracker = SimpleNamespace(
        own=own, swarm=SimpleNamespace(records=others, donors=lambda min_step: [*others]), aim=lambda *ordered: None
    )
    version = SimpleNamespace(step=8)
    orders = StepOrders(SimpleNamespace(control=control, version=version, tracker=tracker, averager=None))
    orders.follow()
    assert orders.donor_of_missed() is None, "nothing was ordered"
    control.take(SIGNED)
    orders.follow()
    assert (orders.target.samples, orders.has_nothing_to_compute) == (128, False)
    assert (orders.donor_of_missed(), orders.donor_of_missed()) == ("other", None)
    own.round = 9
    assert orders.has_nothing_to_compute, "the run is over"
    assert not orders.is_paused


def test_no_peer_waits_any_longer_where_a_paused_run_is_ended(control):
    tracker = SimpleNamespace(own=SimpleNamespace(round=5), aim=lambda *ordered: None)
    orders = StepOrders(
        SimpleNamespace(control=control, version=SimpleNamespace(step=5), tracker=tracker, averager=None)
    )
    paused = Orders("run").with_order(Order(5, What.PAUSE))
    for given, waits in ((paused, True), (paused.with_order(Order(5, What.END)), False)):
        control.take(given.signed_by(ORGANISER.signer))
        orders.follow()
        assert (orders.is_paused, orders.has_nothing_to_compute) == (waits, True)
