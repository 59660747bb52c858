"""Parses a length of time that a person wrote."""

import re
from datetime import timedelta

from recipe.errors import InputError


def parse_duration(text: str) -> timedelta:
    """The duration that a text HH:MM:SS stands for.

    Raises:
        InputError: the text has another form, or the duration is zero.
    """
    parts = re.fullmatch(r"(\d{1,4}):([0-5]?\d):([0-5]?\d)", text.strip())
    if parts is None:
        raise InputError(f"{text[:40]!r} is no duration: write --max-time as HH:MM:SS, such as 01:30:00.")
    hours, minutes, seconds = map(int, parts.groups())
    duration = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if not duration:
        raise InputError("The training has no time: set --max-time to at least 00:00:01.")
    return duration
