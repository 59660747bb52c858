"""Orders of the organiser: which keys may order, which orders of several lists count, and their effect at a step."""

import math
import os
import time

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm.network.signed_records import peer_of
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.certificates import Authority, NotSigned, Right, Signer, warrant
from swarm.protocol.order_book import MAX_BOOK_BYTES, MAX_DEPUTIES, MAX_REVOKED, OrderBook, merged, revoke
from swarm.protocol.orders import MAX_OF_DEPUTY, MAX_ORDERS, Order, Orders, What
from swarm.protocol.signed_lists import ORDERS
from swarm.protocol.wire import to_wire
from tests.helpers.owners import Organiser, subkey_of

ORGANISER = Organiser("run")
AUTHORITY = ORGANISER.authority
TOTAL = 100


def orders(*given: Order) -> Orders:
    return Orders("run", 0, given)


def deputy(*rights: Right, begin: int = 0) -> Signer:
    key = Ed25519PrivateKey.generate()
    allowed = Right(0)
    for right in rights:
        allowed |= right
    signed = warrant(ORGANISER.signer, "run", key.public_key().public_bytes_raw(), allowed, begin, 2**32)
    return Signer(key, signed)


DEPUTY = deputy(Right.CONTROL)


def book(signed: bytes, known: OrderBook | None = None) -> OrderBook:
    return merged(known or OrderBook("run"), signed, AUTHORITY)


# ---- which keys may order --------------------------------------------------------------------------------------------


def test_what_the_organiser_signs_is_read():
    made = Orders("run").with_order(Order(7, What.PAUSE)).with_order(Order(9, What.LEARNING_RATE, 0.3))
    read = book(made.signed_by(ORGANISER.signer))
    assert read.orders.given == made.given
    assert book(read.to_bytes()) == read


def test_a_deputy_needs_the_right():
    made = orders(Order(7, What.END))
    assert book(made.signed_by(deputy(Right.CONTROL, Right.ENROL))).orders.given == made.given
    with pytest.raises(NotSigned, match="no right to"):
        book(made.signed_by(deputy(Right.ENROL, Right.REMOVE)))


@pytest.mark.parametrize(
    ("signed", "says"),
    [
        (lambda: orders(Order(7, What.END)).signed_by(Organiser("run").signer), "not signed by the organiser"),
        (lambda: Orders("other", 0, (Order(7, What.END),)).signed_by(ORGANISER.signer), "not signed by the organiser"),
        (lambda: orders(Order(7, What.END, 0, 2**42 - 1)).signed_by(ORGANISER.signer), "made in the future"),
        (lambda: orders(Order(7, What.END, 0, 1)).signed_by(deputy(Right.CONTROL, begin=9)), "whose warrant begins on"),
        (lambda: orders(Order(7, What.END, 0, 0)).signed_by(deputy(Right.CONTROL, begin=9)), "whose warrant begins on"),
        (lambda: ORGANISER.remove(), "cannot be read"),
        (lambda: b"", "cannot be read"),
    ],
    ids=["another key", "another run", "the future", "before the warrant", "dated 0", "another list", "nothing"],
)
def test_forged_lists_change_nothing(signed, says):
    here = Admission(AUTHORITY)
    with pytest.raises(NotSigned, match=says):
        here.lists.take(ORDERS, signed())
    assert here.lists.orders == Orders("run")
    assert not here.lists.signed(ORDERS)


def test_a_members_key_orders_nothing():
    """Certificates give no right to sign, so a list that a member signs counts no more than a stranger's."""
    member = Signer(Ed25519PrivateKey.generate())
    ORGANISER.admission(peer_of(subkey_of("ada")))
    with pytest.raises(NotSigned, match="not signed by the organiser"):
        book(orders(Order(7, What.END)).signed_by(member))


def test_a_run_without_an_organiser_takes_no_orders():
    with pytest.raises(NotSigned, match="open to everybody"):
        OPEN.lists.take(ORDERS, orders(Order(7, What.END)).signed_by(ORGANISER.signer))


