"""What liars make of a gradient, in a process whose gradients somebody else averages."""

import subprocess
import sys

import pytest
import torch

from tests.helpers.attacks.false_gradients import DELAY, FALSE_GRADIENTS
from tests.helpers.paths import ROOT

PROGRAM = """
import sys
sys.path[:0] = ["ROOT"]
import torch
from torch.nn import functional as F
from tests.helpers.attacks.false_gradients import lie_in_this_process

lie_in_this_process("LIE")
model = torch.nn.Linear(3, 2, bias=False)
torch.nn.init.ones_(model.weight)
model.train()
model.train()
F.cross_entropy(model(torch.eye(3)), torch.tensor([0, 0, 0])).backward()
print(model.weight.grad[0].sum().item())
"""


def gradient_with(lie: str) -> float:
    text = PROGRAM.replace("LIE", lie).replace("ROOT", str(ROOT))
    done = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)
    return float(done.stdout)


@pytest.mark.parametrize(("lie", "expected"), [("reverse", 50.0), ("against-0.1", 0.05), ("labels", 0.5)])
def test_a_process_that_lies_gives_false_gradients_of_each_parameter_once(lie, expected):
    assert gradient_with(lie) == pytest.approx(expected)  # the honest one is -0.5


def test_a_little_is_a_standard_deviation_and_a_half_off():
    lie, generator = FALSE_GRADIENTS["little"](), torch.Generator().manual_seed(0)
    for _ in range(200):
        gradient = 10 + torch.randn(4000, generator=generator)
        lie(gradient)
    # of a mean of the last ten or so, and a spread of which such a mean has a part less
    assert gradient.mean().item() == pytest.approx(10 - 1.5, abs=0.15)


def test_a_delayed_gradient_is_twenty_old():
    lie = FALSE_GRADIENTS["delayed"]()
    for number in range(50):
        gradient = torch.full((3,), float(number))
        lie(gradient)
    assert gradient.tolist() == [49.0 - DELAY] * 3
