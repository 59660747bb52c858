"""`swarm remove` in a real DHT: members hear of it, and a list that was signed elsewhere is not lost."""

from __future__ import annotations

import time

import pytest
from hivemind.utils import get_dht_time

from recipe.presets import digits
from swarm.cli.organiser.remove import main
from swarm.enrolment.organiser_folder import OrganiserFolder
from swarm.membership.progress_record import TRAINING, PeerProgress
from swarm.membership.progress_store import ProgressStore
from swarm.membership.run_manifest import PROTOCOL, RunManifest, publish_manifest
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht, visible_addresses
from swarm.network.record_push import push_list
from swarm.network.signed_records import PROGRESS, REMOVED
from swarm.protocol.admission import Admission
from swarm.protocol.certificates import EVERYTHING, Certificate, Removals

pytestmark = pytest.mark.timeout(120)
RUN = "digits"


class Member:
    """A peer on loopback that takes part in a run.

    Args:
        name: public name
        folder: of the organiser, who enrols it
        initial_peers: of those who are there
    """

    def __init__(self, name: str, folder: OrganiserFolder, initial_peers: tuple[str, ...] = ()):
        self.name = name
        self.dht = start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",), initial_peers=initial_peers))
        self.addresses = tuple(visible_addresses(self.dht))
        registry, signer, now = folder.registry, folder.make_signer(), int(time.time())
        self.member = registry.use_invitation(registry.invite(name, 1, 1, EVERYTHING), self.dht.peer_id, name)
        self.manifest = RunManifest(PROTOCOL, RUN, digits()).signed_by(signer)
        made = Certificate(RUN, self.dht.peer_id, self.member.serial, EVERYTHING, now - 600, now + 3600, name)
        self.admission = Admission(self.manifest.authority, made.signed_by(signer))
        self.dht.take_part(self.manifest.key_prefix, self.manifest.authority, self.admission.certificate)

    def train(self) -> None:
        """What the others see of it."""
        assert publish_manifest(self.dht, self.manifest)
        now = get_dht_time()
        record = PeerProgress(self.name, 3, 0, 0.0, now - 1, now, False, TRAINING)
        store = ProgressStore(self.dht, f"{self.manifest.key_prefix}.{PROGRESS}", admission=self.admission)
        store.post(record).result(20)

    def heard(self) -> dict[int, str]:
        """Who is removed, as far as it knows."""
        if signed := self.dht.newest_list(REMOVED):
            self.admission.lists.take(REMOVED, signed)
        return self.admission.lists.removals.removed


@pytest.fixture
def folder(tmp_path) -> OrganiserFolder:
    return OrganiserFolder(tmp_path, RUN)


@pytest.fixture
def members(folder):
    """Two who know each other."""
    ada = Member("ada", folder)
    try:
        ben = Member("ben", folder, ada.addresses)
        try:
            folder.note_contact(ada.manifest.organiser, ada.addresses, 31338)
            yield ada, ben
        finally:
            stop_dht(ben.dht)
    finally:
        stop_dht(ada.dht)


def run(folder: OrganiserFolder, *arguments: str) -> tuple[int, list[str]]:
    said: list[str] = []
    return main([*arguments, "--output-dir", str(folder.path.parent.parent)], said.append), said


def test_members_hear_of_a_removal(folder, members):
    ada, ben = members
    assert run(folder, "ben", "--why", "sends noise", "--offline")[0] == 0
    assert ben.heard() == {}
    ada.train()
    ben.train()
    elsewhere = Removals(RUN, int(1000 * time.time()), {}).with_removed([7], "signed on another machine")
    push_list(ada.dht, ada.manifest.key_prefix, REMOVED, elsewhere.signed_by(folder.signer()), (ben.dht.peer_id,))
    status, said = run(folder, "ben", "--why", "sends noise")
    assert said == [
        f"ben (…{str(ben.dht.peer_id)[-8:]}) is removed from run digits: sends noise.",
        "The new list was handed to 2 peers, and everybody passes it on.",
    ]
    assert status == 0
    expected = {7: "signed on another machine", ben.member.serial: "sends noise"}
    assert ada.heard() == ben.heard() == expected
    status, said = run(folder, "ben", "--restore")
    assert (status, ada.heard()) == (0, {7: "signed on another machine"})
    assert said[0].endswith("may take part in run digits again.")
