"""Checks that `torch.compile` can work on this machine."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from recipe.errors import InputError, first_line

if TYPE_CHECKING:
    import torch

COMPILERS = ("g++", "gcc", "clang++", "clang", "c++", "cc")


def check_compiler() -> None:
    """Check quickly, without torch, that there is a C++ compiler.

    Raises:
        InputError: torch would find no compiler, which it needs for CPUs and GPUs alike.
    """
    given = [os.environ[name] for name in ("CC", "CXX") if os.environ.get(name)]
    if not any(shutil.which(name) for name in (*given, *COMPILERS)):
        raise InputError("--compile needs a C++ compiler: install g++, or leave --compile out.")


def try_compiler(device: torch.device) -> None:
    """Compile a small function to see whether that works; it takes some seconds.

    Raises:
        InputError: the compilation fails.
    """
    import torch

    check_compiler()
    try:
        torch.compile(lambda numbers: numbers.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # from torch, Triton or a compiler
        raise InputError(f"--compile does not work on this machine ({first_line(error)}): leave it out.") from error
