"""`swarm watch`: what an observer sees of a swarm, and whether the swarm stands still."""

import io
import json
import math
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import get_dht_time
from rich.console import Console

from recipe.presets import preset
from swarm.cli.watch import MAX_ROWS, SwarmView, main
from swarm.desk.history import LOWER_SECONDS
from swarm.membership.announcer import CallLost
from swarm.membership.progress_record import JOINING, PAUSED, TRAINING, PeerProgress
from swarm.membership.run_manifest import PROTOCOL, RunManifest, publish_manifest
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht, visible_addresses
from swarm.protocol.attestation import Attestation
from swarm.protocol.notes import FailedRound, Profile, Score
from swarm.protocol.orders import Order, Orders, What
from swarm.protocol.wire import LINEAGE_BYTES
from tests.helpers.owners import subkey_of
from tests.helpers.records import FakeDHT, done

MANIFEST = RunManifest(PROTOCOL, "letters", preset("digits"))
ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def record(name: str, step: int, rate: float = 10.0) -> PeerProgress:
    now = get_dht_time()
    return PeerProgress(name, step, 8, rate, now - 4000, now, False, TRAINING)


def by_id(*records: PeerProgress) -> dict[str, PeerProgress]:
    """The records of these peers by invented peer ids."""
    return {PeerID(number.to_bytes(2, "big")).to_base58(): record for number, record in enumerate(records)}


def text_of(view: SwarmView, width: int = 140) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view.table(get_dht_time(), width))
    return console.export_text()


def test_the_table_says_which_peers_are_there_and_how_far():
    view = SwarmView(MANIFEST)
    assert "0 peers" in text_of(view)
    view.look(by_id(record("ada", 7, 20.0), record("[red]ben", 7), record("a liar", 10**6)))
    assert (view.step, view.made_progress) == (7, False), "one peer that claims to be ahead moves nothing"
    view.look(by_id(record("ada", 8, 20.0), record("[red]ben", 8), record("a liar", 10**6)))
    assert (view.step, view.made_progress) == (8, True)
    shown = text_of(view)
    for words in ("run letters", "step 8/", "3 peers", "40 samples/s", "ada", "[red]ben", "1 h 06 min", "yes"):
        assert words in shown
    view.look(by_id(replace(record("ada", 8), attested=Attestation(8, b"L" * LINEAGE_BYTES, b"D" * 16, ()))))
    assert json.loads(json.dumps(view.as_json()))["peers"][0].keys().isdisjoint({"loss", "accuracy"})
    view.look(by_id(*(record(f"peer-{number}", 9) for number in range(MAX_ROWS + 3))))
    assert "and 3 more" in text_of(view)


def test_a_joiner_that_has_no_state_yet_does_not_count():
    view = SwarmView(MANIFEST)
    view.look(by_id(record("ada", 7), replace(record("ben", 0), phase=JOINING)))
    assert (view.first_step, view.step) == (7, 7)


def test_machines_of_peers_are_shown_where_there_is_room():
    view, profile = SwarmView(MANIFEST), Profile("[red]NVIDIA H100", "0.1.0, protocol 19", "local network", 1e6, 5, 7)
    view.look(by_id(replace(record("ada", 7), profile=profile), record("ben", 7)))
    wide, narrow = text_of(view), text_of(view, width=80)
    assert "[red]NVIDIA H100" in wide
    assert "0.1.0, protocol 19" in wide
    assert "NVIDIA" not in narrow
    told = replace(record("ada", 7), profile=profile, failed=FailedRound(7, 1, "why"), tested=Score(7, 0.5, 1.0))
    view.look(by_id(told))
    (shown,) = json.loads(json.dumps(view.as_json()))["peers"]
    assert shown["peer_id"] in by_id(told), "names are not unique"
    assert shown["profile"]["device"] == "[red]NVIDIA H100"
    assert (shown["failed"]["why"], shown["tested"]["accuracy"]) == ("why", 0.5)


