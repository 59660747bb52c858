"""Imported by multiprocessing's fork server before all else: one that has imported everything takes its place.

Here this process only waits for the end of that one, for which the test process takes it.
"""

import json
import os
import re
import socket
import sys

from tests.helpers.programs.importer import FORK_SERVER, ask

COMMAND = r"from multiprocessing\.forkserver import main; main\((\d+), (\d+), (?!.*authkey)"
"""What it has been started with: the socket where it is asked, and the pipe that ends with the test process."""

if files := re.match(COMMAND, sys.orig_argv[-1]):
    asker = ask(FORK_SERVER)
    socket.send_fds(asker, [json.dumps(dict(os.environ)).encode()], [0, 1, 2, int(files[1]), int(files[2])])
    asker.recv(1)
    os._exit(0)
else:  # a Python whose fork server wants more
    import tests.helpers.programs.preloaded  # noqa: F401
