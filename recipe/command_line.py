"""What the command lines have in common: how options are shown, read and checked. Imports nothing slow."""

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
"""However somebody has written its beginning: peers understand it then, too."""
_USER_INFO = re.compile(r"://[^/\s]*@")


def arg(metavar: str, default: str | None = None, text: str | None = None) -> Any:
    """How `--help` shows an option; `default` where the default itself says nothing."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else None, help=text)


def read_options(
    kind: type[T], arguments: list[str] | None, prog: str, default: T | None = None, description: str | None = None
) -> T:
    """The command line as a dataclass, each of whose groups has been checked; dashes and underscores alike.

    Args:
        default: what is not on the command line; None: as the class says
        description: for `--help`; None: the docstring of the class

    Raises:
        InputError: a value that cannot work, from a group's `check`.
        SystemExit: status 2 for what is not an option, 0 for `--help`.
    """
    with _readable_help(kind, arguments):
        said = _filled(description or kind.__doc__ or "")
        options = tyro.cli(kind, args=arguments, prog=prog, default=default, description=said, config=_HOW)
    # Not in __post_init__: tyro would put a box with a title around the sentence.
    for group in vars(options).values():
        if hasattr(group, "check"):
            group.check()
    return options


def read_known_options(kind: type[T], arguments: list[str] | None, prog: str) -> tuple[T, list[str]]:
    """As `read_options`, without checks; and the words that are for another program."""
    with _readable_help(kind, arguments):
        said = _filled(kind.__doc__ or "")
        return tyro.cli(kind, args=arguments, prog=prog, description=said, return_unknown_args=True, config=_HOW)


def exit_status(run: Callable[[], int | None], interrupted: str = "Interrupted.") -> int:
    """What a program returns; 2 for input that cannot work and 130 after Ctrl-C, said in one sentence."""
    try:
        return run() or 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line that can be kept and shown: join lines, certificates and passwords in URLs are left out of it."""
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
            continue  # a line that was pasted with spaces is several words
        elif is_certificate and has_value:
            shown.append(f"{option}={HIDDEN}")
        else:
            in_line = False
            shown.append(_USER_INFO.sub(f"://{HIDDEN}@", word))
        hides_next = is_certificate and not has_value
    return shown


def at_least(options: object, least: int, *names: str) -> None:
    """Raises InputError if one of these options is a smaller number."""
    for name in names:
        value = getattr(options, name)
        if isinstance(value, int) and value < least:
            raise InputError(f"--{name.replace('_', '-')} is {value}: it has to be at least {least}.")


def check_port(option: str, port: int, what_0_is: str = "any free port") -> None:
    """Raises InputError: no port has this number."""
    if not 0 <= port <= 65535:
        raise InputError(f"{option} is {port}: give 0 ({what_0_is}) to 65535.")


def check_stops(max_time: str | None, target_accuracy: float | None) -> None:
    """Raises InputError for a time or an accuracy that nothing can stop at."""
    if max_time is not None:
        parse_duration(max_time)
    if target_accuracy is not None and not 0 < target_accuracy <= 1:
        hint = f", such as {target_accuracy / 100:g}" if 1 < target_accuracy <= 100 else ""
        raise InputError(f"--target-accuracy is {target_accuracy:g}: give a fraction between 0 and 1{hint}.")


@contextlib.contextmanager
def _readable_help(kind: type, arguments: Sequence[str] | None) -> Iterator[None]:
    """Of whole sentences. In a notebook or a log no terminal tells its width, and 80 columns are too few."""
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
    """With the line ends that the terminal needs, and not those of a docstring; indented lines stay as they are.

    They are indented, because tyro joins lines that begin with a letter.
    """
    filler = textwrap.TextWrapper(shutil.get_terminal_size().columns, initial_indent="  ", subsequent_indent="  ")
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else filler.fill(part) for part in paragraphs)


def _give_texts(kind: type) -> None:
    """tyro would keep the ends of a docstring's lines, in the midst of sentences: it gets the texts without them."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        with contextlib.suppress(OSError):  # changes to a recipe are no class in a file, and have their texts
            texts |= field_docstrings(base) if is_dataclass(base) else {}
    hints = get_type_hints(kind)
    for item in fields(kind):
        if is_dataclass(hints[item.name]):
            _give_texts(hints[item.name])
        if item.name in texts:
            item.metadata = MappingProxyType({**item.metadata, "help": " ".join(texts[item.name].split())})
