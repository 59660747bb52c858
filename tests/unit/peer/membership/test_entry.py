"""How a peer is admitted to its run: what is decided before any other peer is called."""

import socket
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from recipe.errors import InputError
from recipe.presets import preset
from recipe.run_folder import RunFolder
from swarm.enrolment.join_line import JoinLine
from swarm.enrolment.organiser_folder import OrganiserFolder
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from swarm.network.signed_records import peer_of
from swarm.peer.bootstrap import unfolded
from swarm.peer.membership import enrolment_process
from swarm.peer.membership.credentials import Credentials
from swarm.peer.membership.entry import Entry, how_to_join, open_door
from swarm.peer.options import ConnectionOptions, MachineOptions, MembershipOptions, PeerOptions, parse_options
from tests.helpers.owners import Organiser, subkey_of

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADA = peer_of(subkey_of("ada"))
RECIPE = preset("digits")


@pytest.fixture
def options(tmp_path) -> PeerOptions:
    return PeerOptions(machine=MachineOptions(output_dir=tmp_path, public_name="ada"))


@pytest.fixture
def organiser() -> Organiser:
    return Organiser("night-1")


@pytest.fixture
def line(organiser) -> JoinLine:
    return JoinLine("night-1", organiser.signer.public_key, (ADDRESS,))


def test_a_join_line_says_where_and_which_run(options, line):
    found, parsed = unfolded(replace(options, initial_peers=(str(line),)))
    assert parsed == line
    assert (found.initial_peers, found.run_id) == ((ADDRESS,), "night-1")
    assert Entry(found, parsed).organiser == line.organiser
    words = str(line)[:60], str(line)[60:]  # as a messenger may break it
    assert unfolded(replace(options, initial_peers=words))[1] == line
    with pytest.raises(InputError, match="is of run night-1, and --run-id says other"):
        unfolded(replace(options, initial_peers=(str(line),), run_id="other"))


def test_addresses_are_no_join_line(options):
    given = replace(options, initial_peers=(ADDRESS,))
    assert unfolded(given) == (given, None)
    assert Entry(given, None).organiser == b""


def test_the_organiser_makes_her_key_once(options, tmp_path):
    hers = replace(options, run_id="night-1", membership=MembershipOptions(by_invitation=True))
    first = Entry(hers, None).new_manifest(PROTOCOL, RECIPE)
    assert first.organiser == OrganiserFolder(tmp_path, "night-1").signer().public_key
    assert first.authority.run_id == "night-1"
    assert Entry(hers, None).new_manifest(PROTOCOL, RECIPE).organiser == first.organiser


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_run_keeps_its_beginning_as_long_as_the_organisers_peer_has_its_folder(options, line, tmp_path, has_folder):
    """Orders count for one beginning: those of an earlier run must not end a new one of the same name.

    No checkpoint is needed. If her peer is killed before it has made one, others train on, and it comes back to
    them.
    """
    entry = Entry(replace(options, run_id="night-1", membership=MembershipOptions(by_invitation=True)), None)
    entry.name_peer(tmp_path / "unused", "ada")
    signer = OrganiserFolder(tmp_path, "night-1").make_signer()
    before = RunManifest(PROTOCOL, "night-1", RECIPE, begun=1000).signed_by(signer)
    assert before.begun == 1000
    if has_folder:
        folder = RunFolder.create(tmp_path, "night-1", "ada")
        Credentials(replace(line, organiser=signer.public_key), b"", {}, before.to_bytes()).write(folder.membership)
    again = entry.new_manifest(PROTOCOL, RECIPE)
    assert (again.key_prefix == before.key_prefix) == has_folder
    assert again.signed_by(signer).key_prefix == again.key_prefix


