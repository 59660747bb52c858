"""A run whose organiser has ordered something, as the desk shows it."""

import math

import pytest

from swarm.membership.progress_record import JOINING, PAUSED, TRAINING, WAITING
from swarm.protocol.orders import Order, Orders, What


@pytest.fixture(autouse=True)
def unsaved(monkeypatch):
    """Turn off saving. Every other of a night's thousand looks would write all that was seen so far to the disk."""
    monkeypatch.setattr("swarm.desk.desk.SAVE_SECONDS", math.inf)


def ordered(*orders: Order) -> Orders:
    found = Orders("letters")
    for order in orders:
        found = found.with_order(order)
    return found


def look(seen, orders: Orders, step: int, phase: str = PAUSED, after: float = 2.0) -> None:
    seen.now += after
    seen.desk.turn({name: seen.record(name, step, phase=phase) for name in ("ada", "ben")}, orders)


def test_a_paused_run_is_neither_well_nor_ill(seen):
    seen.train("ada", "ben", steps=range(1, 20))
    orders = ordered(Order(19, What.PAUSE))
    for _ in range(700):  # for longer than a run may stand still
        look(seen, orders, 19)
    report = seen.web.get("/api/v1/swarm").json()
    assert (report["level"], report["is_paused"], report["findings"]) == ("paused", True, [])
    assert report["sentence"] == "The run is paused at update 19: no peer computes until its organiser resumes it."
    assert (report["samples_per_second"], report["seconds_left"]) == (0, None)
    page = seen.web.get("/").text
    assert 'class="health paused"' in page
    assert "· paused" in seen.web.get("/badge.svg").text
    assert "swarm_paused 1.0" in seen.web.get("/metrics").text
    assert seen.history.timeline.strips["ada"].strip() == 60 * "p"


HOURS = 8 * 3600


@pytest.mark.parametrize("phase", [PAUSED, TRAINING])  # TRAINING is what a peer that does not pause claims
def test_a_pause_is_no_time_in_which_the_run_stood_still(seen, phase):
    seen.train("ada", "ben", steps=range(1, 20))
    paused = ordered(Order(19, What.PAUSE))
    for _ in range(HOURS // 25):
        look(seen, paused, 19, phase, after=25.0)
    resumed = paused.with_order(Order(19, What.RESUME))
    for step in [19] * 20 + [20] * 5 + [21] * 5 + [22] * 5 + [23]:
        look(seen, resumed, step, TRAINING)
        report = seen.desk.newest.swarm
        assert (report.level, report.findings) == ("good", [])
    assert report.sentence == "All is well: 2 peers train, with an update every 18 s.", "40, 10, 10 and 10 s"
    assert report.seconds_left == pytest.approx(17.5 * 9977)
    assert [round.seconds for round in seen.history.timeline.rounds][-5:] == [2, 42, 10, 10, 10]


@pytest.mark.parametrize("phase", [None, WAITING])
def test_a_night_without_company_is_no_time_in_which_the_run_stood_still(seen, phase):
    seen.train("ada", "ben", steps=range(1, 20))
    for _ in range(HOURS // 25):
        seen.look(*([seen.record("ada", 19, phase=phase)] if phase else []), after=25.0)
    for step in [19] * 20 + [20] * 5 + [21]:
        seen.look(seen.record("ada", step), seen.record("ben", step))
        assert seen.desk.newest.swarm.level == "good"
    assert seen.desk.newest.swarm.updates_per_minute > 2
    assert [round.seconds for round in seen.history.timeline.rounds][-2:] == [42, 10]
    for _ in range(400):
        seen.look(seen.record("ada", 21), seen.record("ben", 21))
    assert seen.desk.newest.swarm.sentence == "No update was made for 13 minutes."


def test_a_peer_that_joins_a_paused_run_does_not_take_it_back(seen):
    seen.train("ada", steps=range(1, 20))
    for _ in range(40):
        seen.now += 2
        here = {"ada": seen.record("ada", 19, phase=PAUSED), "new": seen.record("new", 0, phase=JOINING)}
        seen.desk.turn(here, ordered(Order(19, What.PAUSE)))
    assert seen.history.step == 19


def test_problems_during_a_pause_are_told_all_the_same(seen):
    seen.train("ada", steps=range(1, 20))
    for _ in range(3):
        seen.now += 2
        seen.desk.turn({"ada": seen.record("ada", 19, phase=PAUSED, client_mode=True)}, ordered(Order(19, What.PAUSE)))
    assert "No peer can be called" in seen.web.get("/api/v1/swarm").json()["sentence"]


def test_a_future_pause_and_one_that_is_over_do_not_count_as_a_pause(seen):
    seen.train("ada", "ben", steps=range(1, 20))
    look(seen, ordered(Order(30, What.PAUSE)), 19, "training")
    assert not seen.web.get("/api/v1/swarm").json()["is_paused"]
    look(seen, ordered(Order(19, What.PAUSE), Order(19, What.RESUME)), 19, "training")
    assert not seen.web.get("/api/v1/swarm").json()["is_paused"]


def test_the_run_is_as_long_and_its_batch_as_large_as_ordered(seen):
    seen.train("ada", "ben", steps=range(1, 20))
    look(seen, ordered(Order(10, What.TARGET, 128), Order(40, What.EXTEND, 20_000)), 20, "training")
    report = seen.web.get("/api/v1/swarm").json()
    assert (report["total_steps"], report["target_batch_size"]) == (20_000, 128)
    look(seen, ordered(Order(20, What.END)), 20, "training")
    assert seen.web.get("/api/v1/swarm").json()["is_over"]


def test_orders_stand_among_what_happened_once_and_old_ones_do_not(seen):
    before_the_desk = int(1000 * seen.now) - 1
    first = Orders("letters", given=(Order(5, What.LEARNING_RATE, 0.5, before_the_desk),))
    for found in (Orders("letters"), first):  # the swarm was too busy to hand them over at the first look
        look(seen, found, 10, "training")
    both = first.with_order(Order(30, What.PAUSE))
    for _ in range(2):
        look(seen, both, 10, "training")
    assert [event for event in seen.events if "ordered" in event] == ["The organiser ordered: pause at step 30."]
    look(seen, first, 10, "training")
    assert seen.events[-1] == "An order no longer counts, as its deputy was revoked: pause at step 30."
