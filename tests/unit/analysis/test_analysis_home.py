"""Which peers took part in each update over home lines, and how long it took, against values computed by hand."""

import json
from dataclasses import replace

import pytest

from analysis import __main__ as analysis
from analysis.campaigns.cells import Cell
from analysis.campaigns.home import STARTED, home_numbers, limit_seconds
from analysis.campaigns.home_text import lines_about
from analysis.campaigns.measure import problems
from analysis.campaigns.payload import num_parameters, payload_bytes
from analysis.campaigns.systems import SYSTEMS, system_of
from analysis.wan.topology import Topology, load
from recipe.errors import InputError

CELL = Cell(
    "swarm-local-1-fp16",
    peers=3,
    recipe="digits",
    steps=4,
    warm_up_steps=1,
    topology="home",
    paced_samples_per_second=32.0,
)
"""Lines of 10, 40 and 50 Mbit/s up and 40, 100 and 250 down; an update of 512 samples takes 5.33 s to compute."""
IDS = {"h1": "QmFirst", "h2": "QmSecond", "h3": "QmThird", "h4": "QmFourth"}


class Files:
    """A writer of the files that a cell leaves behind."""

    def __init__(self, folder, cell: Cell) -> None:
        self.folder, self.cell = folder, cell
        (folder / "logs").mkdir(parents=True)
        (folder / "cell.json").write_text(cell.to_json())

    def starts(self, moments: dict[str, float], parts: str) -> None:
        """Let all peers start with the same log."""
        (self.folder / STARTED).write_text(json.dumps(moments))
        for number, host in enumerate(moments, 1):
            lines = [
                f"use --initial_peers /ip4/10.77.0.{number}/tcp/31337/p2p/{IDS[host]}",
                parts,
                "step 1/4 · training",
            ]
            (self.folder / "logs" / f"{host}.log").write_text("\n".join(lines))

    def rounds(self, host: str, *lines: dict) -> None:
        file = self.folder / "runs/run" / host / "rounds.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as opened:
            opened.writelines(json.dumps(line) + "\n" for line in lines)


def averaged(step: int, at: float, hosts: str, exchange: float = 8.0) -> dict:
    """A round that ended at `at`, after a second of meeting; its average was applied within half a second."""
    members = [IDS[host] for host in hosts.split()]
    seconds = {"meeting_seconds": 1.0, "exchange_seconds": exchange, "apply_seconds": 0.5}
    return {"time": at + 0.5, "step": step, "outcome": "averaged", "members": members, **seconds}


PARTS = "First contribution 9.0 s after the command: imports 3.0 s, DHT 1.0 s, state 4.0 s, first micro-batch 1.0 s."


@pytest.fixture
def files(tmp_path) -> Files:
    found = Files(tmp_path / "cell", CELL)
    found.starts({"h1": 100.0, "h2": 102.0, "h3": 103.0}, PARTS)
    return found


def test_updates_are_compared_with_the_slowest_line_and_with_computing(files):
    payload = payload_bytes(CELL)
    assert payload == 2 * num_parameters(CELL)
    for host in ("h1", "h2", "h3"):
        files.rounds(host, averaged(1, 130.0, "h1 h2 h3"), averaged(2, 138.0, "h1 h2 h3"))
    files.rounds("h2", averaged(3, 150.0, "h2 h3"))
    files.rounds("h3", averaged(3, 152.0, "h2 h3"))
    files.rounds("h1", {"time": 151.0, "step": 3, "outcome": "alone", "members": [], "apply_seconds": 0.5})
    found = home_numbers(files.folder, CELL)
    assert [update["groups"] for update in found["updates"]] == [[["h1", "h2", "h3"]]] * 2 + [[["h2", "h3"]]]
    assert [update["alone"] for update in found["updates"]] == [[], [], ["h1"]]
    assert found["whole_updates"] == 2
    second, third = found["updates"][1:]
    assert second["limits"]["computing"] == pytest.approx(512 / 96)
    # The best shares leave the first host nothing to reduce: the vector over 95 % of its 10 Mbit/s.
    assert second["limits"]["sending"] == pytest.approx(payload * 8 / 9.5e6)
    assert second["over_limit"] == pytest.approx(8.0 / max(second["limits"].values()))
    assert third["seconds"] == pytest.approx(14.0), "until the last member has it"
    assert third["limits"]["sending"] == pytest.approx(payload * 8 / 38e6), "the slowest line of these two: 40 up"
    assert third["limits"]["computing"] == pytest.approx(512 / 64)
    assert found["worst_over_limit"] == pytest.approx(14.0 / 8.0)
    files.rounds("h2", averaged(4, 159.0, "h1 h2 h3"))
    fourth = home_numbers(files.folder, CELL)["updates"][3]
    assert fourth["limits"]["computing"] == pytest.approx(512 / 96)
    assert fourth["over_limit"] == pytest.approx(7.0 / 8.0), "two computed for it until the first one came back"


