"""Checks of what a machine needs to take part, apart from the network. Each says what it found and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.run_folder import make_writable
from recipe.training.main_memory import main_memory
from swarm.runtime.hivemind_version import HIVEMIND_VERSION, check_hivemind_version

if TYPE_CHECKING:
    from torch import nn  # takes seconds to import

    from swarm.membership.run_manifest import RunManifest

GIB = 2**30
PACKAGES = ("torch", "torchvision", "hivemind", "timm", "lightning", "torchmetrics", "numpy")
SHARED_MEMORY = Path("/dev/shm")
IMAGES_AT_ONCE = 1000
"""Images that are decoded before their results are reported."""
TELL_SECONDS = 10.0


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table.

    Args:
        name: what was checked
        state: ok: joining works; warning: it works, but badly; failed: it fails
        found: what is there
        fix: what to do about it; empty if there is nothing to do
    """

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    fix: str = ""


def judged(name: str, value: float, fails_below: float, warns_below: float, found: str, fix: str) -> Check:
    """A check of a quantity that has to be large enough.

    Args:
        value: the quantity
        fails_below: a smaller quantity makes the check fail
        warns_below: a smaller quantity makes it warn
        found, fix: as in `Check`
    """
    if value >= warns_below:
        return Check(name, "ok", found)
    return Check(name, "failed" if value < fails_below else "warning", found, fix)


def check_versions() -> Check:
    versions, missing = [f"Python {sys.version_info.major}.{sys.version_info.minor}"], []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Check("versions", "failed", f"{', '.join(missing)} missing", "install: `make setup`, or pip install .")
    try:
        check_hivemind_version()
    except InputError as error:
        return Check("versions", "failed", str(error), f"pip install hivemind=={HIVEMIND_VERSION}")
    return Check("versions", "ok", ", ".join(versions))


def check_device(wanted: str) -> Check:
    """Check whether torch can compute on the device that is asked for, and with how much memory.

    Args:
        wanted: --device
    """
    import torch

    if torch.cuda.is_available() and wanted != "cpu":
        free, total = torch.cuda.mem_get_info()
        found = f"{torch.cuda.get_device_name()}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        return judged("device", free / GIB, 0.5, 2, found, "end other programs that use the GPU, or give --device cpu")
    if wanted == "cuda":
        return Check("device", "failed", "torch can use no CUDA device", "give --device cpu, or install a CUDA torch")
    return Check("device", "ok", f"CPU, {psutil.cpu_count()} cores, torch uses {torch.get_num_threads()}")


def check_memory() -> Check:
    memory = main_memory()
    found = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    return judged(
        "memory",
        memory.available / GIB,
        1,
        2,
        found,
        "end other programs, or give a container more: a peer takes 1 to 2 GiB",
    )


def check_shared_memory(num_parameters: int) -> Check:
    """Check the room for shared memory, in which processes of a peer share the gradient vector.

    Args:
        num_parameters: of the model; 0 if it is not known
    """
    if not SHARED_MEMORY.is_dir():
        return Check("shared memory", "ok", "not limited by a folder on this system")
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = 2 * 4 * num_parameters + 2**24
    fix = f"give the container --shm-size {max(1, -(-2 * needed // GIB))}g, or enlarge {SHARED_MEMORY}"
    return judged("shared memory", free, needed, 2 * needed, f"{free / 2**20:,.0f} MiB free", fix)


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    found = "no limit" if soft == sys.maxsize else f"{soft:,} allowed"
    return judged("open files", soft, 256, 1024, found, f"`ulimit -n {min(4096, hard)}` in this shell, then join again")


def check_disk(output_dir: Path) -> Check:
    try:
        make_writable(output_dir)
    except InputError as error:
        return Check("disk", "failed", str(error), "name another --output-dir")
    free = shutil.disk_usage(output_dir).free / GIB
    found = f"{free:,.1f} GiB free in {output_dir}"
    return judged("disk", free, 0.2, 1, found, "free some space, or name another --output-dir")


