"""What a signal does to a peer depends on its state, and on whether it was asked to leave before."""

import signal

import pytest

from swarm.peer.main import Interrupts, State


class EndedAtOnce(Exception):  # noqa: N818
    """Raised in place of the end of this process."""


@pytest.fixture
def interrupts() -> Interrupts:
    def leave_at_once(_signal_number: int) -> None:
        raise EndedAtOnce

    return Interrupts(leave_at_once)


def test_an_import_could_swallow_an_exception(interrupts):
    with pytest.raises(EndedAtOnce):
        interrupts.interrupt(signal.SIGINT)


@pytest.mark.parametrize("state", [State.JOINING, State.ENDED])
def test_an_exception_ends_a_state_in_which_the_request_is_not_looked_at(interrupts, state):
    interrupts.state = state
    with pytest.raises(KeyboardInterrupt):
        interrupts.interrupt(signal.SIGTERM)
    assert interrupts.stop_requested.is_set()


def test_the_training_loop_ends_by_itself(interrupts):
    interrupts.state = State.TRAINING
    interrupts.interrupt(signal.SIGINT)
    assert interrupts.stop_requested.is_set()


@pytest.mark.parametrize("state", State)
def test_a_second_request_ends_the_peer_at_once(interrupts, state):
    interrupts.state = state
    interrupts.stop_requested.set()
    with pytest.raises(EndedAtOnce):
        interrupts.interrupt(signal.SIGINT)
