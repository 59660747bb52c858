"""What a signal does to a peer: that depends on how far it is, and on whether another signal came before."""

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
def test_the_second_signal_ends_a_peer_at_once(interrupts, state):
    interrupts.state = State.TRAINING
    interrupts.interrupt(signal.SIGTERM)
    interrupts.state = state
    with pytest.raises(EndedAtOnce):
        interrupts.interrupt(signal.SIGINT)


def test_a_peer_that_leaves_by_itself_goes_on_leaving_in_order_at_the_first_signal(interrupts):
    interrupts.state = State.TRAINING
    interrupts.stop_requested.set()  # by its traffic limit, for instance
    interrupts.interrupt(signal.SIGINT)
    with pytest.raises(EndedAtOnce):
        interrupts.interrupt(signal.SIGINT)


def test_a_peer_that_has_left_by_itself_ends_at_the_first_signal(interrupts):
    interrupts.stop_requested.set()
    interrupts.state = State.ENDED
    with pytest.raises(EndedAtOnce):
        interrupts.interrupt(signal.SIGINT)
