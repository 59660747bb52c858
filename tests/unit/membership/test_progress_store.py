"""Records are read where they were pushed to. Only a peer that has to searches for them."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
from hivemind.utils import get_dht_time

from swarm.membership import progress_store
from swarm.membership.progress_store import LATE_REPORTS, ProgressStore, read_record
from swarm.network.record_push import Push
from swarm.network.signed_records import peer_of
from swarm.protocol.admission import Admission
from swarm.protocol.certificates import EVERYTHING, Role
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from tests.helpers.owners import Organiser, subkey_of
from tests.helpers.records import RECORD, FakeDHT, done


class Board(ProgressStore):
    """A store whose records are in the DHT at once."""

    def __init__(self):
        self.dht = FakeDHT()
        super().__init__(self.dht, "run.progress")

    def says(self, name: str, age: float = 0.0) -> None:
        now = get_dht_time()
        record = replace(RECORD, name=name, joined=now - 60, time=now - age)
        self.dht.store("", subkey_of(name), record.to_bytes(), now + DEFAULT_TIMEOUTS.record_seconds, True)

    def searches(self, **options) -> int:
        """Number of searches that one look makes."""
        before = self.dht.searches
        self.look(**options)
        return self.dht.searches - before


@pytest.fixture
def board():
    board = Board()
    board.says("anna")
    assert board.searches() == 1, "it has not met any peer yet"
    return board


def test_a_peer_that_is_told_in_time_does_not_search(board):
    board.says("ben")
    assert board.searches() == 0
    assert board.look().keys() == {peer_of(subkey_of(name)) for name in ("anna", "ben")}


def test_a_peer_that_is_not_told_in_time_searches(board):
    board.says("anna", age=LATE_REPORTS * DEFAULT_TIMEOUTS.report_seconds + 0.1)
    assert board.searches() == 1
    board.says("anna", age=LATE_REPORTS * DEFAULT_TIMEOUTS.report_seconds - 0.5)
    assert board.searches() == 0
    board.dht.records.clear()
    board.says("ben")
    assert board.searches() == 1, "anna is gone, from here at least"
    assert board.searches() == 0, "and is not expected any more"


def test_a_search_without_an_end_hides_nothing_that_is_here(board):
    """Otherwise a node that answers slowly, and names other nodes without end, would divide the run."""
    board.says("ben")
    board.dht.finds_an_end = False
    both = {peer_of(subkey_of(name)) for name in ("anna", "ben")}
    assert board.look(search=True).keys() == both
    assert board.searches() == 0, "the next look does not search again at once"
    board.dht.records.clear()
    with pytest.raises(TimeoutError):
        board.look(search=True)


def test_a_search_that_was_broken_off_and_found_no_peer_does_not_say_that_there_is_none(board, monkeypatch):
    board.dht.records.clear()
    monkeypatch.setattr(progress_store, "SEARCH_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="have not answered"):
        board.look(search=True)
    board.says("ben")
    assert board.look(search=True).keys() == {peer_of(subkey_of("ben"))}


class EndlessDHT(FakeDHT):
    """A DHT in which no search ends. It notes what is begun."""

    def __init__(self):
        super().__init__()
        self.begun = []

    def store(self, *_arguments, **_options):
        self.begun.append("search")
        return Future()

    def run_coroutine(self, what, return_future):
        self.begun.append(type(what))
        return done(1)


def test_a_record_is_out_before_any_search_and_waits_for_none():
    dht = EndlessDHT()
    store = ProgressStore(dht, "run.progress")
    assert store.post(RECORD).done()
    assert dht.begun == [Push, "search"]
    assert store.post(RECORD).done()
    assert dht.begun == [Push, "search", Push]
    assert not store.post(None).done(), "a goodbye waits for the search, for peers that this one does not know"
    assert dht.begun == [Push, "search", Push, Push, "search"]


def test_a_peer_that_is_alone_or_has_to_be_sure_searches(board):
    assert board.searches(search=True) == 1
    board.dht.records.clear()
    assert board.searches() == board.searches() == 1


def test_every_peer_searches_now_and_then(board, monkeypatch):
    later = progress_store.time.monotonic() + DEFAULT_TIMEOUTS.search_seconds + 0.1
    monkeypatch.setattr("swarm.membership.progress_store.time.monotonic", lambda: later)
    assert board.searches() == 1
    assert board.searches() == 0


def test_a_peer_that_is_never_told_searches_each_time(board):
    board.dht.is_told = False
    assert [board.searches() for _ in range(3)] == [1, 1, 1]
    assert board.look()


def test_a_member_joined_at_the_same_time_at_each_look_although_the_organisers_clock_was_ahead():
    """A peer remembers its group by these times. It would forget its members, and no two would ever meet."""
    organiser, now, ada = Organiser(began=-7200), get_dht_time(), peer_of(subkey_of("ada"))
    record = replace(RECORD, joined=now - 30, time=now)
    shown, here = organiser.admission(ada).show(record.to_bytes()), Admission(organiser.authority)
    assert {read_record(shown, ada, here, now + look).joined for look in (0, 1, 2)} == {record.joined}


@pytest.mark.parametrize(
    ("roles", "client_mode", "is_read"),
    [
        (EVERYTHING, False, True),
        (Role.TRAIN, True, True),
        (Role.TRAIN, False, False),
        (Role.WATCH, True, False),
        (Role.WATCH | Role.SERVE, False, True),
    ],
)
def test_a_record_says_no_more_than_its_certificate_allows(roles, client_mode, is_read):
    organiser, now, ada = Organiser(began=10), get_dht_time(), peer_of(subkey_of("ada"))
    record = replace(RECORD, joined=now - 10**6, time=now, client_mode=client_mode)
    shown = organiser.admission(ada, roles=roles).show(record.to_bytes())
    here = Admission(organiser.authority)
    if not is_read:
        with pytest.raises(ValueError, match="a certificate with which it cannot"):
            read_record(shown, ada, here, now)
        return
    found = read_record(shown, ada, here, now)
    assert found.name == "ada", "as the organiser knows it, whatever it says"
    assert found.joined == pytest.approx(now, abs=60), "it was not there before it was a member"
    trains = Role.TRAIN in roles
    assert (found.helps, found.samples, found.rate) == (not trains, RECORD.samples * trains, RECORD.rate * trains)
    assert read_record(organiser.admission(ada).show(b""), ada, here, now) is None, "it has left"
