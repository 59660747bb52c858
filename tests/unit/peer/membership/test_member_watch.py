"""What a member does while it trains: it hears of removals, renews its certificate, and leaves when it has to."""

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from recipe.errors import InputError
from swarm.enrolment.removed import Removed
from swarm.network.signed_records import peer_of
from swarm.peer.membership import member_watch
from swarm.peer.membership.member_watch import MemberWatch
from swarm.protocol.orders import Order, Orders, What
from swarm.protocol.signed_lists import ORDERS, REMOVED
from tests.helpers.owners import Organiser, subkey_of
from tests.helpers.records import done

ADA, BOB, CLEO = (peer_of(subkey_of(name)) for name in ("ada", "bob", "cleo"))


class DHT:
    """A stand-in for the DHT process: what it knows, and what it was told."""

    owner = subkey_of("ada")
    acquaintances = SimpleNamespace(peers=())

    def __init__(self):
        self.lists = {}
        self.searched = 0
        self.pushed: list[bytes] = []
        self.shown: list[bytes] = []

    def hears(self, organiser: Organiser, signed: bytes) -> None:
        self.lists[REMOVED] = organiser.removals.number, signed

    def hears_orders(self, signed: bytes, number: int) -> None:
        self.lists[ORDERS] = number, signed

    def list_number(self, kind: str) -> int:
        return self.lists.get(kind, (0, b""))[0]

    def newest_list(self, kind: str, _timeout_seconds: float) -> bytes:
        return self.lists[kind][1]

    def get(self, _key: str, **_options) -> Future:
        self.searched += 1
        return done(None)

    def run_coroutine(self, push, **_options) -> Future:
        self.pushed.append(push.value)
        return done(None)

    def take_part(self, _prefix: str, _authority, certificate: bytes) -> None:
        self.shown.append(certificate)


class Watched:
    """A member, and what it has told and been told."""

    def __init__(self, organiser: Organiser, begin: float = -10, end: float = 1000, renews=None, merges=None):
        self.organiser, self.dht = organiser, DHT()
        self.admission = organiser.admission(ADA, begin=begin, end=end)
        self.told: list[tuple[bytes, dict[str, bytes]]] = []
        self.knows, self.ends = True, []
        self.watch = MemberWatch(
            self.dht, self.admission, "run-1", self._tell, renews or self._refuse, self.ends.append, merges
        )

    def look(self) -> None:
        """Look, wait for the renewal that this may have begun, and look again."""
        self.watch.look()
        for renewal in [thread for thread in threading.enumerate() if thread.name == "renewal"]:
            renewal.join(10)
        self.watch.look()

    def _tell(self, certificate: bytes, lists: dict[str, bytes]) -> bool:
        self.told.append((certificate, lists))
        return self.knows

    def _refuse(self, _before: bytes) -> bytes:
        raise InputError("The enrolment server does not answer.")


@pytest.fixture
def organiser() -> Organiser:
    return Organiser()


def test_the_averaging_process_is_told_once_it_is_there(organiser):
    member = Watched(organiser)
    member.knows = False
    member.watch.look()
    member.watch.look()
    assert len(member.told) == 2, "it is started later"
    member.knows = True
    member.watch.look()
    member.watch.look()
    assert len(member.told) == 3
    assert not member.ends


def test_a_member_hears_of_removals_and_passes_them_on(organiser):
    member, bob = Watched(organiser), organiser.admission(BOB)
    member.watch.look()
    member.admission.admit(bob.show(b""), BOB)
    signed = organiser.remove(bob)
    member.dht.hears(organiser, signed)
    member.watch.look()
    assert member.admission.is_removed(BOB)
    assert member.told[-1] == (member.admission.certificate, {REMOVED: signed})
    assert member.dht.pushed == [signed]
    member.watch.look()
    assert member.dht.pushed == [signed], "not again and again"
    assert not member.ends


def test_the_organisers_peer_brings_a_list_together_with_the_books(organiser):
    bob = organiser.admission(BOB)
    heard = []
    member = Watched(organiser, merges=lambda signed: heard.append(signed) or organiser.remove(bob))
    member.admission.admit(bob.show(b""), BOB)
    elsewhere = organiser.remove()
    member.dht.hears(organiser, elsewhere)
    member.watch.look()
    assert heard == [elsewhere]
    assert member.admission.is_removed(BOB)
    assert member.dht.pushed == [member.admission.lists.signed(REMOVED)] != [elsewhere]


def test_a_list_counts_while_the_books_cannot_be_used_and_is_brought_together_later(organiser, caplog, monkeypatch):
    tries = []

    def merges(heard: bytes) -> bytes:
        tries.append(heard)
        if len(tries) <= 2:
            raise InputError("The organiser's books cannot be used.")
        return organiser.remove(cleo)

    bob, cleo = organiser.admission(BOB), organiser.admission(CLEO)
    member = Watched(organiser, merges=merges)
    for admission, peer_id in ((bob, BOB), (cleo, CLEO)):
        member.admission.admit(admission.show(b""), peer_id)
    monkeypatch.setattr(member_watch, "MERGE_AGAIN_SECONDS", 0.0)
    elsewhere = organiser.remove(bob)
    member.dht.hears(organiser, elsewhere)
    member.watch.look()
    assert member.admission.is_removed(BOB)
    member.watch.look()
    assert not member.admission.is_removed(CLEO)
    member.watch.look()
    assert member.admission.is_removed(CLEO)
    assert tries == [elsewhere] * 3
    assert len([message for message in caplog.messages if "may lack some that the organiser" in message]) == 1


