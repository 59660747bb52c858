"""What a member keeps on its disk to come back with."""

import base64
import json
import stat
from dataclasses import replace

import pytest
from hivemind.p2p import PeerID

from recipe.errors import InputError
from recipe.presets import preset
from recipe.run_folder import RunFolder
from swarm.enrolment.join_line import JoinLine
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from swarm.network.signed_records import prepare_identity
from swarm.peer.membership.credentials import Credentials, become_member, keep
from swarm.protocol.certificates import NotSigned
from swarm.protocol.order_book import revoke
from swarm.protocol.orders import Order, Orders, What
from swarm.protocol.signed_lists import ORDERS, REMOVED
from tests.helpers.owners import Organiser

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    path = tmp_path_factory.mktemp("identity") / "ada.key"
    prepare_identity(path)
    return path


@pytest.fixture
def peer_id(identity) -> PeerID:
    return PeerID.from_identity(identity.read_bytes())


@pytest.fixture
def organiser() -> Organiser:
    return Organiser("night-1")


@pytest.fixture
def line(organiser) -> JoinLine:
    """A join line at whose address no enrolment server answers."""
    return JoinLine("night-1", organiser.signer.public_key, (ADDRESS,), bytes(16), 9, bytes(16))


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path, "night-1", "ada")


def given(certificate: bytes) -> str:
    return base64.b64encode(certificate).decode()


def test_a_member_comes_back_with_what_it_has_kept(organiser, line, identity, peer_id, folder):
    member = become_member(line, identity, "ada", folder, given(organiser.certificate(peer_id)))
    manifest = RunManifest(PROTOCOL, "night-1", preset("digits")).signed_by(organiser.signer)
    keep(member, member.new_admission(), manifest, folder)
    assert stat.S_IMODE(folder.membership.stat().st_mode) == 0o600
    assert line.token not in base64.b64decode(json.loads(folder.membership.read_text())["certificate"])
    kept = Credentials.read(folder.membership)
    assert kept.line.token == b"", "an invitation is of no use to a member"
    assert RunManifest.from_bytes(kept.manifest) == manifest
    again = become_member(kept.line, identity, "ada", folder)
    assert again.new_admission().own == member.new_admission().own


def test_a_member_keeps_the_list_of_removed_members(organiser, line, identity, peer_id, folder):
    member = become_member(line, identity, "ada", folder, given(organiser.certificate(peer_id)))
    admission = member.new_admission()
    admission.lists.take(REMOVED, organiser.remove(admission, why="noise"))
    keep(member, admission, RunManifest(PROTOCOL, "night-1", preset("digits")), folder)
    assert become_member(line, identity, "ada", folder).new_admission().why_this_peer_was_removed == "noise"


@pytest.mark.parametrize("changed", ["the recipe", "nothing but the time"])
def test_orders_from_before_the_run_began_anew_do_not_count(organiser, line, identity, peer_id, folder, changed):
    """The run id is the same. Revocations and removals count all the same."""
    first = RunManifest(PROTOCOL, "night-1", preset("digits")).signed_by(organiser.signer)
    second = replace(first, begun=first.begun + 1)
    if changed == "the recipe":
        second = replace(first, recipe=replace(first.recipe, learning_rate=0.5))
    member = become_member(line, identity, "ada", folder, given(organiser.certificate(peer_id)))
    admission = replace(member, run=first.key_prefix).new_admission()
    admission.lists.take(REMOVED, organiser.remove(admission, why="noise"))
    ordered = Orders(first.key_prefix).with_order(Order(40, What.END)).signed_by(organiser.signer)
    admission.lists.take(ORDERS, ordered)
    admission.lists.take(ORDERS, revoke(bytes(32), [], organiser.signer, first.authority).to_bytes())
    keep(member, admission, first, folder)
    back = become_member(line, identity, "ada", folder)
    for run, num_orders in ((first.key_prefix, 1), (second.key_prefix, 0)):
        again = replace(back, run=run).new_admission()
        assert len(again.lists.orders.given) == num_orders
        assert again.lists.orders.revoked == {bytes(32)}
        assert again.why_this_peer_was_removed == "noise"
    with pytest.raises(NotSigned, match="not signed by the organiser"):
        again.lists.take(ORDERS, ordered)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda organiser, peer_id: organiser.certificate(PeerID(b"\x12\x20" + bytes(32))), "is for peer"),
        (lambda organiser, peer_id: organiser.certificate(peer_id, end=-5), "has ended"),
        (lambda organiser, peer_id: Organiser("night-1").certificate(peer_id), "was not signed by the organiser"),
        (lambda organiser, peer_id: b"nonsense", "cannot be read"),
        (lambda organiser, peer_id: bytes(5000), "too long"),
    ],
)
def test_a_certificate_that_does_not_count_is_refused(organiser, line, identity, peer_id, folder, make, says):
    with pytest.raises(InputError, match=says) as error:
        become_member(line, identity, "ada", folder, given(make(organiser, peer_id)))
    assert "ask the organiser for another one" in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"line": 7}', "{" * 5000, '{"line": "swarm://x", "certificate": ""}']
)
def test_a_file_that_cannot_be_read_is_replaced_by_a_new_request(line, identity, folder, text):
    folder.membership.write_text(text)
    assert Credentials.read(folder.membership) is None
    with pytest.raises(InputError, match="The enrolment server does not answer"):
        become_member(line, identity, "ada", folder)


def test_the_certificate_of_another_organiser_is_not_used(organiser, line, identity, peer_id, folder):
    other = Organiser("night-1")
    theirs = JoinLine("night-1", other.signer.public_key, (ADDRESS,))
    Credentials(theirs, other.certificate(peer_id)).write(folder.membership)
    with pytest.raises(InputError, match="The enrolment server does not answer"):
        become_member(line, identity, "ada", folder)


def test_a_member_that_cannot_renew_hears_that_its_certificate_has_ended(organiser, line, identity, peer_id, folder):
    Credentials(line, organiser.certificate(peer_id, end=-5)).write(folder.membership)
    with pytest.raises(
        InputError,
        match=r"This peer's certificate ended on 20.* UTC, and the enrolment server does not answer: .*--peer-id",
    ) as error:
        become_member(line, identity, "ada", folder)
    assert str(error.value).count(". ") == 0, "one sentence"
