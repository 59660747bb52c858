"""How a peer ends that its organiser has removed from the run. Imports nothing slow."""

from recipe.errors import InputError

SAID = "the organiser has removed this peer"
"""With which her server begins what it says to one."""
EXIT_STATUS = 3
"""Of a peer's program. Whoever starts peers again need not start this one."""


class Removed(InputError):  # noqa: N818 (reads as what happened)
    """This peer may not take part any more; trying again changes nothing."""
