"""Looks for the files in a folder of images that cannot be read, before they surprise anybody in the training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swarm.cli.checks import Check

BATCH = 1000
TELL_SECONDS = 10.0


def check_images(data_dir: Path, tell: Callable[[str], None]) -> Check:
    """Decode every image once; a core takes about an hour for a million photographs.

    Args:
        data_dir: with `train/`, `val/` and perhaps `test/`, each with a folder per class
        tell: takes a line for each damaged file, and one about the progress every ten seconds
    """
    from recipe.data.damaged_images import ImagesByClass, damage

    try:
        parts = [ImagesByClass(data_dir / name) for name in ("train", "val", "test") if (data_dir / name).is_dir()]
    except OSError as error:
        return Check("images", "failed", str(error), "name a --data-dir with train/<class>/ and val/<class>/")
    if not parts:
        fix = "name a --data-dir with train/<class>/ and val/<class>/"
        return Check("images", "failed", f"{data_dir} has no folders train, val or test", fix)
    total = sum(map(len, parts))
    done = num_damaged = 0
    too_many = False
    told_at = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoders work without Python's lock
        for part in parts:
            damaged_here = 0
            paths = [path for path, _ in part.samples]
            for first in range(0, len(paths), BATCH):
                some = paths[first : first + BATCH]
                for path, reason in zip(some, pool.map(damage, some), strict=True):
                    if reason:
                        damaged_here += 1
                        tell(f"{path}: {reason}")
                done += len(some)
                if time.monotonic() - told_at >= TELL_SECONDS:
                    told_at = time.monotonic()
                    tell(f"{done:,} of {total:,} images looked at, {num_damaged + damaged_here:,} are damaged")
            num_damaged += damaged_here
            too_many |= damaged_here > part.limit
    if not num_damaged:
        return Check("images", "ok", f"all {total:,} can be read")
    allowed = ", ".join(f"{part.limit} of {Path(part.root).name}" for part in parts)
    fix = f"repair or remove them; a peer skips {allowed} at most, and ends when it meets more"
    return Check("images", "failed" if too_many else "warning", f"{num_damaged:,} of {total:,} cannot be read", fix)
