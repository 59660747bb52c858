"""How a program prints, on any terminal, and ends: at Ctrl-C while it still imports, or when nobody reads any more.

Importing this takes no time.
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
"""Letters for a terminal that has only ASCII: nearly always one for each, so that tables keep their columns."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def end_silently() -> None:
    """From now on Ctrl-C ends this process at once, with status 130 and without a traceback.

    For the time before anything has begun, which an exception would not always end: some imports swallow it. Where
    Ctrl-C is ignored, as under nohup, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as usual, if it was `end_silently` that had changed that."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_to_end(main: Callable[[], int]) -> None:
    """Run a program and end this process with its status, as `status_of` says, and at once."""
    os._exit(status_of(main))  # everything is written and every child has ended; taking torch apart would cost seconds


def status_of(main: Callable[[], int | None]) -> int:
    """Run a program that may print on any terminal, and into a file or a pipe; returns its exit status.

    Where nobody reads its output any more, as after `head`, it ends in silence, with the status of SIGPIPE. Where a
    disk is full, perhaps that of the output, it says so in one sentence, with status 2.
    """
    print_anywhere()
    try:
        try:
            status = main() or 0
        except SystemExit as end:  # a help was printed
            status = end.code or 0
            if isinstance(status, str):  # a sentence, which Python itself would print
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
            with contextlib.suppress(OSError):  # it may be on the same disk
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
    """From now on output never fails for a letter that a terminal does not have, nor where a stream is closed."""
    codecs.register_error("look-alikes", _look_alikes)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # else the next file that is opened would take its number
            nothing = open(os.devnull, mode)  # noqa: SIM115
            os.set_inheritable(nothing.fileno(), True)  # in a program that this one starts as well
            setattr(sys, name, nothing)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not what a notebook puts there
            stream.reconfigure(errors="look-alikes")


def _look_alikes(error: UnicodeError) -> tuple[str, int]:
    letter = error.object[error.start]
    like = letter.translate(LOOK_ALIKES)
    return (like if like.isascii() else ascii(letter)[1:-1]), error.start + 1


def _nobody_reads() -> bool:
    """Another pipe may have broken, such as one between two processes: that is an error like any other."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _end(signal_number: int, _frame: FrameType | None) -> None:
    os._exit(128 + signal_number)
