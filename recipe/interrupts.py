"""Ctrl-C while a program still imports: nothing has begun, so it ends in silence. Importing this takes no time."""

import os
import signal
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


def _end(signal_number: int, _frame: FrameType | None) -> None:
    os._exit(128 + signal_number)
