"""Checks the health of a container: exit status 0 if its peer has written its status within the last minute.

python healthy.py /runs
"""

import json
import sys
import time
from pathlib import Path

FRESH_SECONDS = 60.0  # a peer writes its status twice a second


def is_healthy(runs: Path) -> bool:
    """Whether the newest status in RUNS/RUN_ID/NAME is fresh, and its peer has not failed."""
    newest = max(runs.glob("*/*/status.json"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or time.time() - newest.stat().st_mtime > FRESH_SECONDS:
        return False
    try:
        return json.loads(newest.read_text())["ended"] != "failed"
    except (ValueError, KeyError):
        return False


if __name__ == "__main__":
    sys.exit(not is_healthy(Path(sys.argv[1])))
