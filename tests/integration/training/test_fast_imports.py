"""A peer's imports leave out what never runs, and give it back to who asks."""

import subprocess
import sys

import pytest

STEP = """
import gc, sys
from swarm.runtime.fast_imports import lean_imports
with lean_imports():
    import swarm.network.dht_options, swarm.peer.session
assert gc.isenabled()
import torch
from recipe.optimizer import build_optimizer
from recipe.presets import preset
from recipe.training.task import VisionTask

task = VisionTask(preset("digits"))
optimizer = build_optimizer(task.model, task.recipe)
task.model(torch.zeros(2, 1, 8, 8)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
never = {"sympy", "torch._dynamo.symbolic_convert", "torch._inductor", "sklearn", "pandas"}
never |= {"matplotlib.figure", "triton.language", "timm.models.resnet", "torchvision.models.resnet"}
loaded = (never | {"scipy.optimize._linprog", "scipy.signal._signaltools"}) & sys.modules.keys()
assert not loaded, loaded
"""

GIVEN_BACK = """
import torch._dynamo.exc
from torch._dynamo.exc import Unsupported
assert torch._dynamo.exc.Unsupported is Unsupported
assert sys.modules["torch._dynamo"].__file__
assert torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.zeros(1, 2)).shape == (1, 2)
assert "torch._dynamo.symbolic_convert" in sys.modules

import scipy.optimize
import scipy.signal.windows
from hivemind.averaging.load_balancing import optimize_parts_lp
from scipy.signal import convolve
assert list(scipy.signal.windows.boxcar(2)) == [1, 1] and list(convolve([1, 2], [1])) == [1, 2]
assert scipy.optimize.linprog([1.0], bounds=(1, 2)).x == [1.0]

import timm, timm.models, torchvision
assert timm.create_model("resnet18", num_classes=2).num_classes == 2
assert isinstance(task.model, timm.models.vision_transformer.VisionTransformer)
assert torchvision.models.resnet18().fc.out_features == 1000 and timm.is_model("vit_tiny_patch16_224")

from torchmetrics.classification import MulticlassAccuracy

accuracy = MulticlassAccuracy(2)
accuracy.update(torch.tensor([0, 1]), torch.tensor([0, 1]))
figure, axes = accuracy.plot()
import matplotlib.axes, matplotlib.figure
assert isinstance(figure, matplotlib.figure.Figure) and isinstance(axes, matplotlib.axes.Axes)
from triton.runtime.jit import JITFunction
assert JITFunction.__module__ == "triton.runtime.jit"
"""


@pytest.mark.timeout(180)
def test_training_needs_a_fraction_of_what_is_imported_and_who_asks_gets_the_rest():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", STEP + GIVEN_BACK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