# ---- which orders of several lists count -----------------------------------------------------------------------------


def test_orders_that_are_known_already_change_nothing():
    here = Admission(AUTHORITY)
    older = Orders("run").with_order(Order(7, What.PAUSE))
    newer = older.with_order(Order(9, What.RESUME))
    assert here.lists.take(ORDERS, newer.signed_by(ORGANISER.signer))
    assert not here.lists.take(ORDERS, older.signed_by(ORGANISER.signer))
    assert here.lists.orders.given == newer.given


@pytest.mark.parametrize("first", [0, 1])
def test_two_orders_given_at_the_same_moment_both_count_whichever_comes_first(first):
    before = orders(Order(5, What.PAUSE, 0, 100))
    signed = [
        Orders("run", 0, (*before.given, Order(5, What.RESUME, 0, 200))).signed_by(ORGANISER.signer),
        orders(Order(5, What.TARGET, 64, 200)).signed_by(DEPUTY),
    ]
    here, there = Admission(AUTHORITY).lists, Admission(AUTHORITY).lists
    for lists, order in ((here, signed), (there, signed[::-1])):
        numbers = [lists.number(ORDERS)]
        for one in order:
            assert lists.take(ORDERS, one)
            numbers.append(lists.number(ORDERS))
        assert numbers == sorted(set(numbers)), "other processes see that there is something new"
    assert here.signed(ORDERS) == there.signed(ORDERS)
    assert here.orders.digest(5) == there.orders.digest(5)
    assert not here.orders.is_paused(5)
    assert here.orders.target_batch_size(5, 32) == 64


def test_of_two_orders_for_a_step_the_one_that_was_given_later_counts():
    made = [orders(Order(7, What.LEARNING_RATE, rate, given_at)) for rate, given_at in ((0.5, 20), (0.25, 10))]
    known = OrderBook("run")
    for one in made:
        known = book(one.signed_by(ORGANISER.signer), known)
    assert known.orders.learning_rate_factor(7) == 0.5
    later = known.orders.with_order(Order(7, What.LEARNING_RATE, 2.0)).given[-1]
    assert later.given_at > time.time() * 1000 - 60_000
    ahead = orders(Order(7, What.PAUSE, 0, 2**41)).with_order(Order(7, What.RESUME))
    assert ahead.given[-1].given_at == 2**41 + 1, "also where this clock is behind that of the last order"


def test_a_deputy_that_gives_too_many_orders_takes_none_from_others():
    own = orders(*(Order(7, What.LEARNING_RATE, 1 + n / 100, n) for n in range(MAX_ORDERS))).signed_by(ORGANISER.signer)
    rogue = [Order(9, What.LEARNING_RATE, 0.5, 1000 + n) for n in range(2 * MAX_OF_DEPUTY)]
    halves = [orders(*half).signed_by(DEPUTY) for half in (rogue[MAX_OF_DEPUTY:], rogue[:MAX_OF_DEPUTY])]
    known = book(own, OrderBook("run"))
    for half in halves:
        before = known.orders.number
        known = book(half, known)
        assert known.orders.number > before
    assert len(known.given_by(ORGANISER.signer.public_key)) == MAX_ORDERS
    assert [order.order.given_at for order in known.given_by(DEPUTY.public_key)] == [*range(1000, 1000 + MAX_OF_DEPUTY)]
    assert known.number_left(DEPUTY) == known.number_left(ORGANISER.signer) == 0
    assert book(halves[1], book(halves[0], book(own))) == book(own, book(halves[1], book(halves[0]))) == known


