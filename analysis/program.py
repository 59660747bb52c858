"""What the programs that measure have in common: a console, and what a result says of its options and its machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from rich.console import Console


def wide_console(width: int = 150) -> Console:
    """As wide as the terminal; where there is none, such as in a file, as wide as a table needs.

    Args:
        width: letters of a line, there.
    """
    return Console() if sys.stdout.isatty() else Console(width=width)


def options_of_result(options: Mapping[str, Any]) -> dict[str, Any]:
    """All but the folder of this machine."""
    return {name: value for name, value in options.items() if name != "output_dir"}


def environment_of_result() -> dict[str, Any]:
    """Versions and hardware; the options say the command line, without this machine's folders."""
    from recipe.training.environment import describe_environment  # torch takes seconds, and not all programs need it

    environment = describe_environment()
    del environment["command_line"]
    return environment


def environment_from_outside() -> dict[str, Any]:
    """The same from a process that ends, for programs that measure memory: pages of torch that this one had would be
    shared with those whose memory it measures, and so make them look smaller."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(environment_of_result).result()
