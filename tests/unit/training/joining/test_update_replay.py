"""What a peer does while it makes updates that other peers have made before."""

from types import SimpleNamespace

import torch

from swarm.averaging.compression.fragments import Fragments
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from swarm.state_sync.state_version import StateVersion
from swarm.training.joining.update_replay import UpdateReplay
from tests.helpers.donors import version_at

LINEAGES = [bytes([number]) * 16 for number in (1, 2)]


class Fetcher:
    """A fetcher that gets the averages of two updates together."""

    def __init__(self, version: StateVersion):
        self._description = (version.step, version.lineage, LINEAGES)

    def fetch(self, donors, attempt, request):
        yield None
        return SimpleNamespace(donor=donors[0], description=self._description, tensors=lambda: [torch.zeros(3)] * 2)


def test_the_averaging_process_hears_of_each_update():
    """One of the updates may be that of a round that has failed here, whichever comes last."""
    version, heard = version_at(5), []
    swarm = SimpleNamespace(donors=lambda min_step: ["anna"], may_hold=lambda donor, step: version.step < 7)
    own = SimpleNamespace(
        version=version,
        tracker=SimpleNamespace(swarm=swarm, name_of=str),
        averager=SimpleNamespace(vector=torch.zeros(3), timeouts=DEFAULT_TIMEOUTS, followed=heard.append),
        gradients=SimpleNamespace(fragments=Fragments.of([3]), follow=lambda average: None, release=lambda: None),
    )
    replay = UpdateReplay(
        own,
        lambda: None,
        SimpleNamespace(is_at=lambda step: False),
        SimpleNamespace(note_followed=lambda donor: None, note_arrived=lambda: None),
        Fetcher(version),
    )
    corroboration = SimpleNamespace(num_confirmed=lambda donor, step, lineages: len(lineages))
    for _ in replay.replay_updates(SimpleNamespace(corroboration=corroboration)):
        pass
    assert (version.step, heard) == (7, LINEAGES)
