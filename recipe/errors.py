"""The one exception that a person is meant to read."""


class InputError(ValueError):
    """Something a person gave (an option, a file, an address, a folder) cannot work.

    The message is one sentence that says what is wrong and names the fix. Command lines print it and exit with 2.
    """
