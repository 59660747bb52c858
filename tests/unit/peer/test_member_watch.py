"""What a member does while it trains: hear who was removed, renew its certificate, leave when it has to."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from recipe.errors import InputError
from swarm.network.signed_records import peer_of
from swarm.peer.membership.member_watch import MemberWatch
from tests.helpers.owners import Organiser, subkey_of

ADA, BOB = (peer_of(subkey_of(name)) for name in ("ada", "bob"))


class DHT:
    """What the DHT process knows, and what it was told."""

    owner = subkey_of("ada")
    acquaintances = SimpleNamespace(peers=())

    def __init__(self):
        self.removals_number, self.removals = 0, b""
        self.searched = 0
        self.pushed: list[bytes] = []
        self.shown: list[bytes] = []

    def hears(self, organiser: Organiser, signed: bytes) -> None:
        self.removals_number, self.removals = organiser.removals.number, signed

    def newest_removals(self, _timeout_seconds: float) -> bytes:
        return self.removals

    def get(self, _key: str, **_options) -> Future:
        self.searched += 1
        return _done(None)

    def run_coroutine(self, push, **_options) -> Future:
        self.pushed.append(push.value)
        return _done(None)

    def take_part(self, _prefix: str, _authority, certificate: bytes) -> None:
        self.shown.append(certificate)


def _done(value) -> Future:
    future = Future()
    future.set_result(value)
    return future


class Watched:
    """A member, and what it has told and been told."""

    def __init__(self, organiser: Organiser, begin: float = -10, end: float = 1000, renews=None):
        self.organiser, self.dht = organiser, DHT()
        self.admission = organiser.admission(ADA, begin=begin, end=end)
        self.told: list[tuple[bytes, bytes]] = []
        self.knows, self.ends = True, []
        self.watch = MemberWatch(
            self.dht, self.admission, "run-1", self._tell, renews or self._refuse, self.ends.append
        )

    def _tell(self, certificate: bytes, removals: bytes) -> bool:
        self.told.append((certificate, removals))
        return self.knows

    def _refuse(self, _before: bytes) -> bytes:
        raise InputError("Nobody answers where one could enrol.")


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


def test_it_hears_who_was_removed_and_passes_that_on(organiser):
    member, bob = Watched(organiser), organiser.admission(BOB)
    member.watch.look()
    member.admission.admit(bob.show(b""), BOB)
    signed = organiser.remove(bob)
    member.dht.hears(organiser, signed)
    member.watch.look()
    assert member.admission.is_removed(BOB)
    assert member.told[-1] == (member.admission.certificate, signed)
    assert member.dht.pushed == [signed]
    member.watch.look()
    assert member.dht.pushed == [signed], "not again and again"
    assert not member.ends


def test_it_leaves_when_it_was_removed_itself(organiser):
    member = Watched(organiser)
    member.dht.hears(organiser, organiser.remove(member.admission, why="it sent noise"))
    member.watch.look()
    assert member.ends == ["The organiser has removed this peer from the run: it sent noise."]


def test_it_renews_its_certificate_when_half_of_it_is_over(organiser):
    newer = organiser.certificate(ADA)
    young = Watched(organiser, begin=-10, end=100, renews=lambda before: pytest.fail("too early"))
    young.watch.look()
    member = Watched(organiser, begin=-100, end=10, renews=lambda before: newer)
    member.watch.look()
    assert member.admission.certificate == newer
    assert member.dht.shown == [newer]
    member.watch.look()
    assert member.told[-1] == (newer, b"")
    assert member.dht.shown == [newer], "once"


def test_it_goes_on_until_its_certificate_ends_and_says_why_it_cannot_be_renewed(organiser, caplog):
    member = Watched(organiser, begin=-100, end=10)
    member.watch.look()
    member.watch.look()
    assert not member.ends
    (said,) = caplog.messages
    assert "could not be renewed: Nobody answers where one could enrol." in said
    over = Watched(organiser, begin=-100, end=-5)
    over.watch.look()
    assert "This peer's certificate has ended and could not be renewed" in over.ends[0]


def test_a_list_that_nobody_signed_changes_nothing(organiser):
    member, other = Watched(organiser), Organiser()
    member.dht.hears(other, other.remove(other.admission(ADA)))
    member.watch.look()
    assert not member.ends
    assert not member.admission.signed_removals
