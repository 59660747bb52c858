"""`swarm demo` whose peers are forked from a process that has imported already, as is this program itself."""

import os
import sys
from io import BufferedWriter
from pathlib import Path

from swarm.cli import demo
from tests.helpers.programs.forked import ForkedProgram


def begin(command: list[str], stdout: BufferedWriter, env: dict[str, str], **_) -> ForkedProgram:
    """Start a peer, in place of `subprocess.Popen`."""
    python, _, module, *arguments = command
    assert python == sys.executable
    return ForkedProgram(module, arguments, Path(stdout.name), 0, env)


if __name__ == "__main__":
    demo.subprocess.Popen = begin
    status = demo.main()
    sys.stdout.flush()
    os._exit(status)
