"""What a desk remembers: peers that come and go, curves of a bounded size, and a file that survives a restart."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from swarm.desk.history import MAX_EVENTS, MAX_NAMES, MAX_PEERS, MAX_POINTS, remembered_addresses
from swarm.membership.progress_record import JOINING
from swarm.protocol.notes import Score


def test_a_peer_that_falls_silent_is_lost_and_one_that_says_so_has_left(seen):
    seen.train("ada", "ben", "eve", steps=range(3))
    silent = seen.record("ben", 2)
    for _ in range(4):
        seen.look(seen.record("ada", 3), silent)
    assert {name: peer.state for name, peer in seen.history.peers.items()} == {
        "ada": "here",
        "ben": "lost",
        "eve": "left",
    }
    assert seen.events[1:] == ["eve left.", "ben was lost: no record for more than 5 s."]
    seen.look(seen.record("ada", 4), seen.record("ben", 4))
    assert seen.events[-1] == "ben came back."
    assert [*seen.history.shown(seen.now)] == ["ada", "ben", "eve"]
    seen.look(seen.record("ada", 5), after=4000)
    assert "eve" not in seen.history.shown(seen.now), "it went more than an hour ago"


def test_a_peer_is_not_lost_because_one_record_is_missing(seen):
    seen.train("ada", "ben", steps=range(2))
    seen.look(seen.record("ada", 2))
    seen.train("ada", "ben", steps=range(3, 5))
    assert len(seen.events) == 1


def test_no_peer_is_lost_because_the_desk_did_not_look(seen):
    seen.train("ada", steps=range(2))
    old = seen.record("ada", 1)
    seen.look(replace(old, time=seen.now), after=600)
    assert seen.history.peers["ada"].state == "here"
    seen.look(after=1)
    seen.look(after=1)
    assert seen.events[-1] == "ada left."


@pytest.mark.parametrize("seconds", [4, 6, 10])
def test_a_desk_with_a_clock_that_is_set_forward_loses_no_peer(seen, seconds):
    seen.train("ada", "ben", steps=range(3))
    for step in range(3, 100):
        seen.now += seconds * (step == 3)
        late = 2 * (step == 90)  # one record is read a look later than usual
        seen.look(*(seen.record(name, step, behind_seconds=seconds + late) for name in ("ada", "ben")))
    assert len(seen.events) == 1
    assert [peer.state for peer in seen.history.peers.values()] == ["here", "here"]


def test_a_desk_with_a_clock_that_is_set_back_goes_on_as_before(seen):
    seen.train("ada", "ben", "cy", steps=range(20))
    silent, num_points = seen.record("cy", 19), len(seen.history.points)
    before, pace = given(seen), seen.history.updates_per_minute(seen.now)
    seen.look(seen.record("ada", 22), seen.record("ben", 22), silent, after=-60)
    credited = [samples - before[name] for name, samples in given(seen).items()]
    assert min(credited) >= 0
    assert sum(credited) == pytest.approx(64), "after an unknown time, an update's worth is believed"
    for step in range(23, 27):
        seen.look(*(seen.record(name, step, behind_seconds=-60) for name in ("ada", "ben")), silent)
    assert seen.events[1:] == ["cy was lost: no record for more than 5 s."]
    times = [point.time for point in seen.history.points]
    assert len(times) == num_points + 4, "one at each later look"
    assert times == sorted(times)
    assert seen.history.updates_per_minute(seen.now) == pytest.approx(pace, rel=0.2)
    assert min(made.seconds for made in seen.history.timeline.rounds) >= 0
    assert seen.history.still_seconds(seen.now + 30) == 30


def given(seen) -> dict[str, float]:
    return {peer.name: peer.samples for peer in seen.history.peers.values()}


def test_a_desk_with_a_clock_that_is_set_back_writes_its_history_down(seen):
    seen.train("ada", steps=range(3))
    seen.desk.save()
    seen.look(seen.record("ada", 3), after=-3600)
    assert json.loads(seen.path.read_text())["step"] == 3


def test_a_peer_with_a_clock_that_is_set_back_is_there_again_after_some_seconds(seen):
    seen.train("ada", "ben", steps=range(3))
    for step in range(3, 100):
        seen.look(seen.record("ada", step, behind_seconds=6), seen.record("ben", step))
    assert seen.events[1:] == ["ada was lost: no record for more than 5 s.", "ada came back."]


def test_one_peer_that_claims_to_be_ahead_moves_nothing(seen):
    seen.train("ada", "ben", steps=range(7, 9))
    seen.look(seen.record("ada", 9), seen.record("ben", 9), seen.record("liar", 10**6))
    seen.look(seen.record("ada", 10), seen.record("ben", 10), seen.record("new", 0, phase=JOINING))
    assert seen.history.step == 10


def test_one_of_two_peers_that_claims_to_be_ahead_ends_no_run(seen):
    seen.train("ada", steps=range(7, 9))
    seen.look(seen.record("ada", 9), seen.record("liar", 10**6))
    assert seen.history.step == 9


def test_impossible_losses_are_left_out_and_the_page_is_there_all_the_same(seen):
    for loss in (1.7e308, -1.7e308, 5e-324, -1000.0, 0.0):
        seen.look(seen.record("ada", 1), seen.record("liar", 1, loss=loss))
        seen.look(seen.record("liar", 1, loss=loss))
        assert seen.web.get("/").status_code == 200
    assert seen.history.lowest_loss >= 0


def test_a_run_that_began_again_at_an_earlier_update_is_followed(seen):
    seen.train("ada", "ben", steps=range(50, 53), loss=0.4)
    seen.train("ada", "ben", steps=range(20, 25), seconds=20, loss=2.3)
    assert seen.history.step == 24
    assert "The run went back from update 52 to 24." in seen.events
    assert seen.desk.newest.swarm.level == "good", "earlier weights have a higher loss"


def test_samples_are_credited_by_pace_and_not_for_updates_that_the_desk_did_not_see(seen):
    seen.look(seen.record("ada", 1, rate=30), seen.record("ben", 1, rate=10))
    seen.look(seen.record("ada", 3, rate=30), seen.record("ben", 3, rate=10))
    assert [peer.samples for peer in seen.history.peers.values()] == [96, 32], "two updates of 64 samples"
    seen.look(seen.record("ada", 10**6, rate=30), seen.record("ben", 10**6, rate=10))
    assert sum(peer.samples for peer in seen.history.peers.values()) < 512, "no peer can have computed so much"
    before = [peer.samples for peer in seen.history.peers.values()]
    seen.look(seen.record("ada", 10**7, rate=30), seen.record("ben", 10**7, rate=10), after=3600)
    assert [peer.samples for peer in seen.history.peers.values()] == before


def test_the_pace_is_that_of_the_last_updates_and_falls_when_none_comes(seen):
    seen.train("ada", steps=range(2))
    assert seen.history.updates_per_minute(seen.now) is None, "too short a time"
    seen.train("ada", steps=range(2, 30))
    assert seen.history.updates_per_minute(seen.now) == pytest.approx(30)
    for _ in range(29):
        seen.look(seen.record("ada", 29))
    assert seen.history.updates_per_minute(seen.now) == pytest.approx(15)


def test_the_curves_show_the_whole_run_in_a_bounded_number_of_points(seen):
    for step in range(3 * MAX_POINTS):
        seen.now += 2
        seen.history.look({"ada": seen.record("ada", step, loss=1 / (1 + step))}, seen.now)
    points = seen.history.points
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert points[0].step == 0
    assert points[-1].step > 3 * MAX_POINTS - 10
    gaps = [after.time - before.time for before, after in pairwise(points)]
    assert max(gaps) <= 4 * min(gaps)


@pytest.mark.slow
def test_strangers_without_end_cost_neither_memory_nor_the_view(seen):
    seen.train("ada", steps=range(2))
    for wave in range(8):
        crowd = [(f"id-{wave}-{number}", seen.record("x" * 60, 1)) for number in range(1000)]
        seen.look(*crowd, seen.record("ada", 2 + wave))
    assert len(seen.history.peers) == MAX_PEERS
    assert seen.history.peers["ada"].samples > 0
    assert len(seen.history.events) <= MAX_EVENTS
    assert max(len(text) for text in seen.events) < (MAX_NAMES + 2) * 66
    seen.desk.save()
    assert seen.path.stat().st_size < 4 * 2**20


def test_a_desk_that_is_started_again_knows_everything(seen, another):
    seen.train("ada", "ben", steps=range(8), loss=0.5, accuracy=math.nan)
    seen.history.addresses = ["/ip4/203.0.113.5/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "nonsense"]
    seen.desk.save()
    again = another()
    assert again.history.points == seen.history.points
    assert again.history.peers == seen.history.peers
    assert again.events == [*seen.events, "The desk was started again."]
    assert remembered_addresses(seen.path) == seen.history.addresses[:1]
    again.now = seen.now + 100
    again.look(again.record("ada", 20, loss=0.4))
    assert again.events[-1] == "The desk was started again."
    again.look(again.record("ada", 21))
    assert again.events[-1] == "ben left."


@pytest.mark.parametrize("content", ["", "{", '{"key": "another run", "target_batch_size": 1, "began_at": 0}', "[1]"])
def test_a_file_that_is_of_no_use_is_kept_aside(tmp_path, another, content):
    path = tmp_path / "desk.json"
    path.write_text(content)
    run = another()
    assert run.history.points == []
    (kept,) = tmp_path.glob("desk.json.*")
    assert kept.read_text() == content
    assert remembered_addresses(kept) == []
    run.train("ada", steps=range(2))
    run.desk.save()
    assert json.loads(path.read_text())["step"] == 1


def test_tests_of_the_weights_are_a_curve(seen):
    assert "Test accuracy" not in seen.web.get("/live").text
    seen.train("ada", "ben", steps=range(1, 51))
    for step, name, accuracy in ((50, "<i>ada</i>", 0.7), (60, "ben", 0.8), (60, "cy", 0.9)):
        for _ in range(2):
            seen.look(seen.record("zoe", step), seen.record(name, step, tested=Score(step, accuracy, 0.5)))
    seen.look(seen.record("zoe", 60), seen.record("eve", 60, tested=Score(900, 1.0, 0.0)))
    page = seen.web.get("/live").text
    assert "Test accuracy: 70 % at update 50, 85 % at update 60; between 70 % and 85 %." in page
    assert "90.0 % <small>update 60, by <bdi>cy</bdi>" in page
    tests = seen.web.get("/api/v1/history").json()["tests"]
    assert [(test["step"], test["name"]) for test in tests] == [(50, "<i>ada</i>"), (60, "ben"), (60, "cy")]


def test_a_run_that_goes_back_is_tested_anew(seen):
    for step in (20, 52):
        seen.look(seen.record("ada", step, tested=Score(step, 0.5, 1.0)))
    seen.train("ada", steps=range(20, 25), seconds=20)
    assert seen.history.step == 24
    seen.look(seen.record("ada", 30, tested=Score(30, 0.6, 1.0)))
    assert [(test.step, test.accuracy) for test in seen.history.tests] == [(20, 0.5), (30, 0.6)]


def test_a_test_of_lost_weights_does_not_come_back(seen):
    """Its peer has left, so that its last record still tells of the test when the run reaches that step again."""
    seen.look(seen.record("ada", 52), seen.record("ben", 52, tested=Score(52, 0.5, 1.0)))
    seen.train("ada", steps=range(20, 25), seconds=20)
    assert seen.history.step == 24
    seen.train("ada", steps=range(25, 54))
    assert seen.history.step == 53
    assert not seen.history.tests


def test_a_peer_that_reports_many_tests_loses_its_own(seen, monkeypatch):
    monkeypatch.setattr("swarm.desk.history.MAX_TESTS", 10)
    seen.look(seen.record("ada", 1, tested=Score(1, 0.5, 1.0)), seen.record("zoe", 1))
    for step in range(1, 40):
        seen.look(seen.record("eve", step, tested=Score(step, 1.0, 0.0)), seen.record("zoe", step))
    names = [test.name for test in seen.history.tests]
    assert len(names) <= 10
    assert names.count("ada") == 1
