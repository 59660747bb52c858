"""Join the peer whose status file is given, as soon as it listens; further arguments go to `python -m swarm.peer`.

python follow.py /first/compose/first/status.json --public-name volunteer-1
"""

import json
import os
import sys
import time
from pathlib import Path

PATIENCE_SECONDS = 300.0
OPTIONS = ("--port", "31337", "--output-dir", "/runs", "--data-dir", "/data")


def addresses(status: Path) -> list[str]:
    """The addresses at which the peer listens, without its loopback; empty if it does not listen yet."""
    try:
        found = json.loads(status.read_text())["addresses"]
    except (OSError, ValueError, KeyError):
        return []
    return [address for address in found if "/127.0.0.1/" not in address]


def main(status: Path, arguments: list[str]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := addresses(status)):
        if time.monotonic() > deadline:
            sys.exit(f"error: no peer listens according to {status} after {PATIENCE_SECONDS:.0f} s: look at its log.")
        time.sleep(1)
    os.execvp(sys.executable, [sys.executable, "-m", "swarm.peer", *OPTIONS, *arguments, "--initial-peers", *found])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
