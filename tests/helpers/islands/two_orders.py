"""How far two trainings diverge that differ only in the order in which gradients are added up.

    python -m tests.helpers.islands.two_orders --runs 500

The model, the updates and the processes are those of `tests/integration/islands/test_islands.py`, here in one process.
"""

import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.strategy_runs import MICRO_BATCH, NUM_SAMPLES, Plan, Samples

STEPS, PROCESSES, MOST_TURNS = 50, 3, 4


class Training:
    """One of the two trainings.

    Args:
        by_turns: add up the gradients of all processes turn by turn; else process by process
    """

    def __init__(self, plan: Plan, by_turns: bool):
        self._plan, self._by_turns, self._samples = plan, by_turns, Samples()
        self.net = plan.net()
        self._optimizer, self._scheduler = plan.update(self.net)
        self.positive: list[torch.Tensor] = []
        """Which numbers the ReLU lets through, in each micro-batch of the latest update."""
        self.net[2].register_forward_hook(lambda module, inputs, output: self.positive.append(inputs[0] > 0))

    def update(self, batches: dict[tuple[int, int], list[int]]) -> float:
        """Make an update with samples by (process, turn); returns the loss."""
        self.positive.clear()
        total, loss_sum, gradients = MICRO_BATCH * len(batches), 0.0, {}
        for place, indices in batches.items():
            loss = F.cross_entropy(self.net(self._samples.x[indices]), self._samples.y[indices])
            loss_sum += loss.item() * len(indices)
            gradients[place] = torch.autograd.grad(loss * len(indices), list(self.net.parameters()))
        order = sorted(batches, key=lambda place: place[::-1] if self._by_turns else place)
        for number, parameter in enumerate(self.net.parameters()):
            parameter.grad = sum(gradients[place][number] for place in order) / total
        nn.utils.clip_grad_norm_(self.net.parameters(), self._plan.clip)
        self._optimizer.step()
        self._scheduler.step()
        return loss_sum / total


def run(seed: int) -> tuple[float, bool]:
    """Return the largest difference of losses and weights, and whether the ReLU has let other numbers through."""
    draw, plan = random.Random(seed), Plan(batch_norm=True)
    one, other = Training(plan, False), Training(plan, True)
    most, differs = 0.0, False
    for _ in range(STEPS):
        places = [(process, turn) for process in range(PROCESSES) for turn in range(draw.randint(1, MOST_TURNS))]
        batches = {place: [draw.randrange(NUM_SAMPLES) for _ in range(MICRO_BATCH)] for place in places}
        most = max(most, abs(one.update(batches) - other.update(batches)))
        pairs = zip(one.net.parameters(), other.net.parameters(), strict=True)
        most = max(most, *(float((own.detach() - others.detach()).abs().max()) for own, others in pairs))
        differs |= any((own != others).any() for own, others in zip(one.positive, other.positive, strict=True))
    return most, differs


def main() -> None:
    """Print how many runs diverged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    torch.set_num_threads(1)
    found = [run(seed) for seed in range(parser.parse_args().runs)]
    apart, alike = ([most for most, differs in found if differs is which] for which in (True, False))
    print(f"{len(apart)} of {len(found)} with another ReLU: differences {', '.join(f'{one:.1e}' for one in apart)}")
    print(f"the others: at most {max(alike):.1e}")


if __name__ == "__main__":
    main()
