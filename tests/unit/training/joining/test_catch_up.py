"""How long a peer that catches up waits."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from swarm.training.joining.attempt import Progress
from swarm.training.joining.catch_up import CatchUp


class EndlessAttempt:
    """An attempt to take over a state that never comes to an end."""

    is_running = True

    def __init__(self):
        self.waits = 0

    def begin(self, donor, timeout_seconds, **how):
        pass

    def poll(self):
        return Progress.NOTHING

    def wait_a_little(self):
        self.waits += 1
        assert self.waits < 100, "it waits for ever"


@pytest.mark.parametrize("asked_often", [1, 4])
def test_a_joiner_waits_for_the_state_until_its_owner_wants_it_to_leave(asked_often):
    attempt, asked = EndlessAttempt(), []

    def may_wait():
        asked.append(True)
        return len(asked) < asked_often

    own = Mock(version=SimpleNamespace(changes=0), options=SimpleNamespace(join_timeout_seconds=60.0))
    parts = {name: Mock() for name in ("own_round", "listener", "healers", "probation")}
    CatchUp(own, follower=attempt, may_wait=may_wait, **parts).join()
    assert (len(asked), attempt.waits) == (asked_often, asked_often - 1)
