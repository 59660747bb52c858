"""How a peer comes back to a run in which no peer answers: it tries again, and in the end goes on alone.

After a power cut every peer waits for another one. A peer that has trained before holds a state to go on with. After a
while it begins alone, and the other peers, which keep trying, join it. Peers that begin alone at the same moment find
each other later, as the halves of a divided network do (`swarm.membership.announcer`). The latest step wins.
"""

from __future__ import annotations

import importlib
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recipe.config import Recipe
from recipe.errors import InputError
from recipe.run_folder import RunFolder, check_name, resumable
from swarm.enrolment.removed import Removed
from swarm.network.addresses import NobodyAnswers
from swarm.network.known_peers import books_of
from swarm.peer.options import PeerOptions
from swarm.runtime.imports import quick_imports

TIME_IS_UP = "Time is up (--max-time)."
RETURN_SECONDS, RETRY_SECONDS = 600.0, 2.0
"""How long a peer tries to come back, and the pause between two attempts."""
ALONE_SECONDS = 30.0
"""A peer with a checkpoint goes on alone after a random 30 to 60 s."""


def trained_before(options: PeerOptions) -> tuple[str, Recipe] | None:
    """Return the id and the recipe of the run that this command line goes on with; None without a checkpoint of it.

    Without `--run-id` it is the latest run in which this peer has met one of `--initial-peers`.

    Args:
        options: as `swarm.peer.bootstrap.unfolded` returns them
    """
    output_dir, name = options.machine.output_dir.expanduser(), options.machine.public_name
    if name is None:
        return None
    books = books_of(output_dir, options.run_id, options.initial_peers or ())
    folders = [output_dir / options.run_id / name] if options.run_id else [path.parent for path in books]
    for folder in map(RunFolder, folders):
        try:
            if folder.path.name == name and resumable(folder.checkpoints):
                return folder.path.parent.name, Recipe.from_json(folder.recipe.read_bytes())
        except (OSError, InputError):
            continue
    return None


def resumed(options: PeerOptions, since: float = 0.0) -> PeerOptions:
    """With `--resume`, return options that go on with the newest checkpoint, and print which one that is.

    Without `--resume` the options stay as they are. Peers of a demo are left out, unless their run is named:
    `swarm demo` itself goes on with them.

    Args:
        options: of this peer
        since: checkpoints that were written before this time are left out; seconds since 1970

    Raises:
        InputError: there is no checkpoint, a name is malformed, or `--start-from` was given as well
    """
    if not options.resume:
        return options
    if options.start_from is not None:
        raise InputError("--resume continues a run, and --start-from begins a new one: give one of them.")
    output_dir, name = options.machine.output_dir.expanduser(), options.machine.public_name
    run_id = "*" if options.run_id is None else check_name(options.run_id, "--run-id")
    name = "*" if name is None else check_name(name, "--public-name")
    peers = [RunFolder(path.parent) for path in output_dir.glob(f"{run_id}/{name}/{RunFolder('').rounds.name}")]
    of_demos = [folder for folder in peers if options.run_id is None and folder.identity.exists()]
    peers = [folder for folder in peers if folder not in of_demos]
    checkpoints = [path for folder in peers for path in resumable(folder.checkpoints) if path.stat().st_mtime >= since]
    if not checkpoints:
        said = f"--resume finds no checkpoint in {output_dir}"
        if any(resumable(folder.checkpoints) for folder in of_demos):
            raise InputError(
                f"{said} but those of `swarm demo`: name one with --run-id, or leave --resume out to begin anew."
            )
        raise InputError(f"{said}: give the --output-dir of before, or leave --resume out to begin anew.")
    newest = max(checkpoints, key=lambda path: path.stat().st_mtime)
    folder = RunFolder(newest.parent.parent)
    run_id, name = folder.path.parent.name, folder.path.name
    if (options.run_id, options.machine.public_name) != (run_id, name):
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest.stat().st_mtime))
        others = "--run-id and --public-name choose another one"
        print(f"Going on with run {run_id} as {name}, from its checkpoint of {made} ({others}).", flush=True)
    recipe = options.recipe or (None if options.initial_peers else str(folder.recipe))
    return replace(options, run_id=run_id, recipe=recipe, machine=replace(options.machine, public_name=name))


def come_back(
    make_peer: Callable[[bool], Any],
    again: bool,
    has_trained: bool,
    leave: Callable,
    is_time_up: Callable[[], bool],
) -> int:
    """Run a peer, and try again as long as what keeps it from joining may pass.

    A peer that started again by itself tries again after any error, since no person may be there to read it. A peer
    that has trained before tries again if no peer answers.

    Args:
        make_peer: makes a `swarm.peer.main.Peer`; called with whether it may go on alone
        again: this peer started again by itself; what is in its way, such as its own port, may pass
        has_trained: there is a checkpoint with which it can go on alone
        leave: handles SIGINT while modules are imported, which would swallow an exception
        is_time_up: whether the time of `--max-time` is over, so that no further attempt is made

    Returns:
        the exit status

    Raises:
        InputError: the peer cannot join, has not been able to for ten minutes, or its training ended with this error
    """
    began, told = time.monotonic(), ""
    alone_after_seconds = ALONE_SECONDS * random.uniform(1, 2)  # random, so that one begins first and others join it
    while True:
        peer = None
        waited_seconds = time.monotonic() - began
        try:
            peer = make_peer(has_trained and waited_seconds > alone_after_seconds)
            return peer.run()
        except InputError as error:
            may_pass = again or (has_trained and isinstance(error, NobodyAnswers))
            if (
                not may_pass
                or isinstance(error, Removed)
                or waited_seconds > RETURN_SECONDS
                or (peer is not None and peer.has_joined)
            ):
                raise
            if str(error) != told:
                told = str(error)
                limit = f"{RETURN_SECONDS / 60:.0f} minutes at most"
                if has_trained and isinstance(error, NobodyAnswers) and waited_seconds < alone_after_seconds:
                    limit = f"for {alone_after_seconds:.0f} s; then this peer goes on alone with its last checkpoint"
                print(f"{told}\nTrying again, {limit}.", file=sys.stderr, flush=True)
        signal.signal(signal.SIGINT, lambda signal_number, _frame: leave(signal_number))
        with quick_imports():
            importlib.import_module("swarm.peer.session")  # takes seconds, and the peer waits anyway
        time.sleep(RETRY_SECONDS)
        if is_time_up():
            print(TIME_IS_UP, flush=True)
            return 0
