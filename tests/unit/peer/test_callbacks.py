"""What a peer shows: its training does not depend on anybody who reads it."""

import errno
import io
import os

import pytest

from swarm.peer.callbacks import PatientConsole


class Broken(io.StringIO):
    """A file to which nothing can be written any more."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def write(self, _text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))  # of EPIPE, Python makes a BrokenPipeError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EIO])
def test_output_that_nobody_can_take_ends_nothing(number):
    console = PatientConsole(file=Broken(number))
    for _ in range(2):
        console.print("step 1/20")


def test_output_is_shown():
    console = PatientConsole(file=(file := io.StringIO()))
    console.print("step 1/20")
    assert file.getvalue() == "step 1/20\n"
