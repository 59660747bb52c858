"""How a peer ends that its organiser has removed from the run. Imports nothing slow."""

from recipe.errors import InputError

SAID = "the organiser has removed this peer"
"""How the enrolment server's answer to a removed peer begins."""
EXIT_STATUS = 3
"""With which the program of a removed peer ends: a service manager should not start it again."""


class Removed(InputError):  # noqa: N818 (reads as what happened)
    """This peer may not take part any more; trying again changes nothing."""