def test_the_organisers_peer_takes_no_other_port_than_the_one_that_join_lines_name(options, tmp_path):
    """Members renew their certificates at the port in their lines.

    At another one they could not, and would drop out.
    """
    entry = Entry(replace(options, run_id="night-1", membership=MembershipOptions(by_invitation=True)), None)
    manifest, folder = entry.new_manifest(PROTOCOL, RECIPE), OrganiserFolder(tmp_path, "night-1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        folder.note_contact(manifest.organiser, [ADDRESS], port)
        with pytest.raises(InputError, match=f"uses port {port}, .*`swarm enrol`.* another --enrolment-port"):
            entry.take_part(SimpleNamespace(), manifest, [ADDRESS])


@pytest.fixture
def invitation_of(options, tmp_path, monkeypatch) -> Callable[..., tuple[JoinLine, str]]:
    """The line and the text that the organiser's peer of run night-1 prints at a start with these options."""

    def take_part(*_) -> None:
        raise RuntimeError("this is as far as it goes here")

    monkeypatch.setattr(enrolment_process, "EnrolmentProcess", lambda *_: SimpleNamespace(port=31338))

    def started_with(**membership) -> tuple[JoinLine, str]:
        hers = replace(options, run_id="night-1", membership=MembershipOptions(by_invitation=True, **membership))
        entry = Entry(hers, None)
        entry.name_peer(tmp_path / "unused", "first")
        manifest = entry.new_manifest(PROTOCOL, RECIPE)
        with pytest.raises(RuntimeError, match="as far as it goes"):
            entry.take_part(SimpleNamespace(opened=None, peer_id=ADA, take_part=take_part), manifest, [ADDRESS])
        return entry.invitation()

    return started_with


def test_a_first_peer_that_starts_again_prints_its_line_until_she_closes_it(invitation_of, tmp_path):
    """Peers start again by themselves. That must not make an invitation after she has closed hers."""
    registry = OrganiserFolder(tmp_path, "night-1").registry
    first, said = invitation_of(invite=3)
    assert said.startswith("3 people can join with this line, until ")
    registry.use_invitation(first.token, peer_of(subkey_of("ben")), "Ben")
    again, said = invitation_of(invite=3)
    assert again == first
    assert said.startswith("2 people can join with this line, until ")
    assert registry.close_invitations() == 1
    line, said = invitation_of(invite=3)
    assert (line.token, line.enrolment_port) == (b"", 31338)
    assert "closed or is used up" in said
    assert f"swarm invite --uses 3 --days 30 --run-id night-1 --output-dir {tmp_path}" in said
    assert registry.invitations() == []


def test_an_expired_line_does_not_keep_a_first_peer_from_making_a_new_one(invitation_of):
    """She has tried it the day before, with an invitation for an hour."""
    lines = [invitation_of(invite=3, invite_days=1e-9)[0] for _ in range(2)]
    assert all(line.token for line in lines)
    assert lines[0].token != lines[1].token


@pytest.mark.parametrize("other", [{"invite": 5}, {"invite_days": 1.0}, {"open": True}])
def test_other_numbers_at_a_later_start_make_another_line(invitation_of, tmp_path, other):
    first, _ = invitation_of(invite=3)
    second, said = invitation_of(**{"invite": 3, **other})
    assert second.token not in (first.token, b"")
    assert said.startswith("Anyone can join" if "open" in other else f"{other.get('invite', 3)} people")
    assert len(OrganiserFolder(tmp_path, "night-1").registry.invitations()) == 2


@pytest.mark.parametrize("is_open", [False, True])
def test_the_organiser_reads_how_to_make_an_invitation_where_there_is_none(invitation_of, tmp_path, is_open):
    line, said = invitation_of(invite=0, open=is_open)
    assert line.token == b""
    assert said.startswith("No invitation was made (--invite 0). To make one:\n")
    assert OrganiserFolder(tmp_path, "night-1").registry.invitations() == []


@pytest.mark.parametrize(("client_mode", "fix"), [(True, "leave out --client-mode"), (False, "give it a --port")])
def test_the_organiser_hears_why_no_peer_can_call_hers(options, client_mode, fix):
    hers = replace(options, run_id="night-1", membership=MembershipOptions(by_invitation=True))
    entry = Entry(replace(hers, connection=ConnectionOptions(client_mode=client_mode)), None)
    with pytest.raises(InputError, match=f"has to be one that others can call: {fix}"):
        entry.take_part(SimpleNamespace(), entry.new_manifest(PROTOCOL, RECIPE), [])


def test_the_organisers_peer_notes_the_public_address_that_she_gives(options, tmp_path, monkeypatch):
    """`swarm invite` warns of addresses that no peer outside can call, and hers may be of a VPN."""

    def take_part(*_) -> None:
        raise RuntimeError("this is as far as it goes here")

    monkeypatch.setattr(enrolment_process, "EnrolmentProcess", lambda *_: SimpleNamespace(port=31338))
    hers = replace(options, run_id="night-1", membership=MembershipOptions(by_invitation=True))
    entry = Entry(replace(hers, connection=ConnectionOptions(public_ip="100.64.0.7", port=31337)), None)
    entry.name_peer(tmp_path / "unused", "first")
    manifest = entry.new_manifest(PROTOCOL, RECIPE)
    with pytest.raises(RuntimeError, match="as far as it goes"):
        entry.take_part(SimpleNamespace(opened=None, peer_id=ADA, take_part=take_part), manifest, [ADDRESS])
    assert OrganiserFolder(tmp_path, "night-1").public_ip == "100.64.0.7"
    assert entry.membership.new_admission().authority == manifest.authority, "it reads the orders for this recipe"


def test_a_run_without_members_has_no_organiser(options):
    assert Entry(options, None).new_manifest(PROTOCOL, RECIPE).organiser == b""


def test_a_member_goes_on_alone_only_with_what_its_organiser_has_signed(options, organiser, line, tmp_path):
    entry, identity = Entry(replace(options, run_id="night-1"), line), tmp_path / "unused"
    entry.name_peer(identity, "ada")
    with pytest.raises(InputError, match="cannot go on alone"):
        entry.new_manifest(PROTOCOL, RECIPE)
    signed = RunManifest(PROTOCOL, "night-1", RECIPE).signed_by(organiser.signer)
    folder = RunFolder.create(tmp_path, "night-1", "ada")
    Credentials(line, organiser.certificate(ADA), {}, signed.to_bytes()).write(folder.membership)
    assert entry.new_manifest(PROTOCOL, RECIPE) == signed


@pytest.mark.parametrize("kind", ["by invitation", "without an invitation", "open"])
def test_the_line_for_others_comes_last(line, tmp_path, kind):
    address = ADDRESS.replace("127.0.0.1", "192.168.1.5")
    token = bytes(16) if kind == "by invitation" else b""
    invitation = None if kind == "open" else (replace(line, addresses=(address,), token=token), "It is so.")
    said = how_to_join((address,), None, tmp_path, invitation, "Waiting for another peer.").splitlines()
    assert ("To list, invite or remove members:" in said) == (invitation is not None)
    assert any(sentence.startswith("No peer on the internet can join: forward") for sentence in said)
    if kind == "without an invitation":
        assert said[-2] == "It is so."
        assert said[-1] == "Waiting for another peer."
    else:
        shown = address if kind == "open" else str(invitation[0])
        assert said[-1].endswith(f"swarm join {shown}")


def test_a_person_in_an_open_run_reads_what_that_means(organiser):
    elsewhere = ADDRESS.replace("127.0.0.1", "192.168.1.5")
    manifest = RunManifest(PROTOCOL, "night-1", RECIPE)
    said = open_door(manifest, [ADDRESS, elsewhere], joins=False)
    assert said.startswith(
        "warning: This run is open: anyone with an address can join it and corrupt its weights. For a run with members"
    )
    assert "only, start a new one" in said
    assert "ask its organiser to start a new one" in open_door(manifest, [elsewhere], joins=True)
    assert open_door(manifest, [ADDRESS], joins=False) == "", "no peer elsewhere can reach it"
    assert open_door(manifest.signed_by(organiser.signer), [elsewhere], joins=True) == ""


@pytest.mark.parametrize(
    "words", [["--open"], ["--invite", "-1"], ["--invite-days", "0"], ["--enrolment-port", "70000"]]
)
def test_options_that_cannot_work_are_refused(words):
    with pytest.raises(InputError, match=words[0]):
        parse_options(words)
