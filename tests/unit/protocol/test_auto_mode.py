"""What a round's tickets decide about codec and local steps.

It is the same for all members, and no minority moves it.
"""

import itertools

import pytest

from swarm.averaging.compression.codec import Codec
from swarm.protocol.auto_mode import (
    AHEAD,
    APART,
    MODES,
    MOST_LOCAL_STEPS,
    Choice,
    Pace,
    Plan,
    choose,
    plan_of,
    table_for,
)
from swarm.protocol.messages import MAX_LINE_KBPS, MAX_TICKET_BYTES, TICKET_NONCE_BYTES, Ticket
from swarm.protocol.wire import LINEAGE_BYTES, MAX_SAMPLES, MAX_STEP

CODECS, NO_INT8 = ("none", "fp16", "int8"), ("none", "fp16")
FIRST = Plan.first(0)


def pace(computing: float, averaging: float, plan: Plan | None = FIRST) -> Pace:
    return Pace(plan, round(1000 * computing), round(1000 * averaging))


def change(paces, plan: Plan = FIRST, step: int = 100, codecs=CODECS) -> Choice | None:
    return choose(plan, step, paces, codecs)


def test_the_table_goes_from_most_bytes_for_a_sample_to_fewest_and_says_how_many_there_are():
    sizes = [mode.bytes_per_sample for mode in MODES]
    assert sizes == sorted(sizes, reverse=True)
    for mode in MODES:
        assert mode.bytes_per_number == pytest.approx(Codec(mode.codec).payload_bytes([(2**20,)]) / 2**20)


@pytest.mark.parametrize("lie", [Plan(0, 2, 10**9, 10**9), Plan(1, 0, 8, 8), Plan(0, 2, 5, 5)])
def test_a_plan_that_no_member_can_follow_at_this_step_does_not_count(lie):
    """It would move the schedule before its start, or end the run. In the first group no other plan may be named."""
    assert plan_of([None, Pace(None), Pace(lie)], 4) == Plan.first(4)
    assert plan_of([Pace(lie), Pace(lie), Pace(FIRST)], 4) == FIRST


