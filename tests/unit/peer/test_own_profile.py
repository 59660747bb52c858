"""What a peer tells the others of its machine and its line."""

from types import SimpleNamespace

import pytest
import torch

from swarm.membership.run_manifest import PROTOCOL
from swarm.peer.callbacks.profile_reporter import MEASURED, ProfileReporter
from swarm.peer.own_profile import device_name, how_reached, software_version, together
from swarm.protocol.notes import FORWARDED, LOCAL, MAX_VERSION_LETTERS, PUBLIC, Profile
from swarm.runtime.line_use import LineUse

OWN = ("127.0.0.1", "192.168.1.7", "8.8.4.4")


def test_a_device_has_a_short_name():
    threads = torch.get_num_threads()
    assert device_name(torch.device("cpu")) == f"CPU, {threads} thread{'s' * (threads != 1)}"


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        (["NVIDIA H100"], "NVIDIA H100"),
        (4 * ["NVIDIA H100"], "4 × NVIDIA H100"),
        (["NVIDIA A10", "NVIDIA T4", "NVIDIA A10"], "2 × NVIDIA A10 + 1 × NVIDIA T4"),
    ],
)
def test_an_island_has_the_devices_of_all_its_processes(devices, name):
    assert together(devices) == name


def test_the_version_has_room_in_a_record():
    assert software_version().endswith(f", protocol {PROTOCOL}")
    assert len(software_version()) <= MAX_VERSION_LETTERS


@pytest.mark.parametrize(
    ("addresses", "reached"),
    [
        ([], ""),
        (["/ip4/127.0.0.1/tcp/31337/p2p/Qm"], LOCAL),
        (["/ip4/127.0.0.1/tcp/31337/p2p/Qm", "/ip4/192.168.1.7/tcp/31337/p2p/Qm"], LOCAL),
        (["/ip4/192.168.1.7/tcp/31337/p2p/Qm", "/ip4/9.9.9.9/tcp/31337/p2p/Qm"], FORWARDED),
        (["/ip4/192.168.1.7/tcp/31337/p2p/Qm", "/ip4/10.0.0.1/tcp/31337/p2p/Qm"], FORWARDED),
        (["/ip4/8.8.4.4/tcp/31337/p2p/Qm", "/ip4/192.168.1.7/tcp/31337/p2p/Qm"], PUBLIC),
        (["/ip6/2606:4700::1/tcp/31337/p2p/Qm"], PUBLIC),
        (["/dns4/peer.example.org/tcp/31337/p2p/Qm"], PUBLIC),
        (["/ip4/9.9.9.9/tcp/31337/p2p/QmRelay/p2p-circuit/p2p/Qm"], ""),
    ],
)
def test_a_peer_knows_how_other_peers_call_it(addresses, reached):
    assert how_reached(addresses, OWN) == reached


class Told:
    """A peer that has made updates, and the profile in its record."""

    def __init__(self, reporter: ProfileReporter):
        self._reporter, self._step, self.profile = reporter, 0, None

    def report(self, profile: Profile) -> None:
        self.profile = profile

    def micro_batch(self, last_step) -> None:
        coordinator = SimpleNamespace(last_step=last_step, tracker=self)
        trainer = SimpleNamespace(strategy=SimpleNamespace(coordinator=coordinator))
        self._reporter.on_train_batch_end(trainer, None, None, None, 0)

    def update(self, num_bytes: int, seconds: float) -> None:
        self._step += 1
        exchanged = SimpleNamespace(bytes_sent=num_bytes, exchange_seconds=seconds)
        for _ in range(2):  # micro-batches of the same update
            self.micro_batch(SimpleNamespace(step=self._step, round=exchanged))


def test_the_record_says_what_was_sent_and_what_the_line_carries_at_least():
    line, fixed = LineUse(), Profile("NVIDIA H100", "0.1.0", PUBLIC)
    told = Told(ProfileReporter(line, fixed))
    told.micro_batch(None)
    assert told.profile == fixed
    told.micro_batch(SimpleNamespace(step=0, round=None))  # the peer was alone
    told.update(0, 0.0)
    assert told.profile.upload is None, "nothing was sent"
    line.receive(500)
    told.update(2000, 2.0)
    told.update(6000, 2.0)
    told.update(1000, 2.0)  # other peers were late
    assert told.profile == Profile("NVIDIA H100", "0.1.0", PUBLIC, 3000.0, 0, 500)
    for _ in range(MEASURED):
        told.update(1000, 2.0)
    assert told.profile.upload == 500.0, "the line may have become slower"