def check_data(manifest: RunManifest, data_dir: Path) -> Check:
    """Check whether the run's data are here, and the same as those of the other peers. Nothing is downloaded."""
    from recipe.registry import build_data

    recipe = manifest.recipe
    data = build_data(recipe, data_dir, batch_size=1)
    try:
        manifest.with_classes(data.digest, data_dir)
    except InputError as error:
        if missing := data.missing_download:
            return Check("data", "warning", f"no {missing} in {data_dir}", "the peer downloads it when it starts")
        return Check("data", "failed", str(error), "repair it, or name another folder with --data-dir")
    return Check("data", "ok", f"{recipe.dataset}: {data.num_train_samples:,} training samples")


def check_micro_batch(model: nn.Module, recipe: Recipe, device: str) -> Check:
    """Measure how many samples the device computes at a time, and warn if even that takes more than 2 s.

    Args:
        device: --device
    """
    from swarm.training.micro_batch.finder import measure_for_recipe, precision_on

    try:
        found = measure_for_recipe(model, recipe, device)
    except InputError as error:
        return Check("micro-batch", "failed", str(error), "give --device cpu, or join a run with a smaller model")
    state = "warning" if found.seconds > 2 else "ok"
    fix = "the others will wait for this machine, then go on without it: join a run with a smaller model"
    precision = "bfloat16" if precision_on(device, recipe.precision) == "bf16-mixed" else "float32"
    later = "; a busy machine measures less now, and a peer measures again while it trains"
    said = f"{found}{later if found.limit == 'time' else ''}; {precision}"
    return Check("micro-batch", state, said, fix if state == "warning" else "")


def machine_checks(device: str, output_dir: Path) -> list[Check]:
    """The checks that need no swarm. If the versions fail, it is the only one, since nothing else can be imported."""
    versions = check_versions()
    if versions.state == "failed":
        return [versions]
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    return [versions, check_device(device), check_memory(), check_open_files(), check_disk(output_dir)]


def check_images(data_dir: Path, tell: Callable[[str], None]) -> Check:
    """Decode every image once. One core takes about an hour for a million photographs.

    Args:
        data_dir: with `train/`, `val/` and perhaps `test/`, each with a folder per class
        tell: takes a line for each damaged file, and one about the progress every ten seconds
    """
    from recipe.data.damaged_images import ImagesByClass, damage
    from recipe.data.datasets import digest_of_classes

    try:
        parts = [ImagesByClass(data_dir / name) for name in ("train", "val", "test") if (data_dir / name).is_dir()]
    except (OSError, InputError) as error:
        return Check("images", "failed", str(error), "name a --data-dir with train/<class>/ and val/<class>/")
    if not parts:
        fix = "name a --data-dir with train/<class>/ and val/<class>/"
        return Check("images", "failed", f"{data_dir} has no folders train, val or test", fix)
    total = sum(map(len, parts))
    done, damaged = 0, [0] * len(parts)
    told_at = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoders work without Python's lock
        for place, part in enumerate(parts):
            paths = [path for path, _ in part.samples]
            for first in range(0, len(paths), IMAGES_AT_ONCE):
                some = paths[first : first + IMAGES_AT_ONCE]
                for path, reason in zip(some, pool.map(damage, some), strict=True):
                    if reason:
                        damaged[place] += 1
                        tell(f"{path}: {reason}")
                done += len(some)
                if time.monotonic() - told_at >= TELL_SECONDS:
                    told_at = time.monotonic()
                    tell(f"{done:,} of {total:,} images looked at, {sum(damaged):,} are damaged")
    digest = f"the digest of their classes is {digest_of_classes(parts[0].classes)}"
    if not any(damaged):
        return Check("images", "ok", f"all {total:,} can be read; {digest}")
    allowed = ", ".join(f"{part.limit} of {Path(part.root).name}" for part in parts)
    fix = f"repair or remove them; a peer skips {allowed} at most, and ends when it meets more"
    found = f"{sum(damaged):,} of {total:,} cannot be read; {digest}"
    too_many = any(number > part.limit for number, part in zip(damaged, parts, strict=True))
    return Check("images", "failed" if too_many else "warning", found, fix)
