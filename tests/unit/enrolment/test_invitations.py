"""Which invitations the organiser sees."""

import os

import pytest
from hivemind.p2p import PeerID

from swarm.enrolment.registry import Invitation
from swarm.protocol.certificates import EVERYTHING, Role

DAY = 24 * 3600


def test_invitations_that_can_be_used_are_listed(organiser):
    registry, now = organiser.registry, organiser.clock()
    assert registry.invitations() == []
    token = registry.invite("Lab 3", 2, 2, EVERYTHING)
    registry.invite("", 1, 5, Role.WATCH)
    lab, anybody = registry.invitations()
    assert lab == Invitation("Lab 3", EVERYTHING, 2, pytest.approx(now + 2 * DAY, abs=60))
    assert anybody == Invitation("", Role.WATCH, 5, pytest.approx(now + DAY, abs=60))
    for uses_left in (1, 0):
        registry.use_invitation(token, PeerID(b"\x12\x20" + os.urandom(32)), "Ana")
        assert [found.uses_left for found in registry.invitations()] == ([uses_left] if uses_left else []) + [5]
    organiser.clock.ahead_days = 1.5
    assert registry.invitations() == []
