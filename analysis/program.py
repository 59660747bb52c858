"""What all measuring programs share: a console, and what a result records about options and machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from rich.console import Console


def wide_console(width: int = 150) -> Console:
    """A console as wide as the terminal, or as a table needs if there is no terminal, such as in a file.

    Args:
        width: letters of a line without a terminal.
    """
    return Console() if sys.stdout.isatty() else Console(width=width)


def options_of_result(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a result records: all but the output folder, which belongs to this machine."""
    return {name: value for name, value in options.items() if name != "output_dir"}


def environment_of_result() -> dict[str, Any]:
    """The environment that a result records, without the command line: the options are recorded beside it."""
    from recipe.training.environment import describe_environment  # torch takes seconds, and not all programs need it

    environment = describe_environment()
    del environment["command_line"]
    return environment


def environment_from_outside() -> dict[str, Any]:
    """The same as `environment_of_result`, found by another process, for programs that measure memory.

    It imports torch. If this process did, its pages of torch would be shared with the processes that it measures, and
    make them look smaller.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(environment_of_result).result()
