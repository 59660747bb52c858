"""What one peer measures and follows with `--averaging auto`, and the effect on target, schedule and end."""

import json
import math
from dataclasses import replace

import pytest
from hivemind.p2p import PeerID

from recipe.errors import InputError
from recipe.presets import preset
from swarm.network.signed_records import peer_of
from swarm.peer.callbacks.plan_keeper import PlanKeeper
from swarm.protocol.admission import OPEN
from swarm.protocol.auto_mode import AHEAD, Pace, Plan
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.orders import Order, Orders, What
from swarm.protocol.round_report import RoundReport
from swarm.protocol.wire import LINEAGE_BYTES
from swarm.training.auto_averaging import FEWEST, AutoAveraging
from swarm.training.averaging_mode import Averaging
from swarm.training.run_control import RunControl
from swarm.training.strategy import SwarmStrategy
from tests.helpers.owners import Organiser, subkey_of

PEERS = tuple(PeerID(bytes([18, 32, *[number] * 32])) for number in range(3))


def run_rounds(peers: list[AutoAveraging], steps: range, computing: float, averaging: float) -> None:
    """Run rounds as the peers of one swarm see them: each brings its ticket, and all see the same group."""
    for step in steps:
        tickets = tuple(Ticket(step, 96, False, 1.5, bytes(LINEAGE_BYTES), pace=peer.pace(step)) for peer in peers)
        group = Group.close(bytes(LINEAGE_BYTES), PEERS[: len(peers)], tickets)
        report = RoundReport(group, 1, 1, 1, 1, 0.0, averaging, 0, 0)
        for peer in peers:
            peer.note(report, computing)


def test_a_swarm_changes_after_three_rounds_at_a_stated_step_and_says_so_once(caplog):
    peers = [AutoAveraging(has_float_buffers=True) for _ in PEERS]
    run_rounds(peers, range(FEWEST), 40.0, 100.0)
    assert [peer.plan for peer in peers] == [Plan.first(0)] * 3
    run_rounds(peers, range(FEWEST, FEWEST + 2), 40.0, 100.0)
    assert [peer.plan for peer in peers] == [Plan(2, 0, FEWEST + AHEAD, FEWEST + AHEAD)] * 3
    why = "An average takes 100 s, computing 40 s: four local steps with float32 from step 5 on"
    assert [record.message for record in caplog.records] == [f"{why} (before: one local step with fp16)"] * 3
    assert [peers[0].local_steps(step) for step in (4, 5)] == [1, 4]


def test_a_late_peer_follows_what_most_follow():
    peers = [AutoAveraging(has_float_buffers=True) for _ in range(2)]
    run_rounds(peers, range(10), 40.0, 100.0)
    peers.append(AutoAveraging(has_float_buffers=True))
    assert peers[2].pace(10) == Pace(None)
    run_rounds(peers, range(10, 11), 40.0, 100.0)
    assert peers[2].plan == peers[0].plan
    assert peers[2].local_steps(11) == 4


@pytest.mark.parametrize("step", [0, 500])
def test_one_member_of_the_first_group_does_not_choose_for_all(step):
    peers = [AutoAveraging() for _ in range(2)]
    for peer in peers:
        peer.begin(step)
    paces = [*(peer.pace(step) for peer in peers), Pace(Plan(2, 0, step, 4 * step))]
    tickets = tuple(Ticket(step, 96, False, 1.5, bytes(LINEAGE_BYTES), pace=pace) for pace in paces)
    group = Group.close(bytes(LINEAGE_BYTES), PEERS, tickets)
    for peer in peers:
        peer.met(group)
        assert peer.plan == Plan.first(step)


def test_a_peer_that_begins_alone_and_then_takes_over_a_state_has_nothing_to_say():
    peer, known = AutoAveraging(), AutoAveraging(plan=Plan(2, 0, 20, 20))
    peer.begin(0)
    peer.join()
    assert peer.plan is None
    known.begin(30)
    known.join()
    assert known.plan == Plan(2, 0, 20, 20), "of a checkpoint"


