"""Which order makes sense where a run is: from which step it counts, and what is refused in a sentence."""

import math
from dataclasses import replace

import pytest

from recipe.errors import InputError
from recipe.presets import digits
from swarm.membership.control import giving
from swarm.membership.control.giving import Situation
from swarm.membership.progress_record import JOINING, PAUSED, TRAINING, PeerProgress
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from swarm.network.signed_records import peer_of
from swarm.protocol.orders import Order, Orders, What
from tests.helpers.owners import subkey_of
from tests.helpers.records import FakeDHT

MANIFEST = RunManifest(PROTOCOL, "digits", digits())
TOTAL, TARGET = MANIFEST.recipe.total_steps, MANIFEST.recipe.target_batch_size


def situation(step: int, *given: Order, updates_per_second: float = 0.1, phase: str = TRAINING) -> Situation:
    """A situation in which two peers are at this step, and a third claims to be far ahead."""
    rate = updates_per_second * TARGET / 3
    steps = {"ada": step, "ben": step, "eve": step + 1000}
    records = {
        peer_of(subkey_of(name)): PeerProgress(name, at, 0, rate, 0.0, 0.0, False, phase) for name, at in steps.items()
    }
    return Situation(MANIFEST, Orders("digits", 1, given), records)


def test_an_order_counts_in_half_a_minute():
    assert situation(10).order(What.LEARNING_RATE, 0.5).at_step == 13
    assert situation(10, updates_per_second=0.001).order(What.PAUSE).at_step == 12, "two updates at least"


def test_one_member_that_claims_a_great_pace_moves_no_order_out_of_reach():
    here = situation(10, updates_per_second=0.01)
    records = {
        peer: replace(record, rate=1e7) if record.name == "eve" else record for peer, record in here.records.items()
    }
    assert Situation(MANIFEST, here.orders, records).order(What.PAUSE).at_step < 20


def test_a_joiner_that_has_no_state_yet_draws_no_order_into_the_past():
    (ada, hers), (ben, his), _ = situation(10, updates_per_second=0.27).records.items()
    joiner = replace(his, step=0, rate=0.0, phase=JOINING)
    here = Situation(MANIFEST, Orders("digits"), {ada: hers, ben: joiner})
    assert (here.step, here.nearest) == (10, 12)
    assert here.order(What.LEARNING_RATE, 0.5).at_step == 13
    alone = Situation(MANIFEST, Orders("digits"), {ben: joiner})
    assert alone.step == 0, "no other peer is there"


def test_where_a_run_is_paused_an_order_counts_at_once():
    here = situation(10, Order(10, What.PAUSE), phase=PAUSED)
    assert here.is_paused
    assert here.order(What.RESUME) == Order(10, What.RESUME)
    assert here.order(What.TARGET, 128).at_step == 10


def test_an_order_that_does_not_count_yet_can_be_taken_back():
    assert situation(10, Order(20, What.PAUSE)).order(What.RESUME) == Order(20, What.RESUME)
    back = situation(10, Order(20, What.END)).order(What.EXTEND, TOTAL)
    assert back == Order(20, What.EXTEND, TOTAL)


def test_an_extension_late_in_the_run_counts_at_its_end():
    assert situation(TOTAL - 2).order(What.EXTEND, 2 * TOTAL).at_step == TOTAL


def test_where_one_update_may_count_for_four_an_extension_comes_before_the_earliest_end():
    auto = RunManifest(PROTOCOL, "digits", replace(digits(), averaging="auto"))

    def at(step: int, *given: Order) -> Situation:
        return Situation(auto, Orders("digits", 1, given), situation(step, updates_per_second=1.0).records)

    assert at(2).order(What.EXTEND, 2 * TOTAL).at_step == TOTAL // 4
    more = at(40).order(What.EXTEND, TOTAL - 1)
    assert more == Order(42, What.EXTEND, TOTAL - 1), "later the run may have ended"
    assert math.isnan(at(40).seconds_until(more))
    assert at(42).seconds_until(more) == 0
    with pytest.raises(InputError, match="has 100 updates already"):
        at(40, Order(30, What.EXTEND, 100)).order(What.EXTEND, 99)


def test_seconds_until_an_order_counts():
    here = situation(10, updates_per_second=0.1)
    assert here.seconds_until(Order(13, What.PAUSE)) == pytest.approx(30)
    assert here.seconds_until(Order(10, What.PAUSE)) == 0
    assert math.isnan(situation(10, updates_per_second=0.0).seconds_until(Order(13, What.PAUSE)))


@pytest.mark.parametrize(
    ("given", "wanted", "says"),
    [
        ([], (What.PAUSE, 0, 11), "give --at-step 12 or more"),
        ([], (What.PAUSE, 0, 3), "The swarm is at step 10"),
        ([], (What.END, 0, TOTAL), f"The run ends at step {TOTAL}, and this order would count from step {TOTAL} on"),
        (
            [Order(20, What.END)],
            (What.END, 0, 30),
            "The run ends at step 20, and this order",
        ),
        ([], (What.EXTEND, TOTAL, None), "updates already: extend it to more than that"),
        ([], (What.EXTEND, 2 * TOTAL, TOTAL + 1), "extend it from an earlier step on"),
        ([], (What.RESUME, 0, None), "no pause is coming"),
        ([Order(9, What.PAUSE)], (What.PAUSE, 0, None), "is paused at step 10 already"),
        (
            [Order(9, What.PAUSE)],
            (What.RESUME, 0, 20),
            "after step 10, where it is paused, so it never reaches step 20: leave out --at-step",
        ),
        (
            [Order(15, What.PAUSE)],
            (What.RESUME, 0, 20),
            "after step 15, where it is paused, so it never reaches step 20: leave out --at-step",
        ),
        ([Order(11, What.PAUSE)], (What.RESUME, 0, None), "wait until the run is paused, then resume it"),
        ([], (What.LEARNING_RATE, 1000, None), "give 0.01 to 100"),
        ([], (What.TARGET, math.inf, None), "give 1 to"),
    ],
)
def test_an_order_that_would_do_nothing_is_refused(given, wanted, says):
    with pytest.raises(InputError, match=says):
        situation(10, *given).order(*wanted)


def test_an_order_is_refused_where_no_peer_is_there():
    with pytest.raises(InputError, match="No peer trains run digits now"):
        Situation(MANIFEST, Orders("digits"), {}).order(What.PAUSE)


def test_a_refusal_where_no_peer_answers_any_more_says_that_this_may_be_so():
    dht = FakeDHT()
    dht.knows_others = False
    with pytest.raises(InputError, match="too busy to answer, or none answers any more"):
        giving.situation(dht, MANIFEST)