def test_orders_are_shown():
    view = SwarmView(MANIFEST)
    view.orders = Orders("letters", 1, (Order(7, What.PAUSE), Order(9, What.EXTEND, 5000)))
    view.look(by_id(record("ada", 6), record("ben", 6)))
    assert view.ordered == ["ordered: pause at step 7", "ordered: from step 9 on the run has 5,000 updates"]
    view.look(by_id(replace(record("ada", 7), phase=PAUSED), replace(record("ben", 7), phase=PAUSED)))
    assert view.is_paused
    assert "paused at step 7" in text_of(view)
    assert "step 7/5000" not in text_of(view), "it does not count yet"
    assert view.as_json()["ordered"] == view.ordered


def test_facts_that_an_organiser_should_know_are_shown():
    view = SwarmView(MANIFEST)
    view.look(by_id(replace(record("ada", 3), loss=0.3), replace(record("ben", 3), loss=math.nan)))
    assert (view.warnings, view.loss_has_risen) == ([], False)
    view.look(by_id(replace(record("ada", 4), loss=0.7), replace(record("ben", 4), client_mode=True)))
    assert not view.loss_has_risen, "losses go up and down"
    (warning,) = view.warnings
    assert "Only 'ada' can be called" in warning
    view.look(by_id(replace(record("ben", 5), client_mode=True, loss=2.3)))
    assert view.loss_has_risen
    assert view.as_json()["warnings"] == view.warnings
    assert "The loss has risen from 0.300 to 2.300." in text_of(view)
    assert "No peer can be called" in text_of(view)


def test_how_often_updates_are_made():
    view = SwarmView(MANIFEST)
    assert math.isnan(view.updates_per_minute)
    view.look(by_id(record("ada", 3)))
    view.look(by_id(record("ada", 5)))
    view.began_at = view.updated_at - 60
    assert view.updates_per_minute == pytest.approx(2)


def test_a_run_that_goes_back_is_followed_after_a_minute():
    view = SwarmView(MANIFEST)
    view.look(by_id(replace(record("ada", 50), loss=0.4)))
    view.look(by_id(replace(record("ada", 20), loss=1.2)))
    assert view.step == 50, "it may be one peer that is late"
    view.lower_since -= LOWER_SECONDS
    view.updated_at -= LOWER_SECONDS
    view.look(by_id(replace(record("ada", 22), loss=1.1)))
    assert (view.first_step, view.step, view.made_progress) == (22, 22, False)
    assert not view.loss_has_risen, "earlier weights have a higher loss"
    view.look(by_id(replace(record("ada", 22), loss=2.3)))
    assert view.loss_has_risen
    assert view.as_json()["still_seconds"] < LOWER_SECONDS
    view.look(by_id(record("ada", 24)))
    view.began_at = view.updated_at - 60
    assert view.made_progress
    assert view.updates_per_minute == pytest.approx(2)
    view.look(by_id(record("ada", 3)))
    view.look(by_id(record("ada", 25)))
    assert view.lower_since is None, "most are where they were"
    view.look(by_id(record("ada", 3)))
    view.lower_since -= LOWER_SECONDS
    view.look(by_id(record("ada", 3)))
    assert (view.step, view.made_progress) == (3, True), "an update was seen"
    assert math.isnan(view.updates_per_minute)


def test_a_swarm_that_does_not_answer_is_told_after_half_a_minute():
    view = SwarmView(MANIFEST)
    view.look(by_id(record("ada", 7), record("ben", 7)))
    view.answered_at -= 20
    assert view.warnings == []
    view.answered_at -= 20
    (warning,) = view.warnings
    assert warning.startswith("No peer has answered for 4")
    assert "No peer has answered for 4" in text_of(view)
    assert view.as_json()["silent_seconds"] >= 40
    view.look(by_id(record("ada", 8), record("ben", 8)))
    assert view.warnings == []


