"""Printing on any terminal, and how a program ends: at Ctrl-C during its imports, or when its output is no longer read.

This module imports nothing slow.
"""

import codecs
import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Callable
from types import FrameType

LOOK_ALIKES = str.maketrans("…–−×·±→“”‘’", ".--x-~>\"\"''") | str.maketrans({"⁹": "^9"})
"""Replacements for a terminal that has only ASCII. Nearly all are one letter for one, so that tables keep their
columns."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def end_silently() -> None:
    """From now on Ctrl-C ends this process at once, with status 130 and without a traceback.

    Meant for the time before anything has begun. An exception would not always end the program there, because some
    imports swallow it. Where Ctrl-C is ignored, as under nohup, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again, if `end_silently` had changed that."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_to_end(main: Callable[[], int]) -> None:
    """Run a program, and end this process at once with the status that `status_of` gives."""
    os._exit(status_of(main))  # all is written and no child runs any more; taking torch apart would cost seconds


def status_of(main: Callable[[], int | None]) -> int:
    """Run a program that may print on any terminal, into a file or into a pipe; returns its exit status.

    If the reader of its output has gone, as after `head`, the program ends silently with the status of SIGPIPE. If a
    disk is full, perhaps the one that takes the output, it says so in one sentence and ends with status 2.
    """
    print_anywhere()
    try:
        try:
            status = main() or 0
        except SystemExit as end:  # a help was printed
            status = end.code or 0
            if isinstance(status, str):  # a message, which Python itself would print
                print(status, file=sys.stderr)
                status = 1
        sys.stdout.flush()
        return status
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            status = 128 + signal.SIGPIPE
        elif error.errno in _FULL:
            where = "" if error.filename is None else f" ({error.filename})"
            sentence = f"error: {error.strerror}{where}: make room, or send the output elsewhere."
            with contextlib.suppress(OSError):  # stdout may go to the full disk
                sys.stdout.flush()
            with contextlib.suppress(OSError):
                print(sentence, file=sys.stderr)
            status = 2
        else:
            raise
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())  # what is still to be written would fail again
    return status


def print_anywhere() -> None:
    """Make output safe: no failure for a letter that the terminal lacks, or for a stream that is closed."""
    codecs.register_error("look-alikes", _look_alikes)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # else the next file that is opened would take its number
            nothing = open(os.devnull, mode)  # noqa: SIM115
            os.set_inheritable(nothing.fileno(), True)  # also open in programs that this one starts
            setattr(sys, name, nothing)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's streams lack it
            stream.reconfigure(errors="look-alikes")


def _look_alikes(error: UnicodeError) -> tuple[str, int]:
    """The error handler for encoding: a replacement for the letter that failed, and where to go on."""
    letter = error.object[error.start]
    like = letter.translate(LOOK_ALIKES)
    return (like if like.isascii() else ascii(letter)[1:-1]), error.start + 1


def _nobody_reads() -> bool:
    """Whether the reader of stdout has gone. If another pipe broke, such as one between two processes, it is an
    ordinary error."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _end(signal_number: int, _frame: FrameType | None) -> None:
    os._exit(128 + signal_number)
