"""The one sentence about the state of the run, and the alerts."""

import json
import math
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from recipe.errors import InputError
from swarm.desk.alerts import RETRY_SECONDS, SETTLED_SECONDS, SURE_SECONDS, Alerts
from swarm.desk.desk import LEAST_FREE_BYTES
from swarm.desk.watcher import Watcher
from swarm.membership.progress_record import WAITING
from swarm.network.signed_records import peer_of
from swarm.protocol.certificates import EVERYTHING, Certificate
from tests.helpers.desk.seen_run import CARD
from tests.helpers.owners import Organiser, subkey_of
from tests.helpers.records import RECORD, FakeDHT


def sentence(run) -> tuple[str, str]:
    report = run.desk.newest.swarm
    return report.level, report.sentence


def test_the_sentence_says_that_no_peer_trains(seen):
    seen.look()
    assert sentence(seen) == ("bad", "No peer trains: the desk finds no peer in the run.")


def test_the_sentence_says_that_all_is_well(seen):
    seen.look(seen.record("ada", 1), seen.record("ben", 1))
    assert sentence(seen) == ("good", "2 peers train. The pace shows after the next updates.")
    seen.train("ada", "ben", steps=range(2, 20), loss=0.5)
    assert sentence(seen) == ("good", "All is well: 2 peers train, with an update every 2 s.")
    assert seen.desk.newest.swarm.seconds_left == pytest.approx(2 * 9981)


def test_the_sentence_says_that_only_helpers_are_there(seen):
    seen.look(seen.record("helga", 1, rate=0.0, helps=True))
    assert sentence(seen) == ("warning", "Only helpers are here: the run waits for a training peer.")
    assert [(peer.role, peer.phase) for peer in seen.desk.newest.peers.peers] == [("helper", "helping")]
    seen.look(seen.record("helga", 1, rate=0.0, helps=True), seen.record("ada", 1, helps=False))
    assert sentence(seen) == ("good", "One peer trains. The pace shows after the next updates.")


def test_the_sentence_says_that_the_run_is_over(seen):
    seen.train("ada", steps=range(9998, 10_001))
    assert sentence(seen) == ("good", "The run has ended: all 10,000 updates are made.")
    seen.look(after=3600)
    assert sentence(seen)[0] == "good", "no peer has to be there any more"


def test_peers_that_leave_with_the_last_update_have_ended_the_run(seen):
    """These peers write no record of the last update."""
    seen.train("ada", steps=range(9997, 10_000))
    assert "ended" not in sentence(seen)[1]
    seen.look()
    seen.look()
    said = "The run has probably ended: all peers have left, and update 9,999 of 10,000 was the last one seen."
    assert sentence(seen) == ("good", said)


def test_a_run_has_ended_also_if_no_peer_answers_any_more(seen):
    """All peers left between two looks."""
    seen.train("ada", steps=range(9997, 10_000))
    seen.now += 60
    seen.desk.turn(None)
    assert sentence(seen)[1].startswith("The run has probably ended: all peers have left, and update 9,999 of 10,000")
    assert (seen.desk.newest.swarm.level, seen.desk.newest.swarm.is_over) == ("good", True)


def test_an_outage_of_the_desks_own_line_is_no_end_of_a_slow_run(another):
    """The last update takes a minute."""
    run = another(card=replace(CARD, total_steps=2000))
    for step in range(1990, 2000):
        for _ in range(30):
            run.look(run.record("ada", step))
    for seconds, said in ((31, "No peer has answered the desk for 31 seconds"), (30, "The run has probably ended")):
        run.now += seconds
        run.desk.turn(None)
        assert sentence(run)[1].startswith(said)


@pytest.mark.parametrize("last_seen", range(1994, 1999))
def test_a_fast_run_makes_its_last_updates_between_two_looks(another, last_seen):
    """A run of digits makes 2.5 updates per second."""
    run = another(card=replace(CARD, total_steps=2000))
    run.train("ada", "ben", steps=range(last_seen - 100, last_seen + 1, 5))
    for _ in range(30):
        run.look()
    assert sentence(run)[1].startswith("The run has probably ended")
    assert run.desk.newest.swarm.is_over