def test_a_member_of_a_group_that_has_no_average_has_missed_the_update(files, capsys):
    for host in ("h1", "h3"):
        files.rounds(host, averaged(1, 130.0, "h1 h2 h3"))
    files.rounds("h2", {"time": 128.0, "step": 1, "outcome": "66 of 83 parts of the average arrived", "members": []})
    found = home_numbers(files.folder, CELL)
    assert found["updates"][0]["missed"] == ["h2"]
    assert found["whole_updates"] == 0
    assert analysis.main(["home", str(files.folder)]) == 0
    assert "h1 (h2) h3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("topology", "mbps"),
    [
        ("home", 10),  # and 40, 50, 500: the others reduce all, so this line carries one vector
        ("home-cable", 20 / 1.5),  # four equal lines, on which equal shares are the best: each carries one and a half
        ("slow-line", 10),  # and three with 100
    ],
)
def test_the_least_time_of_sending_is_that_of_the_best_shares(topology, mbps):
    cell = replace(CELL, topology=topology, peers=4)
    least = limit_seconds(cell, cell.network().hosts)["sending"]
    assert least == pytest.approx(payload_bytes(cell) * 8 / (0.95e6 * mbps))


def test_an_update_of_several_local_steps_has_as_many_times_the_samples_to_compute():
    cell = replace(CELL, system="swarm-local-4-fp16")
    hosts = cell.network().hosts
    assert limit_seconds(cell, hosts)["computing"] == pytest.approx(4 * 512 / 96)
    assert limit_seconds(cell, hosts)["sending"] == limit_seconds(CELL, hosts)["sending"], "the bytes are the same"


def test_a_slow_downlink_counts_as_well(tmp_path):
    files = Files(tmp_path / "cell", CELL)
    topology = json.loads(load("home").with_hosts(3).to_json())
    topology["hosts"][1]["down_mbps"] = 2
    (files.folder / "topology.json").write_text(json.dumps(topology))
    files.starts({"h1": 100.0, "h2": 102.0, "h3": 103.0}, PARTS)
    files.rounds("h1", averaged(1, 130.0, "h1 h2 h3"))
    (update,) = home_numbers(files.folder, CELL)["updates"]
    assert update["limits"]["sending"] == pytest.approx(payload_bytes(CELL) * 8 / 1.9e6)
    assert Topology.from_json((files.folder / "topology.json").read_text()).hosts[1].down_mbps == 2


def test_every_failed_round_of_every_peer_is_there_with_its_reason(files):
    files.rounds("h1", averaged(1, 130.0, "h1 h2 h3"))
    files.rounds("h3", {"time": 120.0, "step": 1, "outcome": "66 of 83 parts of the average arrived", "members": []})
    files.rounds("h2", {"time": 125.0, "step": 2, "outcome": "nobody leads", "members": []})
    found = home_numbers(files.folder, CELL)
    reasons = [(item["host"], item["step"], item["reason"]) for item in found["failed"]]
    assert reasons == [("h3", 1, "66 of 83 parts of the average arrived"), ("h2", 2, "nobody leads")]
    text = "\n".join(lines_about(found))
    assert "Failed rounds: 2." in text
    assert "h3, update 1: 66 of 83 parts of the average arrived" in text


def test_the_first_whole_round_is_timed_from_the_last_one_that_began_to_train(files):
    files.rounds("h2", averaged(1, 118.0, "h1 h2"), averaged(2, 130.0, "h1 h2 h3"))
    files.rounds("h3", averaged(2, 131.0, "h1 h2 h3"))
    files.rounds("h1", averaged(2, 130.0, "h1 h2 h3"))
    start = home_numbers(files.folder, CELL)["start"]
    assert start["seconds_from_command"] == {"h1": 8.0, "h2": 8.0, "h3": 8.0}, "the first micro-batch is training"
    assert start["parts"]["h3"] == {"imports": 3.0, "DHT": 1.0, "state": 4.0, "first micro-batch": 1.0}
    assert start["first_whole_step"] == 2
    assert start["first_whole_round_begins_after"] == pytest.approx(122.0 - 111.0), "its exchange took 8 s"
    assert start["first_whole_round_ends_after"] == pytest.approx(131.0 - 111.0)