class CutOffDHT(FakeDHT):
    """A DHT whose node has lost all others while its line was away. They answer when they are called again."""

    def __init__(self):
        super().__init__()
        self.called, self.is_line_back = [], False

    def says(self, peer: PeerProgress) -> None:
        self.store("", subkey_of(peer.name), peer.to_bytes(), get_dht_time() + 60, True)

    def run_coroutine(self, coroutine, return_future):
        if not isinstance(coroutine, CallLost):
            return super().run_coroutine(coroutine, return_future)
        self.called.append(coroutine.addresses)
        self.knows_others = self.is_line_back
        return done(None)

    def is_alive(self) -> bool:
        return True


def test_a_watch_whose_line_was_away_finds_back_through_the_given_peers(monkeypatch):
    dht, seen = CutOffDHT(), []
    dht.says(record("ada", 7))
    monkeypatch.setattr("swarm.cli.probe.looking_at", lambda *_: nullcontext((dht, MANIFEST)))
    monkeypatch.setattr("swarm.cli.watch.LOOK_SECONDS", 0.0)

    def say(line: str) -> None:
        seen.append((json.loads(line)["step"], len(dht.called)))
        if len(seen) == 1:
            dht.knows_others = False
            dht.says(record("ada", 8))
        if len(seen) == 4:
            dht.is_line_back = True
            monkeypatch.setattr("swarm.desk.watcher.CONTACT_SECONDS", 0.0)
        if len(seen) == 6:
            raise KeyboardInterrupt

    assert main([ADDRESS, "--json"], say=say) == 0
    assert seen == [(7, 0), (7, 1), (7, 1), (7, 1), (7, 2), (8, 2)], "no call follows at once"
    assert dht.called == 2 * [[ADDRESS]]


def test_bad_input_is_refused(capsys, monkeypatch):
    monkeypatch.delenv("INITIAL_PEERS", raising=False)
    assert main([]) == 2
    assert "No address was given: swarm watch ADDRESS" in capsys.readouterr().err
    assert main(["--initial-peers"]) == 2
    assert "The address is empty" in capsys.readouterr().err


def test_each_line_is_in_the_file_at_once(monkeypatch):
    """A program that watches for days must not lose the last lines when a signal ends it."""
    written, view = io.BytesIO(), SwarmView(MANIFEST)

    def watch(_options, show) -> SwarmView:
        show(view)
        assert json.loads(written.getvalue())["run_id"] == "letters"
        return view

    monkeypatch.setattr("swarm.cli.watch.watch", watch)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written))
    assert main(["--json"]) == 1


@pytest.mark.slow
def test_a_swarm_that_stands_still_and_one_that_does_not(monkeypatch, capsys):
    monkeypatch.setattr("swarm.cli.watch.LOOK_SECONDS", 0.3)
    dht = start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",)))
    ended, said = threading.Event(), []

    def report(step: int) -> None:
        value = replace(record("ada", step), samples=step).to_bytes()
        key, expiration = f"{MANIFEST.key_prefix}.progress", get_dht_time() + 60
        assert dht.store(key, subkey=dht.owner, value=value, expiration_time=expiration)

    def train() -> None:
        for step in range(8, 10**6):
            if ended.wait(0.3):
                return
            report(step)

    try:
        assert publish_manifest(dht, MANIFEST)
        report(7)
        watching = ["--initial-peers", visible_addresses(dht)[0], "--seconds"]
        assert main([*watching, "1"]) == 1
        shown = capsys.readouterr()
        assert "has made no update in " in shown.err
        assert shown.out.count("run letters") == 2, "what was seen first, and last"
        assert shown.out.count("1 peer ·") == 2
        assert "updates are being made" not in shown.out
        training = threading.Thread(target=train)
        training.start()
        assert main([*watching, "5", "--json"], say=said.append) == 0
    finally:
        ended.set()
        stop_dht(dht)
    lines = [json.loads(line) for line in said]
    assert lines[-1]["step"] > lines[0]["step"] >= 7
    assert [peer["name"] for peer in lines[-1]["peers"]] == ["ada"]
    assert lines[-1]["time"] <= time.time()
