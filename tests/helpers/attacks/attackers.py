"""Attacks a run of ours, on this machine or in the lab, with what the review found. Tests and the benchmark use it.

    python tests/helpers/attacks/attackers.py NAME --initial-peers ADDRESS [--seconds 60] [--output-dir runs]

Outsiders know an address and nothing else. Members train along, and one thing that they send is false. Only loopback
and the lab's own network are ever called, and every attack ends by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3])]

from swarm.runtime.imports import quick_imports  # noqa: E402

with quick_imports():
    from recipe.errors import InputError
    from tests.helpers.attacks import members, outsiders

MAX_SECONDS = 3600.0


def main(arguments: list[str] | None = None) -> int:
    """Run one attack; returns the exit status, 2 for an address or a name that is refused."""
    names = [*outsiders.ATTACKS, *members.LIES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=names, help="of the attack")
    parser.add_argument("--initial-peers", nargs="+", required=True, metavar="ADDRESS", help="of the attacked run")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it lasts")
    parser.add_argument("--output-dir", type=Path, default=Path("runs"), help="where a member writes its run folder")
    options = parser.parse_args(arguments)
    seconds = min(max(0.0, options.seconds), MAX_SECONDS)
    try:
        if options.name in members.LIES:
            return members.train(options.name, options.initial_peers, seconds, options.output_dir)
        outsiders.attack(options.name, options.initial_peers, seconds, lambda text: print(text, flush=True))
        return 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
