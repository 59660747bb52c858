"""The one exception whose message is written for a person, and texts for such messages."""

from typing import Any


class InputError(ValueError):
    """Something a person gave (an option, a file, an address, a folder) cannot work.

    The message is one sentence that says what is wrong and names the fix. Command lines print it and exit with 2.
    """


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of a library's exception, for a sentence of ours; its class name if it has no text.

    Args:
        most: largest number of letters.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0][:most]


def shown(value: Any) -> str:
    """A value as it is shown in a message: escaped, so that it cannot fake lines or colours, and short."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists
        text = "something very long"
    return text if len(text) <= 80 else text[:77] + "..."
