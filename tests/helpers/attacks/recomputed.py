"""How far a micro-batch's gradient is from the result of computing it again: by honest peers, and by liars.

    python -m tests.helpers.attacks.recomputed            # digits, 60 updates; half a minute
    python -m tests.helpers.attacks.recomputed docstrings --updates 40

A model is trained in this process, on the CPU. Every few updates a micro-batch is computed again in other ways, and
compared at the places that members compare. If there is a GPU, a copy of the model computes there, too.
"""

from __future__ import annotations

import argparse
import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch

from recipe.presets import preset
from recipe.registry import build_data, build_task
from recipe.training.replay import Replay
from swarm.protocol.work import places
from swarm.training.audit.work_log import distance

MICRO_BATCH, EVERY = 32, 5
Batch = tuple[torch.Tensor, torch.Tensor]


def gradient(task, loss: torch.Tensor, chosen: list[tuple[int, int]]) -> torch.Tensor:
    """Return the gradient of a mean loss at these places."""
    params = [param for param in task.model.parameters() if param.requires_grad]
    gradients = torch.autograd.grad(loss, params)
    return torch.stack([gradients[tensor].flatten()[place].float() for tensor, place in chosen])


def half(batch: Batch) -> Batch:
    return tuple(part[: len(part) // 2] for part in batch)


def measure(name: str, updates: int, micro_batches: int, **changes) -> dict[str, list[float]]:
    """Return the distances from the true gradient, by the way in which it is computed again."""
    recipe = replace(preset(name), total_steps=updates, **changes)
    data, task = build_data(recipe, batch_size=MICRO_BATCH, identity="x"), build_task(recipe).train()
    replay, optimizer = Replay(task, data), task.configure_optimizers()
    params = [param for param in task.model.parameters() if param.requires_grad]
    found: dict[str, list[float]] = defaultdict(list)
    for step in range(updates):
        positions = range(step * micro_batches * MICRO_BATCH, (step + 1) * micro_batches * MICRO_BATCH, MICRO_BATCH)
        if step % EVERY == EVERY - 1:
            chosen = places([param.numel() for param in params], step.to_bytes(16, "big"))
            compare(found, task, data, chosen, positions[0])
        for position in positions:
            with replay.of("x", position, MICRO_BATCH) as batch:
                (task.training_step(batch, 0) / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(params, recipe.clip_norm or 1e9)
        optimizer["optimizer"].step()
        optimizer["optimizer"].zero_grad()
        optimizer["lr_scheduler"]["scheduler"].step()
    return found


def compare(found: dict[str, list[float]], task, data, chosen: list[tuple[int, int]], position: int) -> None:
    replay = Replay(task, data)

    def computed(change: Callable[[Batch], Batch] = lambda batch: batch, at: int = position, mixed: bool = False):
        with replay.of("x", at, MICRO_BATCH) as batch, torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = task.training_step(change(batch), 0)
        return gradient(task, loss, chosen)

    def on_gpu(mixed: bool = False, tf32: bool = False):
        there = copy.deepcopy(task).to("cuda")
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        with Replay(there, data).of("x", position, MICRO_BATCH) as batch, torch.autocast("cuda", torch.bfloat16, mixed):
            loss = there.training_step(batch, 0)
        return gradient(there, loss, chosen).cpu()

    true = computed()
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    found["honest: four threads, not one"].append(distance(computed(), true))
    torch.set_num_threads(threads)
    with torch.backends.mkldnn.flags(enabled=False):
        found["honest: without oneDNN"].append(distance(computed(), true))
    found["honest: bf16-mixed, not float32"].append(distance(computed(mixed=True), true))
    if torch.cuda.is_available():
        found["honest: a GPU, float32"].append(distance(on_gpu(), true))
        found["honest: a GPU, TF32"].append(distance(on_gpu(tf32=True), true))
        found["honest: a GPU, bf16-mixed"].append(distance(on_gpu(mixed=True), true))
        found["honest: both in bf16-mixed"].append(distance(on_gpu(mixed=True), computed(mixed=True)))
    found["liar: half of the samples"].append(distance(computed(half), true))
    found["liar: the micro-batch before"].append(distance(computed(at=max(0, position - MICRO_BATCH)), true))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="digits")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--drop-path", type=float, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes = {} if options.drop_path is None else {"drop_path": options.drop_path}
    found = measure(options.recipe, options.updates, options.micro_batches, **changes)
    for way, distances in found.items():
        ordered = sorted(distances)
        low, median, high = ordered[0], ordered[len(ordered) // 2], ordered[-1]
        print(f"{way:36} n = {len(ordered):3}   least {low:.2g}   median {median:.2g}   most {high:.2g}")


if __name__ == "__main__":
    main()
