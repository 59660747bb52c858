"""A peer that starts again in place is a new program in the same process."""

import subprocess
import sys

PROGRAM = """
import os, sys

if len(sys.argv) == 1:
    from swarm.peer.supervisor import start_again

    file = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(file, True)  # as that of shared memory that has come from another process
    start_again([str(file)], trained_seconds=0.0)
print(os.path.exists(f"/proc/self/fd/{sys.argv[1]}"))
"""


def test_no_file_stays_open():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