def test_the_fullest_book_fits_and_takes_no_further_deputy():
    known = book(
        orders(*(Order(10**9 - 1, What.LEARNING_RATE, 0.1, n) for n in range(MAX_ORDERS))).signed_by(ORGANISER.signer)
    )
    deputies = [deputy(Right.CONTROL, begin=begin) for begin in range(MAX_DEPUTIES + 1)]
    for one in deputies:
        given = (Order(10**9 - 1, What.LEARNING_RATE, 0.1, 2**41 - n) for n in range(MAX_OF_DEPUTY))
        known = merged(known, orders(*given).signed_by(one), AUTHORITY, 2**41 / 1000)
    for one in deputies[:-1]:
        known = known.with_all(revoke(one.public_key, known.given_by(one.public_key), ORGANISER.signer, AUTHORITY))
    for _ in range(MAX_REVOKED):
        known = known.with_all(revoke(os.urandom(32), known.given[:MAX_OF_DEPUTY], ORGANISER.signer, AUTHORITY))
    assert len(known.given) == MAX_ORDERS + MAX_DEPUTIES * MAX_OF_DEPUTY
    assert known.number_left(deputies[-1]) == 0
    assert not known.given_by(deputies[-1].public_key), "the earliest deputies come first"
    assert len(known.to_bytes()) <= MAX_BOOK_BYTES
    assert known.orders.number < 2**63


def test_an_order_takes_one_place_however_its_warrant_is_written():
    """A peer that passes an order on can write its warrant in other ways, or name another warrant of that deputy."""
    given = orders(Order(7, What.PAUSE, 0, 10_000), Order(9, What.RESUME, 0, 20_000))
    known = book(given.signed_by(DEPUTY))
    renewed = Signer(DEPUTY.key, warrant(ORGANISER.signer, "run", DEPUTY.public_key, Right.CONTROL, 1, 2**32))
    assert book(given.signed_by(renewed), known).orders.given == given.given
    assert book(given.signed_by(DEPUTY), book(given.signed_by(renewed))) == book(given.signed_by(renewed), known)
    written_longer = Signer(DEPUTY.key, b"\xdc\x00\x03" + DEPUTY.warrant[1:])
    with pytest.raises(NotSigned, match="written in another way"):
        book(given.signed_by(written_longer), known)


# ---- a deputy that is revoked ----------------------------------------------------------------------------------------


def test_the_orders_of_a_revoked_deputy_that_the_organiser_names_count():
    given = orders(Order(7, What.PAUSE, 0, 10), Order(90, What.END, 0, 20)).signed_by(DEPUTY)
    known = book(given, book(orders(Order(8, What.TARGET, 64, 15)).signed_by(ORGANISER.signer)))
    kept = [order for order in known.given_by(DEPUTY.public_key) if order.order.at_step == 7]
    revocation = revoke(DEPUTY.public_key, kept, ORGANISER.signer, AUTHORITY)
    after = known.with_all(revocation)
    assert after.orders.number > known.orders.number
    assert after.orders.given == (Order(7, What.PAUSE), Order(8, What.TARGET, 64))
    assert after.orders.revoked == {DEPUTY.public_key}
    assert not book(given).with_all(revoke(DEPUTY.public_key, [], ORGANISER.signer, AUTHORITY)).given
    backdated = orders(Order(9, What.END, 0, 1)).signed_by(DEPUTY)
    for later in (given, backdated):
        assert book(later, after) == after, "whatever it signs, and whenever it says it did"
    assert book(backdated, book(given)).with_all(revocation) == book(revocation.to_bytes(), book(given)), (
        "a peer that hears of the revocation last knows the same"
    )


@pytest.fixture
def checks(monkeypatch) -> list[bytes]:
    """The data of which signatures of orders have been checked."""
    checked, read = [], Authority.read

    def noted(authority: Authority, kind: str, data: bytes, *rest):
        checked.append(data)
        return read(authority, kind, data, *rest)

    monkeypatch.setattr(Authority, "read", noted)
    return checked


def pairs(signed: bytes) -> list[tuple[bytes, bytes]]:
    """The orders of the only key that has given some in this list."""
    ((_, found),) = msgspec.msgpack.decode(signed)[1]
    return found


