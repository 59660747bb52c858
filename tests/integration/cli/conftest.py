"""Members of a run on loopback, for the commands of its organiser."""

from __future__ import annotations

import threading
import time

import pytest
from hivemind.utils import get_dht_time

from recipe.presets import digits
from swarm.enrolment.organiser_folder import OrganiserFolder
from swarm.membership.progress_record import TRAINING, PeerProgress
from swarm.membership.progress_store import ProgressStore
from swarm.membership.run_manifest import PROTOCOL, RunManifest, publish_manifest
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht, visible_addresses
from swarm.network.signed_records import PROGRESS
from swarm.protocol.admission import Admission
from swarm.protocol.certificates import EVERYTHING, Certificate
from swarm.protocol.orders import Orders
from swarm.protocol.signed_lists import ORDERS, REMOVED

RUN, BEGUN = "digits", 1_760_000_000
REPORT_SECONDS = 3.0


class Member:
    """A peer on loopback that takes part in a run.

    Args:
        name: public name
        folder: of the organiser that enrols it
        initial_peers: addresses of present members
    """

    def __init__(self, name: str, folder: OrganiserFolder, initial_peers: tuple[str, ...] = ()):
        self.name = name
        self.dht = start_dht(NetworkOptions(host_maddrs=("/ip4/127.0.0.1/tcp/0",), initial_peers=initial_peers))
        self.addresses = tuple(visible_addresses(self.dht))
        registry, signer, now = folder.registry, folder.make_signer(), int(time.time())
        self.member = registry.use_invitation(registry.invite(name, 1, 1, EVERYTHING), self.dht.peer_id, name)
        self.manifest = RunManifest(PROTOCOL, RUN, digits(), begun=BEGUN).signed_by(signer)
        made = Certificate(RUN, self.dht.peer_id, self.member.serial, EVERYTHING, now - 600, now + 3600, name)
        self.admission = Admission(self.manifest.authority, made.signed_by(signer))
        self.dht.take_part(self.manifest.key_prefix, self.manifest.authority, self.admission.certificate)

        self._store = ProgressStore(self.dht, f"{self.manifest.key_prefix}.{PROGRESS}", admission=self.admission)
        self._reporting, self._closed = threading.Lock(), threading.Event()
        self._reports = threading.Thread(target=self._report_on, daemon=True)
        self._record: PeerProgress | None = None

    def train(self, step: int = 3, rate: float = 0.0, phase: str = TRAINING) -> None:
        """Publish what other peers see of a training member; go on with it, as a record soon expires."""
        assert publish_manifest(self.dht, self.manifest)
        now = get_dht_time()
        with self._reporting:
            self._record = PeerProgress(self.name, step, 0, rate, now - 1, now, False, phase)
            posted = self._store.post(self._record)
        posted.result(20)
        if not self._reports.is_alive():
            self._reports.start()

    def _report_on(self) -> None:
        while not self._closed.wait(REPORT_SECONDS):
            with self._reporting:
                self._store.post(self._record)

    def close(self) -> None:
        """Leave the DHT."""
        self._closed.set()
        if self._reports.is_alive():
            self._reports.join()
        stop_dht(self.dht)

    def heard(self) -> dict[int, str]:
        """Return the removals that this member knows."""
        self._hear(REMOVED)
        return self.admission.lists.removals.removed

    def ordered(self) -> Orders:
        """Return the orders that this member knows."""
        self._hear(ORDERS)
        return self.admission.lists.orders

    def _hear(self, kind: str) -> None:
        if signed := self.dht.newest_list(kind):
            self.admission.lists.take(kind, signed)


@pytest.fixture
def folder(tmp_path) -> OrganiserFolder:
    return OrganiserFolder(tmp_path, RUN)


@pytest.fixture
def members(folder):
    """Two members that know each other."""
    ada = Member("ada", folder)
    try:
        ben = Member("ben", folder, ada.addresses)
        try:
            folder.note_contact(ada.manifest.organiser, ada.addresses, 31338)
            yield ada, ben
        finally:
            ben.close()
    finally:
        ada.close()