def test_a_peer_does_not_report_what_it_measured_in_another_mode():
    peers = [AutoAveraging(), AutoAveraging()]
    run_rounds(peers, range(FEWEST + 1), 40.0, 100.0)
    changed_at = peers[0].plan.since
    assert peers[0].pace(changed_at - 1).averaging_ms == 100_000
    assert not peers[0].pace(changed_at).is_measured
    run_rounds(peers, range(FEWEST + 1, changed_at + FEWEST), 160.0, 100.0)
    assert peers[0].pace(changed_at + FEWEST).computing_ms == 160_000


def test_a_model_with_running_statistics_gets_no_codec_that_is_too_coarse_for_it():
    peers = [AutoAveraging(has_float_buffers=True), AutoAveraging(has_float_buffers=True)]
    run_rounds(peers, range(FEWEST + 1), 40.0, 62.0)
    assert peers[0].plan.at(100).codec == "none"
    peers = [AutoAveraging(), AutoAveraging()]
    run_rounds(peers, range(FEWEST + 1), 40.0, 62.0)
    assert peers[0].plan.at(100).codec == "int8"


def test_target_schedule_and_end_follow_the_mode():
    auto = AutoAveraging(plan=Plan(2, 0, 20, 20))
    control = RunControl(OPEN, 64, 100, auto)
    assert [control.target(step).samples for step in (19, 20)] == [64, 256]
    assert [control.schedule_position(step) for step in (19, 20, 21)] == [19, 20, 24]
    assert [control.total_steps(step) for step in (5, 25)] == [40, 40]
    assert control.total_steps(math.inf) == 100, "no peer can be further"
    assert (control.is_over(39), control.is_over(40)) == (False, True)


def test_the_organisers_order_of_an_end_counts():
    organiser = Organiser()
    control = RunControl(
        organiser.admission(peer_of(subkey_of("ada"))), 64, 100, AutoAveraging(plan=Plan(2, 0, 20, 20))
    )
    orders = Orders("run").with_order(Order(10, What.TARGET, 32)).with_order(Order(30, What.EXTEND, 200))
    control.take(orders.signed_by(organiser.signer))
    control.look(5)
    assert control.target(25).samples == 4 * 32
    assert (control.total_steps(29), control.total_steps(30)) == (40, 200)


@pytest.mark.parametrize("steps", [Plan.first(7), Plan(2, 0, 20, 20)])
def test_before_and_after_a_group_the_ticket_names_the_same_mode(steps):
    peer = AutoAveraging(plan=steps)
    ticket = Ticket(30, 0, False, 0.0, bytes(LINEAGE_BYTES), pace=peer.pace(30))
    assert ticket.mode.local_steps == peer.local_steps(30)


def test_a_recipe_that_says_auto_begins_with_one_local_step_and_names_no_codec():
    averaging = Averaging.of(replace(preset("digits"), averaging="auto"))
    assert averaging.auto
    assert (averaging.codec.name, averaging.local_steps.steps, averaging.overlaps) == ("fp16", 1, True)
    assert str(averaging) == str(Averaging.named("auto")) == "auto-1.0-0.0-clip"
    with pytest.raises(InputError, match="leave out --codec int8"):
        replace(preset("digits"), averaging="auto", codec="int8")
    with pytest.raises(InputError, match="leave out int8"):
        Averaging.named("auto-int8")


def test_a_checkpoint_knows_what_the_swarm_has_chosen():
    plan, before, after = Plan(2, 0, 20, 20), SwarmStrategy(64, "run", averaging="auto"), SwarmStrategy(64, "run")
    before.plan = plan
    saved = PlanKeeper(before).state_dict()
    PlanKeeper(after).load_state_dict(json.loads(json.dumps(saved)))
    assert after.plan == plan
    PlanKeeper(after).load_state_dict({})
    assert after.plan == plan
