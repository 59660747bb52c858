"""What a peer does while it makes updates that other peers have made before."""

from types import SimpleNamespace

import pytest
import torch

from swarm.averaging.compression.fragments import Fragments
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from swarm.state_sync.download import NoState
from swarm.state_sync.state_version import StateVersion
from swarm.training.joining.update_replay import UpdateReplay
from tests.helpers.donors import version_at

LINEAGES = [bytes([number]) * 16 for number in (1, 2)]


class Fetcher:
    """The first donor that is asked hands over averages of two updates, which travel together.

    Args:
        sent: by donor, what it makes of the true description
    """

    def __init__(self, version: StateVersion, **sent):
        self._description, self._sent = (version.step, version.lineage, LINEAGES), sent
        self.asked: list[str] = []

    def fetch(self, donors, attempt, request):
        yield None
        if request.average_of != self._description[0]:
            raise NoState({})
        self.asked.append(donors[0])
        description = self._sent.get(donors[0], tuple)(self._description)
        return SimpleNamespace(donor=donors[0], description=description, tensors=lambda: [torch.zeros(3)] * 2)


class Replay:
    """Makes the updates that others have made from step 5 on.

    Args:
        donors: the best first
        sent: as in `Fetcher`
    """

    def __init__(self, *donors: str, **sent):
        self.version, self.heard, self.blamed = version_at(5), [], []
        self.fetcher = Fetcher(self.version, **sent)
        swarm = SimpleNamespace(donors=lambda min_step: [*donors], may_hold=lambda donor, step: True)
        trust = SimpleNamespace(handed_over_false=self.blamed.append)
        own = SimpleNamespace(
            version=self.version,
            tracker=SimpleNamespace(swarm=swarm, trust=trust, name_of=str),
            averager=SimpleNamespace(vector=torch.zeros(3), timeouts=DEFAULT_TIMEOUTS, followed=self.heard.append),
            gradients=SimpleNamespace(fragments=Fragments.of([3]), follow=lambda average: None, release=lambda: None),
        )
        replay = UpdateReplay(
            own,
            lambda: None,
            SimpleNamespace(is_at=lambda step: False),
            SimpleNamespace(note_followed=lambda donor: None, note_arrived=lambda: None),
            self.fetcher,
        )
        corroboration = SimpleNamespace(num_confirmed=lambda donor, step, lineages: len(lineages))
        for _ in replay.replay_updates(SimpleNamespace(corroboration=corroboration)):
            pass


def test_the_averaging_process_hears_of_each_update():
    """One of them may be that of a round that has failed here, whichever comes last."""
    replay = Replay("anna")
    assert (replay.version.step, replay.heard) == (7, LINEAGES)


@pytest.mark.parametrize(
    "change",
    [
        lambda _: 7,
        lambda true: true[:2],
        lambda true: (true[0] + 1, *true[1:]),
        lambda true: (true[0], [true[1]], true[2]),
        lambda true: (*true[:2], None),
        lambda true: (*true[:2], LINEAGES[:1]),
        lambda true: (*true[:2], [b"short"] * 2),
        lambda true: (*true[:2], dict.fromkeys(map(str, LINEAGES))),
    ],
)
def test_a_donor_of_malformed_averages_is_named_and_the_next_donor_is_asked(change, caplog):
    replay = Replay("liar", "anna", liar=change)
    assert (replay.version.step, replay.fetcher.asked) == (7, ["liar", "anna"])
    assert replay.blamed == ["liar"]
    assert "liar sent averages that do not fit this model" in caplog.text


def test_a_donor_with_other_weights_is_not_to_blame_and_the_next_donor_is_asked():
    replay = Replay("ben", "anna", ben=lambda true: (true[0], bytes(16), true[2]))
    assert (replay.version.step, replay.fetcher.asked, replay.blamed) == (7, ["ben", "anna"], [])


def test_a_peer_with_weights_of_its_own_asks_two_donors_for_averages_and_not_all():
    """All hold averages for other weights, each as large as the model; the peer needs the state."""

    def other(true):
        return true[0], bytes(16), true[2]

    replay = Replay("ben", "cleo", "dora", ben=other, cleo=other, dora=other)
    assert (replay.version.step, replay.fetcher.asked, replay.blamed) == (5, ["ben", "cleo"], [])
