"""Detects where a notebook runs: how long its session lasts, and which folder outlives it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

DRIVE = Path("/content/drive/MyDrive")


@dataclass(frozen=True)
class Platform:
    """A platform that runs notebooks.

    Args:
        name: the platform's usual name
        session_hours: longest session; None for no limit
        storage: folder for runs, name and identity
        hint: how name and contribution survive the session
    """

    name: str
    session_hours: float | None
    storage: Path
    hint: str

    def seconds_left(self) -> float | None:
        """Seconds left of the longest possible session, which began when its first process did; None without a
        limit."""
        if self.session_hours is None:
            return None
        return max(0.0, 3600 * self.session_hours - (time.time() - psutil.Process(1).create_time()))


def detect() -> Platform:
    """The platform, by its environment variables."""
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return Platform(
            "Kaggle",
            12.0,  # on CPUs and GPUs, at the time of writing
            Path("/kaggle/working/swarm-vit"),
            "set Persistence to “Files only” in the notebook's settings: your name and identity outlive the session. "
            "Keep this notebook private: its output holds your key",
        )
    if "COLAB_RELEASE_TAG" in os.environ:
        mounted = DRIVE.is_dir()
        return Platform(
            "Colab",
            12.0,  # the most it gives; it may end at any time
            (DRIVE if mounted else Path("/content")) / "swarm-vit",
            "your name and identity are in your Drive"
            if mounted
            else "mount your Drive first (from google.colab import drive; drive.mount('/content/drive')) to keep your "
            "name and identity when the session ends",
        )
    return Platform("this machine", None, Path("runs"), "the folder keeps your name and identity")
