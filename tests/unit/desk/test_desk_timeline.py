"""What each peer did over the last minutes, as its records tell."""

from dataclasses import asdict
from weakref import WeakSet
from xml.etree import ElementTree

import pytest

from swarm.desk.seen import PeerSeen
from swarm.desk.timeline import (
    CELL_SECONDS,
    CELLS,
    MAX_FAILURES,
    MAX_ROUND_PEERS,
    MAX_ROUNDS,
    MAX_SHOWN_FAILURES,
    Timeline,
    runs_of,
    said_of,
    share,
)
from swarm.membership.progress_record import AVERAGING, JOINING, TRAINING, VALIDATING, WAITING
from swarm.protocol.notes import FailedRound


def strip_of(seen, name: str) -> str:
    return seen.history.timeline.strips[name]


def spend(seen, cells: int, *records: tuple[str, str], step: int = 1) -> None:
    """Spend this many cells with looks at which these peers are in these phases."""
    for _ in range(int(cells * CELL_SECONDS / 2)):
        seen.look(*(seen.record(name, step, phase=phase) for name, phase in records))


def test_a_strip_has_a_letter_for_each_ten_seconds(seen):
    seen.now -= 2 + seen.now % CELL_SECONDS
    spend(seen, 2, ("ada", WAITING))
    spend(seen, 3, ("ada", TRAINING), ("ben", JOINING))
    spend(seen, 1, ("ada", AVERAGING), ("ben", VALIDATING))
    spend(seen, 2, ("ada", "something new"))
    assert strip_of(seen, "ada") == "wwcccaoo"
    assert strip_of(seen, "ben") == "  jjjv--"


def test_the_letter_of_a_cell_is_the_phase_that_fills_most_of_it(seen):
    seen.now -= 2 + seen.now % CELL_SECONDS
    for phase in (TRAINING, AVERAGING, TRAINING, AVERAGING, TRAINING):
        seen.look(seen.record("ada", 1, phase=phase))
    assert strip_of(seen, "ada") == "c"


def test_ten_minutes_are_kept_and_a_peer_that_was_gone_for_as_long_is_forgotten(seen):
    spend(seen, 5, ("ada", TRAINING), ("ben", TRAINING))
    spend(seen, CELLS + 2, ("ada", AVERAGING))
    assert strip_of(seen, "ada") == CELLS * "a"
    assert seen.history.timeline.strips.keys() == {"ada"}
    assert len(seen.history.timeline.updates) == CELLS


def test_a_helper_helps_and_computes_for_no_update(seen):
    for step in (1, 2, 3):
        seen.look(seen.record("ada", step), seen.record("desk", step, rate=0.0, helps=True))
    assert (strip_of(seen, "desk")[-1], seen.history.timeline.rounds[-1].peers) == ("h", 1)
    assert "helper <small>reachable</small>" in seen.web.get("/").text


def test_a_time_without_looks_is_not_known(seen):
    seen.now -= 2 + seen.now % CELL_SECONDS
    spend(seen, 2, ("ada", TRAINING))
    seen.now += 3 * CELL_SECONDS
    spend(seen, 1, ("ada", TRAINING))
    assert strip_of(seen, "ada") == "cc   c"
    seen.now += CELLS * CELL_SECONDS
    spend(seen, 1, ("ada", TRAINING))
    assert strip_of(seen, "ada") == "c"
    seen.now -= 1000  # the clock is set
    seen.look(seen.record("ada", 1))
    assert len(seen.history.timeline.cells) == 1


def test_an_update_names_the_peers_that_computed_and_those_that_the_others_waited_for(seen):
    seen.train("ada", "ben", "cy", steps=range(1, 4))
    seen.look(*(seen.record(name, 3, phase=AVERAGING) for name in ("ada", "ben")), seen.record("cy", 3))
    seen.train("ada", "ben", "cy", steps=range(5, 6))
    seen.train("ada", "ben", "cy", steps=range(6, 7))
    (*_, waited, usual) = seen.history.timeline.rounds
    assert (waited.step, waited.updates, waited.peers, waited.late) == (5, 2, 3, ["cy"])
    assert waited.names == ["ada", "ben", "cy"]
    assert waited.seconds == pytest.approx(4)
    assert (usual.late, usual.lost) == ([], [])


def test_an_update_names_the_peers_that_fell_silent_before_it(seen):
    seen.train("ada", "ben", steps=range(1, 4))
    for _ in range(2):
        seen.look(seen.record("ada", 3))
    seen.train("ada", steps=range(4, 5))
    assert seen.history.timeline.rounds[-1].lost == ["ben"]


def test_an_update_says_why_rounds_before_it_were_in_vain(seen):
    seen.train("ada", "ben", "cy", steps=range(1, 4))
    once, twice = (FailedRound(4, times, "<b>cy</b> did not send in time") for times in (1, 2))
    own = FailedRound(4, 1, "this peer is left out")
    others = [seen.record("ben", 3, failed=own), seen.record("cy", 3, failed=FailedRound(3, 9, "long ago"))]
    seen.look(seen.record("ada", 3, failed=once), *others)
    page = seen.web.get("/live").text
    assert "Not made yet. ✕ 1 round failed: <bdi>&lt;b&gt;cy&lt;/b&gt; did not send in time</bdi> (says" in page
    assert "long ago" not in page, "that update was made"
    seen.look(seen.record("ada", 3, failed=twice), seen.record("cy", 3, failed=once), *others[:1])
    assert len(seen.history.timeline.trying) == 2
    seen.look(*(seen.record(name, 4, failed=twice) for name in ("ada", "ben", "cy")))
    assert not seen.history.timeline.trying
    first, second = seen.history.timeline.rounds[-1].failed
    assert (first.times, first.said_by) == (2, ["ada", "cy", "ben"])
    assert (second.why, second.said_by) == ("this peer is left out", ["ben"])
    seen.look(*(seen.record(name, 5, failed=twice) for name in ("ada", "ben", "cy")))
    assert not seen.history.timeline.rounds[-1].failed, "it is told once"
    said = seen.web.get("/api/v1/timeline").json()["rounds"][-2]["failed"][0]
    assert said == {"why": "<b>cy</b> did not send in time", "times": 2, "said_by": ["ada", "cy", "ben"]}


