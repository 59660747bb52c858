"""How a program ends: at Ctrl-C while it still imports, with its status, or when nobody reads what it prints.

Importing this takes no time.
"""

import os
import select
import signal
import sys
from collections.abc import Callable
from types import FrameType


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
    """Run a program and end this process with its status.

    Where nobody reads its output any more, as after `head`, it ends in silence, with the status of SIGPIPE.
    """
    try:
        try:
            status = main()
        except SystemExit as end:  # a help was printed
            status = end.code or 0
        sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        status = 128 + signal.SIGPIPE
    os._exit(status)  # everything is written and every child has ended; taking torch apart would cost seconds


def _nobody_reads() -> bool:
    """Another pipe may have broken, such as one between two processes: that is an error like any other."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _end(signal_number: int, _frame: FrameType | None) -> None:
    os._exit(128 + signal_number)
