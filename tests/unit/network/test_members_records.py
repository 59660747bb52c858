"""What a DHT node does with the records of a run by invitation, and what strangers cannot do to it."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey

from recipe.presets import digits
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from swarm.network.dht_storage import MAX_COPIES, BoundedStorage, KnownKeys, store_requested
from swarm.network.signed_records import ADDRESSES, PROGRESS, REMOVED, OwnedRecords
from swarm.protocol.admission import Admission
from swarm.protocol.certificates import HELPER, Role
from swarm.protocol.run_names import key_prefix
from tests.helpers.owners import Organiser

KEYS = [RSAPrivateKey() for _ in range(2)]


class Node:
    """A member's node, without a network."""

    def __init__(self, organiser: Organiser):
        self.organiser, self.prefix = organiser, "run-1~abc"
        self.given: dict[OwnedRecords, dht_pb2.StoreRequest] = {}
        """What each signer wanted to store last."""
        self.records = OwnedRecords(KEYS[0])
        self.records.take_part(Admission(organiser.authority), self.prefix)
        self.protocol = SimpleNamespace(
            storage=BoundedStorage(KnownKeys(self.records)),
            cache=None,
            serializer=MSGPackSerializer,
            record_validator=CompositeValidator([self.records]),
            IS_DICTIONARY="dictionary",
        )

    async def is_given(self, signer: OwnedRecords, kind: str, value: bytes) -> bool:
        """Whether the node stores a record that this signer wants to store here."""
        key, expiration = DHTID.generate(source=f"{self.prefix}.{kind}").to_bytes(), time.time() + 60
        subkey, content = MSGPackSerializer.dumps(signer.local_public_key), MSGPackSerializer.dumps(value)
        signed = signer.sign_value(DHTRecord(key, subkey, content, expiration))
        self.given[signer] = dht_pb2.StoreRequest(
            keys=[key], subkeys=[subkey], values=[signed], expiration_time=[expiration], in_cache=[False]
        )
        return await self.is_given_again(signer)

    async def is_given_again(self, signer: OwnedRecords) -> bool:
        """The last record of this signer, which anybody can pass on."""
        (stored,) = await store_requested(self.protocol, self.given[signer])
        return stored

    def copies(self) -> int:
        found = self.protocol.storage.get(DHTID.generate(source=f"{self.prefix}.{REMOVED}"))
        return 0 if found is None else len(found.value)


@pytest.fixture
def organiser() -> Organiser:
    return Organiser("run")


@pytest.fixture
def node(organiser) -> Node:
    return Node(organiser)


@pytest.fixture
def ada() -> OwnedRecords:
    """A peer that may be invited."""
    return OwnedRecords(KEYS[1])


def run(coroutine):

    return asyncio.run(coroutine)


def test_only_members_store_records(node, organiser, ada):
    assert not run(node.is_given(ada, PROGRESS, b"hello"))
    assert not run(node.is_given(ada, PROGRESS, organiser.admission(node.records.own).show(b"hello")))
    assert not run(node.is_given(ada, PROGRESS, Organiser("run").admission(ada.own).show(b"hello")))
    member = organiser.admission(ada.own)
    assert run(node.is_given(ada, PROGRESS, member.show(b"hello")))
    assert ada.own in node.records.met, "a member is no stranger"
    assert run(node.is_given(ada, REMOVED, organiser.remove(member)))
    assert node.records.list_numbers[REMOVED].value == organiser.removals.number
    assert not run(node.is_given(ada, PROGRESS, member.show(b"hello again")))
    assert ada.own not in node.records.met, "a removed member is a stranger again"


def test_a_member_that_only_watches_stores_no_records(node, organiser, ada):
    for kind in (PROGRESS, ADDRESSES):
        assert not run(node.is_given(ada, kind, organiser.admission(ada.own, roles=Role.WATCH).show(b"hello")))
    assert ada.own not in node.records.met
    for roles in (Role.TRAIN | Role.WATCH, HELPER):
        assert run(node.is_given(ada, PROGRESS, organiser.admission(ada.own, roles=roles).show(b"hello")))


def test_a_newer_list_takes_the_place_of_all_copies_of_the_older_one(node, organiser):
    """Otherwise a stranger that stores the old list in many names would keep the new one out."""
    strangers = [OwnedRecords(RSAPrivateKey()) for _ in range(MAX_COPIES + 1)]
    member = organiser.admission(strangers[0].own)
    older = organiser.remove(member)
    assert [run(node.is_given(stranger, REMOVED, older)) for stranger in strangers] == [True] * MAX_COPIES + [False]
    assert node.copies() == MAX_COPIES
    newer = organiser.remove(organiser.admission(strangers[1].own))
    assert run(node.is_given(strangers[-1], REMOVED, newer))
    assert node.copies() == 1
    assert node.records.own_run.lists.signed(REMOVED) == newer
    assert not run(node.is_given(strangers[0], REMOVED, older))