def test_a_short_run_that_all_peers_leave_long_before_its_end_has_not_ended(another):
    run = another(card=replace(CARD, total_steps=60))
    run.train("ada", "ben", steps=range(2, 48, 5))
    for _ in range(30):
        run.look()
    assert sentence(run)[1].startswith("No peer trains")


def test_a_slow_run_that_all_peers_leave_four_updates_early_has_not_ended(another):
    run = another(card=replace(CARD, total_steps=2000))
    for step in range(1980, 1997):
        for _ in range(30):
            run.look(run.record("ada", step))
    run.look()
    run.look()
    assert sentence(run) == ("bad", "No peer trains: the desk finds no peer in the run.")


def test_the_sentence_says_that_the_run_has_not_begun(seen):
    seen.look(seen.record("ada", 0, phase=WAITING), seen.record("ben", 0, phase=WAITING))
    level, said = sentence(seen)
    assert level == "warning"
    assert said.startswith("All peers wait for more peers")


def test_the_sentence_says_that_no_update_is_made(seen):
    seen.train("ada", "ben", steps=range(3))
    for _ in range(290):
        seen.look(seen.record("ada", 2), seen.record("ben", 2))
    assert sentence(seen)[0] == "good"
    for _ in range(10):
        seen.look(seen.record("ada", 2), seen.record("ben", 2))
    assert sentence(seen) == ("bad", "No update was made for 10 minutes.")


def test_the_sentence_says_that_the_loss_rises_or_is_no_number(seen):
    seen.train("ada", "ben", steps=range(3), loss=0.3)
    seen.train("ada", "ben", steps=range(3, 5), loss=0.7)
    assert sentence(seen)[0] == "good", "losses go up and down"
    seen.train("ada", "ben", steps=range(5, 6), loss=2.3)
    assert sentence(seen) == ("bad", "The loss has risen from 0.300 to 2.300.")
    seen.train("ada", "ben", steps=range(6, 9), loss=math.nan)
    assert sentence(seen) == ("bad", "No peer has a finite loss: begin again from a good checkpoint.")


def test_a_desk_that_comes_late_does_not_take_the_first_records_for_a_broken_loss(seen):
    seen.train("ada", "ben", steps=range(50, 52), loss=math.nan)
    assert sentence(seen)[0] == "good"


def test_the_sentence_says_how_many_peers_can_be_called(seen):
    seen.look(seen.record("ada", 1), seen.record("ben", 1, client_mode=True))
    level, said = sentence(seen)
    assert level == "warning"
    assert said.startswith("Only 'ada' can be called")
    seen.look(seen.record("ben", 1, client_mode=True))
    seen.look(seen.record("ben", 1, client_mode=True))
    level, said = sentence(seen)
    assert level == "bad"
    assert said.startswith("No peer can be called")


def test_the_sentence_says_that_the_swarm_does_not_answer(seen):
    seen.train("ada", steps=range(2))
    seen.now += 60
    seen.desk.turn(None)
    said = "No peer has answered the desk for 60 seconds: all have left, or the desk's own network is down."
    assert sentence(seen) == ("bad", f"{said} The numbers shown are that old.")


def test_no_peer_counts_as_lost_while_the_desks_own_network_is_down(seen):
    dht = FakeDHT()
    watcher = Watcher(dht, SimpleNamespace(authority=None, key_prefix="run"), ())
    seen.train("ada", "ben", steps=range(8))
    dht.knows_others = False
    for _ in range(30):
        seen.now += 2
        seen.desk.turn(watcher.look())
    assert sentence(seen)[1].startswith("No peer has answered the desk for 60 seconds")
    seen.train("ada", "ben", steps=range(600, 602))
    assert seen.events == ["The desk began to watch. ada and ben were there."]
    assert [(made.updates, made.lost) for made in seen.history.timeline.rounds[-2:]] == [(593, []), (1, [])]
    dht.knows_others = True
    assert watcher.look() == {}, "the node that answers knows of no peer that trains"


