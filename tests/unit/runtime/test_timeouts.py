"""The times that a peer waits do not contradict each other."""

import pytest

from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from tests.helpers.hurry import shorter


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        ({"silence_seconds": 0.2}, "a peer is looked at before it is lost"),
        ({"record_seconds": 4.0}, "a record is found before it is too old"),
        ({"settle_seconds": 11.0}, "a donor that waits for its update is not taken for lost"),
        ({"reply_seconds": 0.0}, "reply_seconds has to be more than 0"),
    ],
)
def test_contradictions_are_refused(seconds, why):
    with pytest.raises(ValueError, match=why):
        Timeouts(**seconds)


def test_all_can_be_shortened_alike():
    assert shorter(10).stream_seconds == DEFAULT_TIMEOUTS.stream_seconds / 10
