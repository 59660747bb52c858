"""What the organiser orders: who may, which list counts, and what follows from a list at a step."""

import math

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.network.signed_records import peer_of
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.certificates import NotSigned, Right, Signer, warrant
from swarm.protocol.orders import MAX_ORDERS, MAX_ORDERS_BYTES, Order, Orders, What
from swarm.protocol.signed_lists import ORDERS
from tests.helpers.owners import Organiser, subkey_of

ORGANISER = Organiser("run")
AUTHORITY = ORGANISER.authority
TOTAL = 100


def orders(*given: Order) -> Orders:
    return Orders("run", 1, given)


def deputy(*rights: Right) -> Signer:
    key = Ed25519PrivateKey.generate()
    allowed = Right(0)
    for right in rights:
        allowed |= right
    signed = warrant(ORGANISER.signer, "run", key.public_key().public_bytes_raw(), allowed, 0, 2**32)
    return Signer(key, signed)


# ---- who may order ---------------------------------------------------------------------------------------------------


def test_what_the_organiser_signs_is_read():
    made = Orders("run").with_order(Order(7, What.PAUSE)).with_order(Order(9, What.LEARNING_RATE, 0.3))
    assert Orders.read(made.signed_by(ORGANISER.signer), AUTHORITY) == made


def test_the_longest_list_fits_and_a_longer_one_is_not_signed():
    full = orders(*[Order(10**9 - 1, What.LEARNING_RATE, 0.1)] * MAX_ORDERS)
    signed = full.signed_by(deputy(Right.CONTROL))
    assert len(signed) <= MAX_ORDERS_BYTES
    assert Orders.read(signed, AUTHORITY) == full
    with pytest.raises(ValueError, match="no other can be given"):
        full.with_order(Order(1, What.PAUSE)).signed_by(ORGANISER.signer)


def test_a_deputy_needs_the_right():
    made = orders(Order(7, What.END))
    assert Orders.read(made.signed_by(deputy(Right.CONTROL, Right.ENROL)), AUTHORITY) == made
    with pytest.raises(NotSigned, match="no right to"):
        Orders.read(made.signed_by(deputy(Right.ENROL, Right.REMOVE)), AUTHORITY)


@pytest.mark.parametrize(
    ("signed", "says"),
    [
        (lambda: orders(Order(7, What.END)).signed_by(Organiser("run").signer), "not signed by the organiser"),
        (lambda: Orders("other", 1, (Order(7, What.END),)).signed_by(ORGANISER.signer), "is for run 'other'"),
        (lambda: Orders("run", 2**45, (Order(7, What.END),)).signed_by(ORGANISER.signer), "made in the future"),
        (lambda: ORGANISER.remove(), "not signed by the organiser"),
        (lambda: b"", "cannot be read"),
    ],
    ids=["another key", "another run", "the future", "another list", "nothing"],
)
def test_forged_lists_change_nothing(signed, says):
    here = Admission(AUTHORITY)
    with pytest.raises(NotSigned, match=says):
        here.lists.take(ORDERS, signed())
    assert here.lists.orders == Orders("run")
    assert not here.lists.signed(ORDERS)


def test_a_members_key_orders_nothing():
    """Certificates give no right to sign: what a member signs is anybody's."""
    member = Signer(Ed25519PrivateKey.generate())
    ORGANISER.admission(peer_of(subkey_of("ada")))
    with pytest.raises(NotSigned, match="not signed by the organiser"):
        Orders.read(orders(Order(7, What.END)).signed_by(member), AUTHORITY)


def test_a_run_without_an_organiser_takes_no_orders():
    with pytest.raises(NotSigned, match="open to everybody"):
        OPEN.lists.take(ORDERS, orders(Order(7, What.END)).signed_by(ORGANISER.signer))


# ---- which list counts -----------------------------------------------------------------------------------------------


def test_an_older_list_changes_nothing():
    here = Admission(AUTHORITY)
    older = Orders("run").with_order(Order(7, What.PAUSE))
    newer = older.with_order(Order(9, What.RESUME))
    assert here.lists.take(ORDERS, newer.signed_by(ORGANISER.signer))
    assert not here.lists.take(ORDERS, older.signed_by(ORGANISER.signer))
    assert here.lists.orders == newer


@pytest.mark.parametrize(("step", "counts"), [(6, True), (7, False), (50, False)])
def test_what_has_begun_stays_as_it_is(step, counts):
    here = Admission(AUTHORITY)
    here.lists.take(ORDERS, orders(Order(7, What.LEARNING_RATE, 0.5)).signed_by(ORGANISER.signer), step)
    other = Orders("run", 2, (Order(7, What.LEARNING_RATE, 0.25),)).signed_by(ORGANISER.signer)
    if counts:
        assert here.lists.take(ORDERS, other, step), "it was taken back in time"
    else:
        with pytest.raises(NotSigned, match="steps that have begun"):
            here.lists.take(ORDERS, other, step)