def test_books_that_cannot_be_used_are_left_alone_for_some_seconds(organiser):
    def fail(_heard: bytes) -> bytes:
        tries.append(1)
        raise InputError("The organiser's books cannot be used.")

    tries, bob = [], organiser.admission(BOB)
    member = Watched(organiser, merges=fail)
    member.admission.admit(bob.show(b""), BOB)
    for removed in ([], [bob]):
        member.dht.hears(organiser, organiser.remove(*removed))
        member.watch.look()
    assert member.admission.is_removed(BOB), "a list counts at once"
    assert len(tries) == 1


def test_a_member_leaves_when_it_was_removed_itself(organiser):
    member = Watched(organiser)
    member.dht.hears(organiser, organiser.remove(member.admission, why="it sent noise"))
    member.watch.look()
    (why,) = member.ends
    assert (type(why), str(why)) == (Removed, "The organiser has removed this peer from the run: it sent noise.")


def test_the_reason_of_a_deputy_moves_no_terminal(organiser):
    member = Watched(organiser)
    organiser.removals = replace(
        organiser.removals, number=1000 * int(time.time()), removed={member.admission.own.serial: "\x1b[2Jnoise"}
    )
    member.dht.hears(organiser, organiser.removals.signed_by(organiser.signer))
    member.watch.look()
    assert [str(why) for why in member.ends] == ["The organiser has removed this peer from the run: [2Jnoise."]


def test_a_member_renews_its_certificate_when_half_of_it_is_over(organiser):
    newer = organiser.certificate(ADA)
    young = Watched(organiser, begin=-10, end=100, renews=lambda before: pytest.fail("too early"))
    young.watch.look()
    member = Watched(organiser, begin=-100, end=10, renews=lambda before: newer)
    member.look()
    assert member.admission.certificate == newer
    assert member.dht.shown == [newer]
    member.look()
    assert member.told[-1] == (newer, {})
    assert member.dht.shown == [newer], "once"


def test_a_member_that_wakes_up_with_an_ended_certificate_renews_it(organiser):
    newer = organiser.certificate(ADA)
    member = Watched(organiser, begin=-100, end=-5, renews=lambda before: newer)
    member.look()
    assert not member.ends
    assert member.admission.certificate == newer


def test_a_member_goes_on_until_its_certificate_ends_and_says_why_it_cannot_be_renewed(organiser, caplog, monkeypatch):
    member = Watched(organiser, begin=-100, end=10)
    member.look()
    member.look()
    assert not member.ends
    (said,) = caplog.messages
    assert "could not be renewed: The enrolment server does not answer." in said
    over = Watched(organiser, begin=-100, end=-5)
    over.look()
    assert not over.ends, "it may have no network yet"
    monkeypatch.setattr(member_watch, "ENDED_SECONDS", 0.0)
    over.look()
    assert "This peer's certificate has ended and could not be renewed" in str(over.ends[0])


def test_a_renewal_that_takes_long_does_not_delay_the_organisers_lists(organiser):
    answers = threading.Event()

    def renews(before: bytes) -> bytes:
        assert answers.wait(30)
        return before

    member = Watched(organiser, begin=-100, end=10, renews=renews)
    looks = threading.Thread(target=member.watch.look)
    looks.start()
    looks.join(10)
    is_delayed = looks.is_alive()
    answers.set()
    looks.join()
    assert not is_delayed


def test_a_removed_peer_does_not_renew_its_certificate(organiser):
    member = Watched(organiser, begin=-100, end=10, renews=lambda before: renewed.append(before) or before)
    renewed: list[bytes] = []
    member.dht.hears(organiser, organiser.remove(member.admission))
    member.look()
    assert member.ends
    assert not renewed


def test_a_list_without_the_organisers_signature_changes_nothing(organiser):
    member, other = Watched(organiser), Organiser()
    member.dht.hears(other, other.remove(other.admission(ADA)))
    member.watch.look()
    assert not member.ends
    assert not member.admission.lists.signed(REMOVED)


def test_a_member_hears_orders_and_passes_them_on_however_they_came(organiser):
    member, orders = Watched(organiser), Orders("run").with_order(Order(7, What.PAUSE))
    signed = orders.signed_by(organiser.signer)
    member.dht.hears_orders(signed, 1)
    member.watch.look()
    assert member.admission.lists.orders == orders
    assert member.told[-1] == (member.admission.certificate, {ORDERS: signed})
    assert member.dht.pushed == [signed]
    newer = orders.with_order(Order(7, What.RESUME)).signed_by(organiser.signer)
    assert member.admission.lists.take(ORDERS, newer), "with a round"
    member.watch.look()
    assert member.told[-1] == (member.admission.certificate, {ORDERS: newer})
    assert member.dht.pushed == [signed, newer]


def test_a_newer_list_with_a_smaller_number_is_taken(organiser):
    """As where a deputy with an earlier warrant takes the place of one that has given more orders."""
    member, orders = Watched(organiser), Orders("run").with_order(Order(7, What.PAUSE))
    member.dht.hears_orders(orders.signed_by(organiser.signer), 2)
    member.watch.look()
    newer = orders.with_order(Order(7, What.RESUME))
    member.dht.hears_orders(newer.signed_by(organiser.signer), 1)
    member.watch.look()
    assert member.admission.lists.orders == newer


def test_a_list_with_a_forged_signature_is_refused_once(organiser, caplog):
    member, orders = Watched(organiser), Orders("run").with_order(Order(7, What.LEARNING_RATE, 0.5))
    member.dht.hears_orders(orders.signed_by(organiser.signer), 1)
    member.watch.look()
    member.dht.hears_orders(Orders("run", 0, (Order(7, What.END),)).signed_by(Organiser().signer), 2**60)
    member.watch.look()
    member.watch.look()
    assert member.admission.lists.orders == orders
    assert [message for message in caplog.messages if "list under orders" in message] == [
        "The organiser's list under orders was not signed by the organiser of this run"
    ]
