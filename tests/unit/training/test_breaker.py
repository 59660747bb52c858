"""When a peer's loss has risen for good, and when it only looks so."""

import math
import random

import pytest

from swarm.training.undo.breaker import UNUSABLE, WINDOW, Breaker


def watch(losses) -> list[int]:
    """The updates after which the breaker wants to go back. It is taken back each time."""
    breaker, risen = Breaker(), []
    for update, loss in enumerate(losses, start=1):
        breaker.note(loss)
        breaker.note_update()
        if breaker.has_risen:
            risen.append(update)
            breaker.went_back()
    return risen


def learning(updates: int, noise: float = 0.05, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [2.3 * math.exp(-update / 40) + 0.05 + rng.gauss(0, noise) for update in range(updates)]


@pytest.mark.parametrize("false", [2.3, 1e30, math.inf, math.nan])
def test_a_loss_that_stays_up_is_noticed_within_three_windows(false):
    (update,) = watch(learning(150) + [false] * 3 * WINDOW)[:1]
    assert 150 + WINDOW < update <= 150 + 3 * WINDOW


def test_losses_that_are_not_finite_at_first_do_not_hide_a_later_rise():
    (update,) = watch([math.nan] * WINDOW + learning(150) + [2.3] * 3 * WINDOW)[:1]
    assert 166 + WINDOW < update <= 166 + 3 * WINDOW


def test_it_is_noticed_again_if_going_back_has_not_helped():
    first, second = watch(learning(150) + [2.3] * 6 * WINDOW)[:2]
    assert second == first + 2 * WINDOW


@pytest.mark.parametrize(
    "losses",
    [
        learning(3000, noise=0.3),
        [*learning(150), *[50.0] * (WINDOW // 2), *learning(150)[-1:] * 100],  # a peak that passes
        [*learning(150), *[0.8] * 200],  # less than half of what was gained
        [2.3 + random.Random(1).gauss(0, 0.2) for _ in range(3000)],  # nothing has been learnt
        [math.inf] * 100,
        learning(30) + [2.3] * (2 * WINDOW - 1),
    ],
    ids=["noise", "peak", "a little", "nothing learnt", "never finite", "not yet"],
)
def test_losses_that_are_no_reason_to_go_back(losses):
    assert watch(losses) == []


def test_gradients_that_are_not_finite_are_a_reason_if_no_update_comes_of_them():
    breaker = Breaker()
    for _ in range(UNUSABLE):
        assert not breaker.has_risen
        breaker.note_unusable()
    assert breaker.has_risen
    breaker.note_update()
    assert not breaker.has_risen, "the others' are finite, so it is this peer's data"


def test_a_loss_of_another_peers_weights_is_not_compared_with_earlier_losses():
    breaker = Breaker()
    for loss in learning(150):
        breaker.note(loss)
    breaker.begin()
    for _ in range(4 * WINDOW):
        breaker.note(2.3)
    assert not breaker.has_risen


def test_other_peers_are_believed_if_the_loss_looks_alike_here_or_nothing_can_be_said():
    breaker = Breaker()
    assert breaker.may_have_risen, "a helper has no loss"
    for loss in learning(150):
        breaker.note(loss)
    assert not breaker.may_have_risen
    breaker.went_back()
    assert not breaker.may_have_risen, "it remembers what was good"
    for _ in range(WINDOW):
        breaker.note(0.8)
    assert breaker.may_have_risen
    assert not breaker.has_risen