def test_who_has_missed_an_order_takes_the_list_all_the_same():
    here, newer = Admission(AUTHORITY), orders(Order(7, What.LEARNING_RATE, 0.5))
    assert here.lists.take(ORDERS, newer.signed_by(ORGANISER.signer), 20)


# ---- what follows from it --------------------------------------------------------------------------------------------


def test_without_orders_all_is_as_the_recipe_says():
    none = Orders("run")
    assert not none.is_paused(50)
    assert none.learning_rate_factor(50) == 1.0
    assert none.target_batch_size(50, 64) == 64
    assert none.total_steps(50, TOTAL) == TOTAL
    assert none.schedule_position(50, TOTAL) == 50
    assert none.digest(50) == b""


def test_each_order_counts_from_its_step_on():
    given = orders(Order(10, What.LEARNING_RATE, 0.5), Order(20, What.TARGET, 128), Order(30, What.LEARNING_RATE, 1))
    assert [given.learning_rate_factor(step) for step in (9, 10, 29, 30)] == [1, 0.5, 0.5, 1]
    assert [given.target_batch_size(step, 64) for step in (19, 20)] == [64, 128]


def test_the_weights_are_tested_every_so_many_updates_until_that_is_taken_back():
    given = orders(Order(10, What.EVALUATE, 50), Order(200, What.EVALUATE, 0))
    assert [given.evaluate_every(step) for step in (9, 10, 199, 200)] == [0, 50, 50, 0]
    assert [str(order) for order in given.given] == [
        "from step 10 on the weights are tested every 50 updates",
        "from step 200 on nobody tests the weights",
    ]


@pytest.mark.parametrize(
    ("given", "paused"),
    [
        ([Order(10, What.PAUSE)], {9: False, 10: True, 11: True}),
        ([Order(10, What.PAUSE), Order(10, What.RESUME)], {9: False, 10: False, 11: False}),
        ([Order(10, What.PAUSE), Order(10, What.RESUME), Order(20, What.PAUSE)], {10: False, 19: False, 20: True}),
        ([Order(10, What.PAUSE), Order(8, What.RESUME)], {9: False, 10: True}),
    ],
    ids=["paused", "resumed", "paused again", "a pause that comes after"],
)
def test_a_pause_lasts_until_it_is_resumed(given, paused):
    made = orders(*given)
    assert {step: made.is_paused(step) for step in paused} == paused


def test_a_run_that_is_ended_is_over_at_that_step():
    made = orders(Order(40, What.END))
    assert [made.total_steps(step, TOTAL) for step in (39, 40)] == [TOTAL, 40]
    assert made.total_steps(math.inf, TOTAL) == 40


def test_an_end_can_be_taken_back():
    made = orders(Order(40, What.END), Order(40, What.EXTEND, 300))
    assert made.total_steps(40, TOTAL) == 300


def test_an_extension_stretches_the_rest_of_the_schedule():
    made = orders(Order(50, What.EXTEND, 150))
    assert [made.schedule_position(step, TOTAL) for step in (0, 49, 50, 100, 150)] == [0, 49, 50, 75, 100]
    again = orders(Order(50, What.EXTEND, 150), Order(100, What.EXTEND, 200))
    assert [again.schedule_position(step, TOTAL) for step in (50, 100, 150, 200)] == [50, 75, 87.5, 100]


def test_members_of_a_round_have_to_know_what_counts_after_it():
    made = orders(Order(10, What.PAUSE))
    assert made.digest(8) == b""
    assert made.digest(9) == made.digest(10) != b""
    assert made.digest(9) != orders(Order(10, What.END)).digest(9)
    later = orders(Order(10, What.PAUSE), Order(99, What.END))
    assert later.digest(9) == made.digest(9), "what comes later does not matter yet"


@pytest.mark.parametrize(
    ("at_step", "what", "value"),
    [
        (0, What.PAUSE, 0),
        (10**9 + 1, What.PAUSE, 0),
        (7, What.PAUSE, 1),
        (7, What.LEARNING_RATE, 0.009),
        (7, What.LEARNING_RATE, 101),
        (7, What.LEARNING_RATE, math.nan),
        (7, What.TARGET, 0),
        (7, What.TARGET, 2**20 + 1),
        (7, What.TARGET, 8.5),
        (7, What.EVALUATE, 0.5),
        (7, What.EVALUATE, 10**6 + 1),
        (7, What.EXTEND, 7),
        (7, What.EXTEND, 10**7 + 1),
        (7, What.EXTEND, math.inf),
    ],
)
def test_an_order_that_makes_no_sense_is_none(at_step, what, value):
    with pytest.raises(ValueError, match=r"\.$"):
        Order(at_step, what, value)
