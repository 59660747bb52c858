"""What a paused peer does while it waits, and when it leaves a paused run that was ended."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from recipe.errors import InputError
from swarm.membership.progress_record import PAUSED, TRAINING
from swarm.protocol.orders import Orders
from swarm.training.rounds import pause
from swarm.training.rounds.pause import Pause


class Averager:
    """An averager that loses the first questions."""

    def __init__(self, lost: int, is_dead: bool = False):
        self.timeouts = SimpleNamespace(hangs_seconds=0.2)
        self.questions, self._lost, self._is_dead = 0, lost, is_dead

    def check_alive(self) -> None:
        if self._is_dead:
            raise InputError("The averaging process is dead.")

    def compare_orders(self, peer, ticket) -> Future:
        self.questions += 1
        future = Future()
        if self.questions > self._lost:
            future.set_result(b"orders")
        return future


class Control:
    """A control that keeps the orders that it takes."""

    def __init__(self):
        self.orders, self.taken = Orders("run"), []

    def take(self, signed: bytes) -> None:
        self.taken.append(signed)


class Tracker:
    """A tracker whose looks at the records show one other peer, in these phases one after the other."""

    def __init__(self, *phases: str):
        self.own, self.looks, self._phases = SimpleNamespace(phase=PAUSED, round=5, client_mode=False), 0, phases
        self.exchange = SimpleNamespace(wait_refreshed=self._look)

    def report(self, urgent: bool = False, phase: str = PAUSED, samples: int = 0) -> None:
        self.own.phase = phase

    def _look(self, timeout_seconds: float) -> bool:
        self.looks += 1
        return True

    @property
    def swarm(self) -> SimpleNamespace:
        phase = self._phases[min(self.looks, len(self._phases) - 1)]
        return SimpleNamespace(records={"ben": SimpleNamespace(phase=phase, round=5, client_mode=True)})


class StepOrders:
    """Orders that pause the run until the control has taken newer ones."""

    def __init__(self, control: Control, is_over: bool):
        self._control, self.is_over = control, is_over

    @property
    def is_paused(self) -> bool:
        return not self.is_over and not self._control.taken

    def follow(self) -> None:
        pass


def paused(averager: Averager, tracker: Tracker, is_over: bool = False) -> Control:
    """Wait as a paused peer does; return its control."""
    control = Control()
    own = SimpleNamespace(tracker=tracker, averager=averager, control=control, contribution=SimpleNamespace(samples=3))
    own_round = SimpleNamespace(is_running=False, resume=lambda: None)
    catching_up = SimpleNamespace(keep_up=lambda: False)
    Pause(own, StepOrders(control, is_over), own_round, catching_up, lambda: True).wait()
    return control


@pytest.mark.parametrize("lost", [0, 2])
def test_a_paused_peer_asks_again_if_its_question_is_lost(lost):
    averager = Averager(lost)
    assert paused(averager, Tracker(PAUSED)).taken == [b"orders"]
    assert averager.questions == lost + 1


def test_a_paused_peer_whose_averaging_process_is_dead_ends():
    with pytest.raises(InputError, match="dead"):
        paused(Averager(lost=1, is_dead=True), Tracker(PAUSED))


def test_a_peer_of_an_ended_run_stays_for_one_whose_pause_its_first_look_does_not_show(monkeypatch):
    monkeypatch.setattr(pause, "QUIET_SECONDS", 0.5)
    tracker = Tracker(TRAINING, TRAINING, PAUSED, PAUSED, TRAINING)
    paused(Averager(lost=0), tracker, is_over=True)
    assert tracker.looks > 4
    assert tracker.own.phase == TRAINING
