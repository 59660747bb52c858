"""What a peer does with a group that goes back: it forgets what its codec left out only if it goes back as well."""

from threading import RLock
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from swarm.protocol.messages import WentBack
from swarm.training.rounds.recovery import Recovery


@pytest.mark.parametrize(
    ("is_convinced", "has_state", "goes"),
    [(True, True, True), (True, False, False), (False, True, False)],
    ids=["goes back", "has not kept the state", "sees no reason"],
)
def test_a_peer_forgets_what_its_codec_left_out_only_if_it_goes_back(is_convinced, has_state, goes):
    own, own_round = MagicMock(), MagicMock()
    own.version = SimpleNamespace(lock=RLock(), step=48)
    going_back = SimpleNamespace(is_convinced=lambda back: is_convinced, go=lambda back: has_state)
    group = SimpleNamespace(peer_ids=("ada", "ben"))
    recovery = Recovery(own, own_round, MagicMock(), going_back, MagicMock(), MagicMock(), MagicMock())
    recovery.recover(WentBack(group, 32, frozenset()))
    assert own.averager.took_over.called == goes
    assert own_round.begin_step.called == goes
    assert own_round.take_back.called != goes, "its samples count in the next round"
