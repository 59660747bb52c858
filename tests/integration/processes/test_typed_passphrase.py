"""A passphrase that was typed is known to the program that replaces a peer."""

import subprocess
import sys

REPLACED = """
import os, sys
from unittest import mock
from swarm.enrolment.organiser_key import hand_over_typed, passphrase_from
if "again" in sys.argv:
    print(ascii(passphrase_from({}, "Passphrase of a key: ")), "SWARM_TYPED" in os.environ)
else:
    types = mock.patch("getpass.getpass", return_value="typed \\udcff ü")
    with mock.patch("sys.stdin.isatty", return_value=True), types:
        passphrase_from({}, "Passphrase of a key: ")
    hand_over_typed()
    os.execv(sys.executable, [*sys.orig_argv, "again"])
"""


def test_what_was_typed_is_known_to_the_program_that_takes_the_place_of_this_one():
    """A peer that starts itself again at night finds no person to type it."""
    program = [sys.executable, "-c", REPLACED]
    said = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    assert said.strip() == ascii("typed \udcff ü") + " False"
