"""How liars change a gradient in a process in which other code averages the gradients."""

import subprocess
import sys

import pytest
import torch

from tests.helpers.attacks.false_gradients import DELAY, FALSE_GRADIENTS
from tests.helpers.paths import ROOT

PROGRAM = """
import multiprocessing, sys
import torch
from torch.nn import functional as F
from tests.helpers.attacks.false_gradients import lie_in_this_process


def show_gradient(lie):
    lie_in_this_process(lie)
    model = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    model.train()
    model.train()
    F.cross_entropy(model(torch.eye(3)), torch.tensor([0, 0, 0])).backward()
    print(lie, model.weight.grad[0].sum().item(), flush=True)


for lie in sys.argv[1:]:
    process = multiprocessing.get_context("fork").Process(target=show_gradient, args=[lie])
    process.start()
    process.join()
"""
EXPECTED = {"reverse": 50.0, "against-0.1": 0.05, "labels": 0.5}
"""Expected false gradients. The honest gradient is -0.5."""


@pytest.mark.slow
def test_a_process_that_lies_gives_false_gradients_of_each_parameter_once():
    """Each lie has a process of its own, forked after one import of torch."""
    command = [sys.executable, "-c", PROGRAM, *EXPECTED]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = dict(line.split() for line in done.stdout.splitlines())
    assert {lie: float(gradient) for lie, gradient in found.items()} == pytest.approx(EXPECTED)


def test_a_little_is_a_standard_deviation_and_a_half_off():
    lie, generator = FALSE_GRADIENTS["little"](), torch.Generator().manual_seed(0)
    for _ in range(200):
        gradient = 10 + torch.randn(4000, generator=generator)
        lie(gradient)
    # the mean is of the last ten gradients or so, and takes a part of the spread away
    assert gradient.mean().item() == pytest.approx(10 - 1.5, abs=0.15)


def test_a_delayed_gradient_is_twenty_old():
    lie = FALSE_GRADIENTS["delayed"]()
    for number in range(50):
        gradient = torch.full((3,), float(number))
        lie(gradient)
    assert gradient.tolist() == [49.0 - DELAY] * 3
