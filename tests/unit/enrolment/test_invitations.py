"""The invitations that the organiser sees, and how she closes them."""

import os

import pytest
from hivemind.p2p import PeerID

from swarm.enrolment.registry import Invitation, NotInvited
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


def test_the_invitation_of_a_member_can_be_closed(organiser):
    """Otherwise a removed member comes back with it under another name."""
    registry = organiser.registry
    token, other = registry.invite("", 2, 3, EVERYTHING), registry.invite("", 2, 1, EVERYTHING)
    ana, ben = (PeerID(b"\x12\x20" + os.urandom(32)) for _ in range(2))
    member = registry.use_invitation(token, ana, "Ana")
    assert registry.uses_left_of(member.serial) == 2
    assert registry.close_invitation_of(member.serial) == 2
    assert registry.uses_left_of(member.serial) == 0
    with pytest.raises(NotInvited, match="used up"):
        registry.use_invitation(token, ben, "Ana again")
    assert registry.use_invitation(other, ben, "Ben").name == "Ben"
    assert registry.use_invitation(token, ana, "Ana") == member, "a member stays one"


def test_all_invitations_can_be_closed(organiser):
    registry = organiser.registry
    tokens = [registry.invite("", 2, 3, EVERYTHING) for _ in range(2)]
    assert registry.close_invitations() == 2
    assert registry.invitations() == []
    with pytest.raises(NotInvited):
        registry.use_invitation(tokens[0], PeerID(b"\x12\x20" + os.urandom(32)), "Ana")
    assert registry.invite("", 2, 3, EVERYTHING)
    assert len(registry.invitations()) == 1