def test_rounds_of_the_first_update_that_failed_are_not_told_of_the_second(seen):
    failed = FailedRound(1, 1, "ben did not send in time")
    seen.look(seen.record("ada", 0, failed=failed))
    assert len(seen.history.timeline.trying) == 1
    seen.look(seen.record("ada", 1, failed=failed))
    assert seen.history.timeline.trying == []
    assert seen.history.timeline.updates[-1] == 1


def test_a_run_that_goes_back_forgets_why_later_rounds_were_in_vain(seen):
    seen.train("ada", steps=range(50, 53))
    seen.look(seen.record("ada", 52, failed=FailedRound(53, 1, "ben did not send in time")))
    assert [failure.why for failure in seen.history.timeline.trying] == ["ben did not send in time"]
    seen.train("ada", steps=range(20, 25), seconds=20)
    assert seen.history.step == 24
    assert not seen.history.timeline.trying


def test_strangers_cannot_fill_the_page_with_reasons(seen):
    seen.train("ada", steps=range(1, 4))
    for look in range(3):
        crowd = [seen.record(f"peer-{n}", 3, failed=FailedRound(4, 1, f"reason {look}.{n}")) for n in range(100)]
        far = [seen.record(f"far-{n}", 3, failed=FailedRound(4 + n, 1, "far ahead")) for n in range(2, 50)]
        seen.look(*crowd, *far)
    assert len(seen.history.timeline.trying) == MAX_SHOWN_FAILURES
    seen.train(*(f"peer-{n}" for n in range(100)), steps=range(4, 5))
    assert len(seen.history.timeline.rounds[-1].failed) == MAX_SHOWN_FAILURES < MAX_FAILURES


class Name(str):
    """A name of which one can tell whether anything still holds it."""


def test_strangers_that_come_and_go_while_no_update_is_made_are_forgotten():
    timeline, held = Timeline(), WeakSet()

    def look(number: int) -> None:
        names = [Name(f"peer-{number}-{place}") for place in range(20)]
        held.update(names)
        phases = 12 * [AVERAGING] + 8 * [TRAINING]
        peers = [
            PeerSeen(name, 1, 10.0, False, phase, 0.0, 0.0, 0.0) for name, phase in zip(names, phases, strict=True)
        ]
        timeline.look({str(peer.name): peer for peer in peers}, 1, 0, 2.0 * number, None)

    for number in range(50):
        look(number)
    assert len(held) <= 20 + 2 * MAX_ROUND_PEERS, "those there now, and as many late and lost ones as are shown"


def test_a_crowd_and_a_long_run_are_bounded(seen):
    crowd = [f"peer-{number}" for number in range(100)]
    for step in range(1, MAX_ROUNDS + 9):
        others = [seen.record(name, step, phase=AVERAGING) for name in crowd]
        seen.look(*others, *(seen.record(f"late-{number}", step) for number in range(50)))
    rounds = seen.history.timeline.rounds
    assert len(rounds) == MAX_ROUNDS
    assert len(rounds[-1].late) == MAX_ROUND_PEERS


def test_the_next_desk_knows_the_last_minutes(seen, another):
    spend(seen, 3, ("ada", TRAINING))
    seen.desk.save()
    assert asdict(another().history.timeline) == asdict(seen.history.timeline)


def test_a_strip_can_be_read_without_seeing_it():
    assert runs_of("  ccca c") == [("c", 2, 3), ("a", 5, 1), ("c", 7, 1)]
    assert said_of("  ccca") == "computes 75% of the time, averages 25% of the time"
    assert (share("  ccca", "c"), share("  ", "c")) == (0.75, 0.0)


def test_the_page_draws_what_was_seen(seen):
    seen.now -= 2 + seen.now % CELL_SECONDS
    spend(seen, 3, ("</svg>", TRAINING), ("ben", AVERAGING))
    seen.train("</svg>", "ben", steps=range(2, 5))
    page = seen.web.get("/").text
    table = page[page.index('<table class="strips">') :]
    table = ElementTree.fromstring(table[: table.index("</table>")] + "</table>")
    names = ["".join(row.itertext()).split() for row in table.iter("th")]
    assert [name[0] for name in names] == ["Peer", "What", "Computed", "Updates", "</svg>", "ben"]
    labels = [svg.get("aria-label") for svg in table.iter("svg")]
    assert labels[1] == "computes 100% of the time"
    assert labels[2].startswith("averages 75% of the time")
    assert {rect.get("class") for rect in table.iter("rect")} == {"made", "is is-c", "is is-a"}
    assert seen.web.get("/api/v1/timeline").json()["strips"][1]["states"] == "aaac"