def test_records_of_an_older_list_are_not_stored_again(node, organiser):
    """They were valid when they came, and each is remembered as checked."""
    strangers = [OwnedRecords(RSAPrivateKey()) for _ in range(2)]
    older = organiser.remove(organiser.admission(strangers[0].own))
    assert run(node.is_given(strangers[0], REMOVED, older))
    newer = organiser.remove(organiser.admission(strangers[1].own))
    assert run(node.is_given(strangers[1], REMOVED, newer))
    assert not run(node.is_given_again(strangers[0]))
    assert run(node.is_given_again(strangers[1])) is False, "it is there already"
    assert node.copies() == 1


def test_copies_of_an_older_list_make_room_although_the_newer_one_was_heard_elsewhere(node, organiser):
    """As in a search, whose answers are checked and not stored."""
    strangers = [OwnedRecords(RSAPrivateKey()) for _ in range(MAX_COPIES + 1)]
    older = organiser.remove(organiser.admission(strangers[0].own))
    for stranger in strangers[:MAX_COPIES]:
        assert run(node.is_given(stranger, REMOVED, older))
    newer = organiser.remove(organiser.admission(strangers[1].own))
    assert node.records.own_run.lists.take(REMOVED, newer)
    assert run(node.is_given(strangers[-1], REMOVED, newer))
    assert node.copies() == 1


def test_a_list_counts_again_after_its_run_was_forgotten(node, ada):
    other, node.prefix = Organiser("other"), "other-1~abc"
    key = DHTID.generate(source=f"{node.prefix}.{REMOVED}")
    node.records.written.add(key.to_bytes())
    node.records.admit_by(Admission(other.authority), node.prefix)
    assert run(node.is_given(ada, REMOVED, other.remove(other.admission(ada.own))))
    node.protocol.storage.forget(key)
    node.records.forget_admission(key.to_bytes())
    again = Admission(other.authority)
    node.records.admit_by(again, node.prefix)
    assert run(node.is_given_again(ada))
    assert again.lists.signed(REMOVED)


def test_a_stranger_that_uses_up_the_checks_for_strangers_keeps_no_member_out(node, organiser, ada):
    member = organiser.admission(ada.own)
    assert run(node.is_given(ada, PROGRESS, member.show(b"hello")))
    while node.records.strangers.take():
        pass
    assert run(node.is_given(ada, PROGRESS, member.show(b"hello again")))
    stranger = OwnedRecords(RSAPrivateKey())
    assert run(node.is_given(stranger, REMOVED, organiser.remove(member))), "any peer may pass it on"
    assert stranger.own not in node.records.met, "but that makes no peer known"


def test_made_up_lists_keep_no_list_of_the_organiser_out(node, organiser):
    """The organiser hands her list out as a stranger."""
    forger, stranger = OwnedRecords(RSAPrivateKey()), OwnedRecords(RSAPrivateKey())
    forged = Organiser("run")
    member = organiser.admission(forger.own)
    for _ in range(800):
        assert not run(node.is_given(forger, REMOVED, forged.remove(member)))
    assert run(node.is_given(stranger, REMOVED, organiser.remove(member)))


def test_members_of_another_run_are_strangers(node, ada):
    """An organiser's key costs nothing. A stranger that makes one up does not become known everywhere by that."""
    other = Organiser("other")
    node.records.admit_by(Admission(other.authority), "other-1~abc")
    node.prefix = "other-1~abc"
    node.records.written.add(DHTID.generate(source=f"other-1~abc.{PROGRESS}").to_bytes())
    assert run(node.is_given(ada, PROGRESS, other.admission(ada.own).show(b"hello")))
    assert ada.own not in node.records.met


def test_no_open_run_gets_the_keys_of_one_by_invitation(organiser):
    closed = RunManifest(PROTOCOL, "run", digits()).signed_by(organiser.signer)
    name, _, digest = closed.key_prefix.rpartition("~")
    assert closed.key_prefix != RunManifest(PROTOCOL, "run", digits()).key_prefix
    with pytest.raises(ValueError, match="no run id"):
        key_prefix(f"{name}~", digest)
