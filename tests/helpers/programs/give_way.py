"""Imported by multiprocessing's fork server before all else: a process with all imports takes that server's place.

The original process only waits for the end of its replacement; the test process takes it for the fork server.
"""

import json
import os
import re
import socket
import sys

from tests.helpers.programs.importer import FORK_SERVER, ask

COMMAND = r"from multiprocessing\.forkserver import main; main\((\d+), (\d+), (?!.*authkey)"
"""The command line of a fork server: the socket for its requests, and the pipe that ends with the test process."""

if files := re.match(COMMAND, sys.orig_argv[-1]):
    asker = ask(FORK_SERVER)
    socket.send_fds(asker, [json.dumps(dict(os.environ)).encode()], [0, 1, 2, int(files[1]), int(files[2])])
    asker.recv(1)
    os._exit(0)
else:  # a Python whose fork server has other arguments
    import tests.helpers.programs.preloaded  # noqa: F401
