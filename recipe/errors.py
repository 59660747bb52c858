"""The one exception that a person is meant to read."""

from typing import Any


class InputError(ValueError):
    """Something a person gave (an option, a file, an address, a folder) cannot work.

    The message is one sentence that says what is wrong and names the fix. Command lines print it and exit with 2.
    """


def first_line(error: BaseException, most: int = 200) -> str:
    """What a library's exception says, for a sentence of ours: its first line, or its name if it says nothing.

    Args:
        most: letters.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0][:most]


def shown(value: Any) -> str:
    """A value in a message: escaped, so that it cannot fake lines or colours, and short."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists
        text = "something very long"
    return text if len(text) <= 80 else text[:77] + "..."