def test_a_plan_is_possible_from_the_round_after_its_choice_on():
    plan = Plan(2, 0, 0, 0)
    for step in range(100, 1000, 50):
        plan = Plan((step // 50) % 3, plan.mode, step + AHEAD, plan.position_at(step + AHEAD))
        assert all(plan.is_possible_at(at) for at in range(step + 1, step + 60))


def test_nothing_is_changed_where_averages_are_shorter_than_computing_or_short_at_all():
    assert change([pace(40, 40)] * 3) is None
    assert change([pace(0.2, 0.9)] * 3) is None, "that is a matter of round trips"


@pytest.mark.parametrize(
    ("averaging", "codecs", "row"), [(62, CODECS, 1), (1000, CODECS, 1), (62, NO_INT8, 2), (1000, NO_INT8, 2)]
)
def test_the_first_mode_that_is_fast_enough_is_taken_else_the_last(averaging, codecs, row):
    choice = change([pace(40, averaging)] * 3, codecs=codecs)
    assert choice.plan == Plan(row, 0, 100 + AHEAD, 100 + AHEAD)
    assert (choice.computing_seconds, choice.averaging_seconds) == (40, averaging)


def test_it_is_said_in_one_sentence():
    said = str(change([pace(40, 62)] * 3))
    assert said == "An average takes 62 s, computing 40 s: one local step with int8 from step 102 on"
    said = str(change([pace(40, 62)] * 3, codecs=NO_INT8))
    assert said == "An average takes 62 s, computing 40 s: four local steps with float32 from step 102 on"


def test_a_mode_that_saves_next_to_nothing_is_not_gone_to():
    assert table_for(CODECS) == [0, 1]
    assert table_for(NO_INT8) == [0, 2]
    assert change([pace(40, 400, Plan(1, 0, 5, 5))] * 3, Plan(1, 0, 5, 5)) is None


def test_more_bytes_come_back_only_where_they_leave_time_to_spare():
    plan = Plan(1, 0, 50, 50)
    as_fp16 = MODES[0].bytes_per_number / MODES[1].bytes_per_number
    assert change([pace(40, 0.99 * 40 / as_fp16, plan)] * 3, plan) is None, "it would take nearly as long"
    assert change([pace(40, 0.69 * 40 / as_fp16, plan)] * 3, plan).plan == Plan(0, 1, 102, 102)


@pytest.mark.parametrize("codecs", [CODECS, NO_INT8])
def test_a_change_is_not_taken_back_on_the_same_line(codecs):
    """Whatever time an average takes on a line, the mode of the first change stays."""
    for seconds_of_fp16 in range(2, 200, 3):
        plan, changes = FIRST, 0
        for step in range(0, 500):
            mode = plan.at(step)
            averaging = seconds_of_fp16 * mode.bytes_per_number / MODES[0].bytes_per_number
            choice = change([pace(30.0 * mode.local_steps, averaging, plan)] * 3, plan, step, codecs)
            if choice is not None:
                plan, changes = choice.plan, changes + 1
        assert changes <= 1


@pytest.mark.parametrize("codecs", [CODECS, NO_INT8])
@pytest.mark.parametrize("seconds", [1.1, 12.0, 35.0])
def test_a_change_is_not_taken_back_where_an_average_waits_for_round_trips_and_not_for_bytes(codecs, seconds):
    plan, changes = FIRST, 0
    for step in range(0, 500):
        computing = seconds / 1.2 * plan.at(step).local_steps
        choice = change([pace(computing, seconds, plan)] * 3, plan, step, codecs)
        if choice is not None:
            plan, changes = choice.plan, changes + 1
    assert changes <= 1


def test_changes_are_apart():
    plan = Plan(1, 0, 50, 50)
    fast = [pace(40, 4, plan)] * 3
    assert change(fast, plan, 50 + APART - 1) is None
    assert change(fast, plan, 50 + APART).plan.mode == 0
    assert change([pace(40, 62)] * 3, FIRST, 3) is not None, "the first one need not wait"


@pytest.mark.parametrize("members", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("lie", [pace(0.001, 10**6), pace(10**6, 0.001), pace(0.001, 0.001), Pace(FIRST), None])
def test_fewer_than_half_of_the_members_change_nothing_by_lies(members, lie):
    liars = (members - 1) // 2
    honest = [pace(40 + number, 38 + number) for number in range(members - liars)]
    assert change(honest + [lie] * liars) is None


@pytest.mark.parametrize("lie", [pace(0.001, 10**6), pace(10**6, 0.001)])
def test_one_of_two_cannot_bring_about_a_change(lie):
    assert change([pace(40, 39), lie]) is None
    plan = Plan(1, 0, 50, 50)
    assert change([pace(40, 30, plan), lie], plan) is None


@pytest.mark.parametrize("lie", [pace(0.001, 10**6), pace(10**6, 0.001)])
def test_a_liar_cannot_prevent_a_change_among_three(lie):
    assert change([pace(40, 62), pace(41, 60), lie]).plan.mode == 1


def test_a_change_needs_measurements_of_more_than_half_of_the_members():
    assert change([pace(40, 62), Pace(FIRST), Pace(FIRST)]) is None
    assert change([pace(40, 62), pace(40, 62), None]) is not None


def test_the_plan_of_most_members_counts_whatever_their_order():
    new, old = Plan(1, 0, 90, 90), FIRST
    paces = [pace(1, 1, new), pace(1, 1, new), pace(1, 1, old), Pace(None), None]
    assert {plan_of(order, 100) for order in itertools.permutations(paces)} == {new}
    assert plan_of([pace(1, 1, new), pace(1, 1, old)], 100) == old, "one of two cannot say that there was a change"
    assert plan_of([Pace(None), None], 100) == Plan.first(100)


def test_an_update_of_four_local_steps_counts_for_four_of_the_recipe():
    plan = Plan(2, 0, 20, 20)
    assert [plan.at(step).local_steps for step in (19, 20, 21)] == [1, 4, 4]
    assert [plan.position_at(step) for step in (18, 19, 20, 21, 30)] == [18, 19, 20, 24, 60]
    assert [plan.step_at(position) for position in (18, 20, 21, 24, 60)] == [18, 20, 21, 21, 30]
    back = Plan(0, 2, 40, plan.position_at(40))
    assert [back.position_at(step) for step in (39, 40, 41)] == [96, 100, 101]
    assert back.step_at(back.position_at(55)) == 55


def test_a_ticket_carries_a_pace_and_stays_small():
    largest = Plan(2, 1, MAX_STEP // MOST_LOCAL_STEPS, 10**9)
    ticket = Ticket(
        *(
            MAX_STEP,
            MAX_SAMPLES,
            True,
            1.5,
            bytes(LINEAGE_BYTES),
            (0.5,) * 16,
            True,
            bytes(8),
            bytes(16),
            bytes(16),
            MAX_STEP,
        ),
        Pace(largest, 10**9, 10**9),
        MAX_LINE_KBPS,
        bytes(16),
        bytes(16),
        bytes(TICKET_NONCE_BYTES),
    )
    assert Ticket.from_bytes(ticket.to_bytes()) == ticket
    assert len(ticket.to_bytes()) <= MAX_TICKET_BYTES


@pytest.mark.parametrize("plan", [(3, 0, 5, 5), (0, 0, 5, 4), (0, 0, 5, 21), (0, 0, -1, 0), (0, 0, 5)])
def test_a_plan_that_cannot_be_is_refused(plan):
    ticket = Ticket(7, 96, False, 1.5, bytes(LINEAGE_BYTES), pace=(plan, 1, 1))
    with pytest.raises(ValueError, match="cannot be read"):
        Ticket.from_bytes(ticket.to_bytes())
