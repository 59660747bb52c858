"""What the command lines share: how options are shown, read and checked. Imports nothing slow."""

import contextlib
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

import tyro

from recipe.durations import parse_duration
from recipe.errors import InputError
from recipe.overrides import field_docstrings

T = TypeVar("T")

HELP_COLUMNS = "110"
_HOW = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
JOIN_LINE, HIDDEN = "swarm://", "…"
_JOIN_LINE = re.compile(r"swarm:/", re.IGNORECASE)
"""The beginning of a join line, in any case and with one slash or two: peers accept all of these."""
_USER_INFO = re.compile(r"://[^/\s]*@")


def arg(metavar: str, default: str | None = None, text: str | None = None) -> Any:
    """The annotation that says how `--help` shows an option. `default` describes a default whose value is not
    telling."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else None, help=text)


def read_options(
    kind: type[T], arguments: list[str] | None, prog: str, default: T | None = None, description: str | None = None
) -> T:
    """The command line as a dataclass. Each group of options has been checked; dashes and underscores are alike.

    Args:
        default: values of options that are not on the command line; None for those of the class.
        description: text for `--help`; None for the docstring of the class.

    Raises:
        InputError: a group's `check` refuses a value.
        SystemExit: with status 2 for an unknown option, with 0 for `--help`.
    """
    with _readable_help(kind, arguments):
        said = _filled(description or kind.__doc__ or "")
        options = tyro.cli(kind, args=arguments, prog=prog, default=default, description=said, config=_HOW)
    # Not in __post_init__: tyro would draw a box with a title around the sentence.
    for group in vars(options).values():
        if hasattr(group, "check"):
            group.check()
    return options


def read_known_options(kind: type[T], arguments: list[str] | None, prog: str) -> tuple[T, list[str]]:
    """The options as of `read_options`, without checks, and the remaining words, which are meant for another
    program."""
    with _readable_help(kind, arguments):
        said = _filled(kind.__doc__ or "")
        return tyro.cli(kind, args=arguments, prog=prog, description=said, return_unknown_args=True, config=_HOW)


def exit_status(run: Callable[[], int | None], interrupted: str = "Interrupted.") -> int:
    """The exit status of a program: what `run` returns, 2 for an InputError, 130 after Ctrl-C; both print one
    sentence."""
    try:
        return run() or 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The command line without join lines, certificates and passwords in URLs, so that it can be kept and shown."""
    shown, in_line, hides_next = [], False, False
    for word in arguments:
        option, has_value, _ = word.partition("=")
        is_certificate = option.lstrip("-") == "certificate" and option.startswith("-")
        if _JOIN_LINE.search(word):
            before = _JOIN_LINE.split(word)[0].strip("'\"")
            shown.append(f"{before}{JOIN_LINE}{HIDDEN}")
            in_line = True
        elif hides_next:
            shown.append(HIDDEN)
        elif in_line and not word.startswith("--"):
            continue  # a join line that was pasted with spaces in it is several words
        elif is_certificate and has_value:
            shown.append(f"{option}={HIDDEN}")
        else:
            in_line = False
            shown.append(_USER_INFO.sub(f"://{HIDDEN}@", word))
        hides_next = is_certificate and not has_value
    return shown


def at_least(options: object, least: int, *names: str) -> None:
    """Raises InputError if one of the named options is a whole number below `least`."""
    for name in names:
        value = getattr(options, name)
        if isinstance(value, int) and value < least:
            raise InputError(f"--{name.replace('_', '-')} is {value}: it has to be at least {least}.")


def check_port(option: str, port: int, what_0_is: str = "any free port") -> None:
    """Raises InputError if no port has this number."""
    if not 0 <= port <= 65535:
        raise InputError(f"{option} is {port}: give 0 ({what_0_is}) to 65535.")


def check_stops(max_time: str | None, target_accuracy: float | None) -> None:
    """Raises InputError if the time or the accuracy cannot serve as a limit at which to stop."""
    if max_time is not None:
        parse_duration(max_time)
    if target_accuracy is not None and not 0 < target_accuracy <= 1:
        hint = f", such as {target_accuracy / 100:g}" if 1 < target_accuracy <= 100 else ""
        raise InputError(f"--target-accuracy is {target_accuracy:g}: give a fraction between 0 and 1{hint}.")


@contextlib.contextmanager
def _readable_help(kind: type, arguments: Sequence[str] | None) -> Iterator[None]:
    """Prepare a readable `--help`: whole sentences, and `HELP_COLUMNS` where there is no terminal.

    A notebook and a log have no width, and the 80 columns that are assumed then are too few.
    """
    if {"-h", "--help"} & set(sys.argv[1:] if arguments is None else arguments):
        _give_texts(kind)
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        yield
        return
    os.environ["COLUMNS"] = HELP_COLUMNS
    try:
        yield
    finally:
        del os.environ["COLUMNS"]


def _filled(text: str) -> str:
    """The text filled to the width of the terminal; lines that are indented stay as they are.

    The filled paragraphs are indented, because tyro would join lines that begin with a letter.
    """
    filler = textwrap.TextWrapper(shutil.get_terminal_size().columns, initial_indent="  ", subsequent_indent="  ")
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else filler.fill(part) for part in paragraphs)


def _give_texts(kind: type) -> None:
    """Give each field its help text on one line: tyro would keep the line ends of a docstring within sentences."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        with contextlib.suppress(OSError):  # overrides of a recipe are no class in a file, and have their texts
            texts |= field_docstrings(base) if is_dataclass(base) else {}
    hints = get_type_hints(kind)
    for item in fields(kind):
        if is_dataclass(hints[item.name]):
            _give_texts(hints[item.name])
        if item.name in texts:
            item.metadata = MappingProxyType({**item.metadata, "help": " ".join(texts[item.name].split())})