def test_a_swarm_that_never_began_is_described_as_well(files, capsys):
    files.starts({"h1": 100.0, "h2": 102.0}, "error: The swarm's state could not be downloaded in 120 s")
    found = home_numbers(files.folder, CELL)
    assert found["updates"] == []
    assert found["start"]["first_whole_round_begins_after"] is None
    assert found["worst_over_limit"] is None
    assert analysis.main(["home", str(files.folder)]) == 0
    assert "Start of h2: it never trained." in capsys.readouterr().out
    assert analysis.main(["home", str(files.folder.parent)]) == 0, "the folder of its experiment"
    assert analysis.main(["home", str(files.folder / "logs")]) == 2
    assert "There are no cells of our swarm" in capsys.readouterr().err


def test_a_late_host_and_what_it_costs_the_others(tmp_path):
    cell = replace(CELL, peers=4, last_joins_at_step=2)
    files = Files(tmp_path / "cell", cell)
    took_over = "Took over step 3 from h4: 19.0 MB in 7.5 s\nTook over step 4 from h4: 9.5 MB in 2.5 s\n"
    files.starts({"h1": 100.0, "h2": 102.0, "h3": 103.0, "h4": 150.0}, took_over + PARTS)
    for host in ("h1", "h2", "h3"):
        files.rounds(host, averaged(1, 130.0, "h1 h2 h3"), averaged(2, 140.0, "h1 h2 h3", exchange=9.0))
        files.rounds(host, averaged(3, 156.0, "h1 h2 h3", exchange=11.0), averaged(4, 171.0, "h1 h2 h3 h4"))
    files.rounds("h4", averaged(4, 171.0, "h1 h2 h3 h4"))
    found = home_numbers(files.folder, cell)
    late = found["late"]
    assert late["state_megabytes"] == 28.5
    assert late["line_seconds"] == pytest.approx(28.5 * 8 / (0.95 * 50)), (
        "the best donor has 50 up, the host 1,000 down"
    )
    assert late["first_step"] == 4
    assert late["first_round_begins_after"] == pytest.approx(163.0 - 150.0)
    assert late["joining_over_line"] == pytest.approx((163.0 - 154.0) / late["line_seconds"]), "from the state on"
    assert late["state_over_line"] == pytest.approx(4.0 / late["line_seconds"])
    assert late["others_before"] == {"median": pytest.approx(9.5), "worst": pytest.approx(10.0)}
    assert late["others_meanwhile"]["worst"] == pytest.approx(12.0), "the round that it joins is not one of these"
    assert late["others_meanwhile"]["worst_over_usual"] == pytest.approx(12.0 / 9.5)
    assert found["whole_updates"] == 4, "the count starts with the peers that were there from the start"


def test_a_host_that_is_to_join_later_makes_no_cell_invalid_before_it_came():
    cell = replace(CELL, peers=4, last_joins_at_step=2)
    numbers = {"busy_cores": 0.5, "lab_cores": 0.5, "received": 1.0}
    assert problems(cell, _updates_of(3, 3, 4), numbers) == []
    assert problems(cell, _updates_of(3, 2, 4), numbers) == ["only 2 of 4 peers took part in an update"]
    assert problems(cell, _updates_of(3, 3, 3), numbers) == ["the last host never took part in an update"]
    assert problems(replace(cell, last_joins_at_step=None), _updates_of(3, 3, 4), numbers) != []


def _updates_of(*peers: int):
    from analysis.campaigns.measure import Round

    return [Round(step, 10.0 * step, 10.0, 512, count) for step, count in enumerate(peers, 1)]


def test_no_peer_waits_for_a_host_that_joins_later(tmp_path):
    cell = replace(CELL, peers=4, last_joins_at_step=2)
    first, second, *_ = cell.network().hosts
    words = SYSTEMS[cell.system].command(SYSTEMS[cell.system], cell, second, first, tmp_path, ("A",))
    assert words[words.index("--min-peers") + 1] == "3"
    assert system_of(cell) is SYSTEMS[cell.system]
    for system in ("ddp-fp16", "hivemind"):
        with pytest.raises(InputError, match="leave out last_joins_at_step"):
            system_of(replace(cell, system=system))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"last_joins_at_step": 0}, "is at least 1"),
        ({"last_joins_at_step": 1, "peers": 1}, "at least 2 peers"),
        ({"last_joins_at_step": 4}, "less than the 4 steps"),
        ({"last_joins_at_step": 2, "kill_at_step": 2}, "the same host"),
    ],
)
def test_a_late_host_that_cannot_come_is_refused(changes, problem):
    with pytest.raises(InputError, match=problem):
        replace(CELL, **changes)