def test_the_sentence_says_that_the_desks_own_disk_is_full(seen, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "swarm.desk.desk.shutil.disk_usage", lambda _: type("Usage", (), {"free": LEAST_FREE_BYTES - 1})
    )
    seen.train("ada", "ben", steps=range(8))
    assert sentence(seen) == ("warning", "The desk's own disk is nearly full: 1,024 MiB are free.")
    seen.path.mkdir()
    seen.desk.save()
    seen.train("ada", "ben", steps=range(8, 10))
    told = "The desk cannot save its history (Is a directory): check its folder and its disk."
    assert sentence(seen) == ("warning", told)


def test_a_folder_that_is_deleted_does_not_end_the_desk(another, tmp_path):
    folder = tmp_path / "letters"
    folder.mkdir()
    run = another("letters/desk.json")
    run.train("ada", "ben", steps=range(8))
    folder.rmdir()
    run.train("ada", "ben", steps=range(8, 10))
    told = "The desk cannot save its history (No such file or directory): check its folder and its disk."
    assert sentence(run) == ("warning", told)
    folder.mkdir()
    run.desk.save()
    run.train("ada", "ben", steps=range(10, 12))
    assert sentence(run)[0] == "good"


def test_the_sentence_names_certificates_that_are_not_renewed(seen):
    """Peers end with their certificates, and here all of these end within a day."""
    peers = [PeerID(bytes([18, 32, *[number] * 32])) for number in range(3)]
    seen.train("ada", "ben", steps=range(8))
    assert sentence(seen)[0] == "good"
    seen.ending = [
        Certificate("letters", peer, number, EVERYTHING, 0, int(seen.now + hours * 3600), name)
        for number, (peer, name, hours) in enumerate(zip(peers, ("ada", "ben", "cleo"), (5, 3, 4), strict=True))
    ]
    seen.train("ada", "ben", steps=range(8, 10))
    level, said = sentence(seen)
    assert level == "warning"
    assert said.startswith("The certificate of 'ben' ends in 3 hours, and 2 more soon after, and was not renewed: ")
    seen.ending = []
    seen.train("ada", "ben", steps=range(10, 12))
    assert sentence(seen)[0] == "good"


class Mailbox:
    """A server that takes what Apprise sends as JSON."""

    def __init__(self):
        self.received: list[dict] = []
        self.status = 200
        self.answers = threading.Event()
        """Cleared: whatever is sent waits until it is set again."""
        self.answers.set()
        mailbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                mailbox.answers.wait()
                if mailbox.status == 200:
                    mailbox.received.append(json.loads(body))
                self.send_response(mailbox.status)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"json://127.0.0.1:{self.server.server_port}/"

    @property
    def texts(self) -> list[str]:
        return [message["message"] for message in self.received]

    def close(self) -> None:
        self.answers.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def mailbox():
    mailbox = Mailbox()
    yield mailbox
    mailbox.close()


def test_an_alert_is_sent_once_and_once_more_when_the_matter_is_over(another, mailbox):
    run = another(urls=(mailbox.url,))

    def go_on(seconds: float, *names: str) -> None:
        for _ in range(int(seconds / 2)):
            step = (run.history.step or 0) + 1
            run.look(*(run.record(name, step) for name in names))
            run.alerts.wait()

    go_on(SURE_SECONDS - 2, "ada", "ben")
    assert mailbox.texts == []
    go_on(SURE_SECONDS - 4)
    go_on(SETTLED_SECONDS, "ada", "ben")
    assert mailbox.texts == [], "it was over before the desk was sure"
    go_on(10 * SURE_SECONDS)
    told = ["No peer trains: the desk finds no peer in the run."]
    assert mailbox.texts == told
    go_on(SETTLED_SECONDS - 10, "ada", "ben")
    go_on(10)
    assert mailbox.texts == told, "it is not over"
    go_on(2 * SETTLED_SECONDS, "ada", "ben")
    assert mailbox.texts == [*told, f"This is over: {told[0]}"]
    assert [message["type"] for message in mailbox.received] == ["failure", "success"]
    assert {message["title"] for message in mailbox.received} == {"Swarm letters"}
    run.alerts.stop()


