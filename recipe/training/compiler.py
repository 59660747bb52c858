"""What `torch.compile` needs of a machine."""

import os
import shutil

from recipe.errors import InputError

COMPILERS = ("g++", "gcc", "clang++", "clang", "c++", "cc")


def check_compiler() -> None:
    """Raises InputError: torch would find no C++ compiler, which it needs on CPUs and GPUs alike."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), *COMPILERS) if name):
        raise InputError("--compile needs a C++ compiler: install g++, or leave --compile out.")
