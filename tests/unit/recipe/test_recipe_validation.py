"""After which micro-batches a peer validates."""

import math
from types import SimpleNamespace

import pytest

from recipe.training.callbacks import ValidateEverySteps


class Training:
    """A training that ends its micro-batches where the test says.

    Args:
        every: updates from one validation to the next
        max_steps: updates of the run
    """

    def __init__(self, every: int, max_steps: int):
        self.trainer = SimpleNamespace(global_step=0, max_steps=max_steps, val_check_batch=1)
        self.batches, self._callback = 0, ValidateEverySteps(every)
        self._callback.on_train_start(self.trainer, None)

    def validates_at(self, step: int) -> bool:
        """Whether the training validates after a micro-batch that ends with this many updates in the weights."""
        self.trainer.global_step = step
        self._callback.on_train_batch_end(self.trainer, None, None, None, self.batches)
        self.batches += 1
        assert self.trainer.val_check_batch in (self.batches, math.inf)
        return self.trainer.val_check_batch == self.batches


def test_a_peer_validates_at_multiples_or_where_it_lands_and_at_the_end():
    training = Training(every=4, max_steps=10)
    assert [step for step in (0, 1, 1, 3, 4, 4, 9, 9, 10) if training.validates_at(step)] == [4, 9, 10]


@pytest.mark.parametrize("stands_at", [5, 4])
def test_a_run_that_is_ended_where_it_stands_is_validated_there_once(stands_at):
    """This includes a step that was validated before it was known to be the last one: then a test follows."""
    training = Training(every=4, max_steps=100)
    for step in range(1, stands_at + 1):
        training.validates_at(step)
    training.trainer.max_steps = stands_at
    assert [training.validates_at(stands_at) for _ in range(2)] == [True, False]