def test_what_ends_while_its_message_is_on_its_way_is_well_again(another, mailbox):
    run = another(urls=(mailbox.url,))
    mailbox.answers.clear()
    run.look()
    run.look(after=SURE_SECONDS)
    for step in range(1, 4):
        run.look(run.record("ada", step), run.record("ben", step))
    mailbox.answers.set()
    run.alerts.wait()
    told = "No peer trains: the desk finds no peer in the run."
    assert mailbox.texts == [told]
    for step in range(4, 4 + int(SETTLED_SECONDS)):
        run.look(run.record("ada", step), run.record("ben", step))
        run.alerts.wait()
    assert mailbox.texts == [told, f"This is over: {told}"]
    run.alerts.stop()


def test_a_matter_that_is_hidden_by_something_worse_is_not_well_again(another, mailbox):
    run = another(urls=(mailbox.url,))

    def for_long(look) -> None:
        for _ in range(int(SETTLED_SECONDS)):
            look()
            run.alerts.wait()

    def nobody_answers() -> None:
        run.now += 2
        run.desk.turn(None)

    for_long(lambda: run.look(run.record("ada", 1), run.record("ben", 1, client_mode=True)))
    for_long(run.look)
    for_long(nobody_answers)
    alone, nobody, deaf = mailbox.texts
    assert alone.startswith("Only 'ada' can be called.")
    assert nobody.startswith("No peer trains")
    assert deaf.startswith("No peer has answered the desk")
    for_long(run.look)
    (over,) = mailbox.texts[3:]
    assert over.startswith("This is over: No peer has answered the desk")
    for_long(lambda: run.look(run.record("ada", 1), run.record("cleo", 1)))
    assert set(mailbox.texts[4:]) == {f"This is over: {alone}", f"This is over: {nobody}"}
    run.alerts.stop()


def test_a_message_that_does_not_get_through_is_sent_again(another, mailbox):
    run = another(urls=(mailbox.url,))
    mailbox.status = 500
    for _ in range(20):
        run.look()
        run.alerts.wait()
    assert mailbox.texts == []
    mailbox.status = 200
    for _ in range(int(RETRY_SECONDS)):
        run.look()
        run.alerts.wait()
    assert len(mailbox.texts) == 1
    run.alerts.stop()


def test_a_place_that_apprise_does_not_know_is_refused_without_its_password():
    with pytest.raises(InputError, match="--alert number 1 is no URL") as refusal:
        Alerts(["nonsense://user:secret@example.org"])
    assert "secret" not in str(refusal.value)


def test_certificates_are_late_when_a_quarter_of_their_time_is_left():
    organiser, dht, now = Organiser(), FakeDHT(), get_dht_time()
    day = 86_400
    for name, begin, end in (("ada", -0.7 * day, 0.3 * day), ("ben", -0.8 * day, 0.2 * day), ("cleo", -60, day)):
        admission = organiser.admission(peer_of(subkey_of(name)), begin=begin, end=end, name=name)
        record = replace(RECORD, name=name, joined=now, time=now)
        dht.store("", subkey_of(name), admission.show(record.to_bytes()), now + 60, True)
    watcher = Watcher(dht, SimpleNamespace(authority=organiser.authority, key_prefix="run"), ())
    assert {record.name for record in watcher.look().values()} == {"ada", "ben", "cleo"}
    assert [certificate.name for certificate in watcher.ending] == ["ben"]
