"""How a peer ends after the organiser has removed it from the run. Imports nothing slow."""

from recipe.errors import InputError

SAID = "the organiser has removed this peer"
"""How the enrolment server's answer to a removed peer begins."""
EXIT_STATUS = 3
"""Exit status of the program of a removed peer: a service manager should not start it again."""


class Removed(InputError):  # noqa: N818 (reads as what happened)
    """This peer may not take part any more; trying again changes nothing."""
