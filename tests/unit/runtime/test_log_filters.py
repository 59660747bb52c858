"""An event is one line, and its repetitions are a number."""

import logging
import os
import subprocess
import sys

import pytest

from swarm.runtime.log_filters import MAX_KINDS, QUIET_SECONDS, RepeatFilter


class Screen:
    """A log as a person sees it, with a clock that a test moves."""

    def __init__(self):
        self.now = 0.0
        self.repeats = RepeatFilter(lambda: self.now)

    def shows(self, message: str, *arguments: object) -> str | None:
        record = logging.LogRecord("swarm", logging.WARNING, "", 0, message, arguments, None)
        return record.getMessage() if self.repeats.filter(record) else None


def test_repetitions_are_counted():
    screen = Screen()
    assert screen.shows("The round of step 12 failed: anna fell silent")
    for step in (13, 14):
        assert screen.shows(f"The round of step {step} failed: anna fell silent") is None
    assert screen.shows("The round of step 14 failed: ben fell silent"), "another event"
    screen.now = QUIET_SECONDS
    line = screen.shows("The round of step %d failed: anna fell silent", 90)
    assert line == "The round of step 90 failed: anna fell silent (and 2 more like this since 60 s ago)"
    screen.now += QUIET_SECONDS
    assert screen.shows("The round of step 91 failed: anna fell silent").endswith("silent"), "nothing was left out"


def test_strangers_cannot_fill_the_memory():
    screen = Screen()
    for number in range(10 * MAX_KINDS):
        assert screen.shows(f"Ignoring {chr(0x4E00 + number)}")
    assert len(screen.repeats.told) <= MAX_KINDS


@pytest.mark.parametrize("level", [None, "WARNING", "DEBUG"])
def test_a_program_that_has_started_again_in_place_is_as_quiet_as_before(level):
    """It finds in its environment the level that it has put there itself. Any other level is a person's."""
    program = (
        "import logging; from swarm.runtime.log_filters import silence_libraries; silence_libraries()\n"
        "logging.getLogger('asyncio').warning('Loop %r that handles pid %r is closed', 1, 2)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HIVEMIND_LOGLEVEL"}
    environment |= {} if level is None else {"HIVEMIND_LOGLEVEL": level}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("handles pid" in done.stderr) == (level == "DEBUG")