def test_orders_that_do_not_count_are_not_checked_again_and_again(checks):
    """A peer that keeps one order of a revoked deputy can pass it on 700 times in a list, as often as it likes."""
    rogue = deputy(Right.CONTROL)
    (dropped,) = pairs(orders(Order(7, What.END, 0, 10)).signed_by(rogue))
    known = OrderBook("run").with_all(revoke(rogue.public_key, [], ORGANISER.signer, AUTHORITY))
    checks.clear()
    for groups in ([[dropped] * 700], [[dropped] * 200] * 3, [[dropped] * MAX_OF_DEPUTY, [dropped]]):
        with pytest.raises(NotSigned, match=r"than count|in two places|cannot be read"):
            book(to_wire([], [(rogue.warrant, group) for group in groups]), known)
    assert book(to_wire([], [(rogue.warrant, [dropped] * MAX_OF_DEPUTY)]), known) is known
    assert not checks


def test_orders_beyond_those_that_count_are_checked_once(checks):
    rogue = deputy(Right.CONTROL)
    given = [Order(9, What.LEARNING_RATE, 0.5, 1000 + n) for n in range(2 * MAX_OF_DEPUTY)]
    first, late = orders(*given[:MAX_OF_DEPUTY]).signed_by(rogue), orders(*given[MAX_OF_DEPUTY:]).signed_by(rogue)
    known = book(late, book(first))
    assert len(checks) == 2 * MAX_OF_DEPUTY
    for one in (late, first, to_wire([], [(rogue.warrant, pairs(late)[::-1])])):
        assert book(one, known) == known
    repeated = [pairs(late)[0]] * MAX_OF_DEPUTY
    assert book(to_wire([], [(rogue.warrant, repeated)]), known) == known
    assert len(checks) == 2 * MAX_OF_DEPUTY


def test_the_warrant_of_forty_orders_is_checked_once(monkeypatch):
    checked = []
    rogue = deputy(Right.CONTROL)
    signed = orders(*(Order(9, What.PAUSE, 0, n) for n in range(MAX_OF_DEPUTY))).signed_by(rogue)

    class Noted:
        @staticmethod
        def from_public_bytes(key: bytes):
            checked.append(key)
            return Ed25519PublicKey.from_public_bytes(key)

    monkeypatch.setattr("swarm.protocol.certificates.Ed25519PublicKey", Noted)
    assert len(book(signed).given) == MAX_OF_DEPUTY
    assert checked.count(ORGANISER.signer.public_key) == 1
    assert checked.count(rogue.public_key) == MAX_OF_DEPUTY


def test_no_key_but_the_organisers_revokes():
    with pytest.raises(NotSigned, match="only the organiser's own key"):
        revoke(DEPUTY.public_key, [], DEPUTY, AUTHORITY)
    with pytest.raises(NotSigned, match="not signed by the organiser"):
        revoke(DEPUTY.public_key, [], Organiser("run").signer, AUTHORITY)
    of_another_run = Authority("other", ORGANISER.signer.public_key, "run")
    with pytest.raises(NotSigned, match="not signed by the organiser"):
        book(revoke(DEPUTY.public_key, [], ORGANISER.signer, of_another_run).to_bytes())


# ---- the effect of orders --------------------------------------------------------------------------------------------


def test_the_recipe_counts_where_there_are_no_orders():
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


def test_the_weights_are_tested_every_so_many_updates_until_the_order_is_taken_back():
    given = orders(Order(10, What.EVALUATE, 50), Order(200, What.EVALUATE, 0))
    assert [given.evaluate_every(step) for step in (9, 10, 199, 200)] == [0, 50, 50, 0]
    assert [str(order) for order in given.given] == [
        "from step 10 on the weights are tested every 50 updates",
        "from step 200 on no peer tests the weights",
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


def test_members_of_a_round_have_to_know_which_orders_count_after_it():
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
