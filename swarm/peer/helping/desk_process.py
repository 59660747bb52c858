"""Runs the desk of a run beside a peer, in a process of its own: neither depends on the other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from swarm.enrolment.join_line import MAX_ADDRESSES, JoinLine
from swarm.network.known_peers import usable
from swarm.peer.options import RoleOptions
from swarm.runtime.processes import die_with_parent

END_SECONDS = 5.0


class DeskProcess:
    """Runs `swarm desk` as a child of this peer. If the desk ends, it says why, and the peer goes on.

    Args:
        options: host and port of the page
        run_id: of the run
        addresses: of this peer; none if other peers cannot call it
        asked: addresses through which this peer has joined the swarm
        line: join line of the run, handed on without its invitation; None in an open run
        output_dir: where the desk keeps its history
    """

    def __init__(
        self,
        options: RoleOptions,
        run_id: str,
        addresses: Sequence[str],
        asked: Sequence[str],
        line: JoinLine | None,
        output_dir: Path,
    ):
        whom = " ".join([*addresses, *asked])
        if line is not None:
            # The first address stays the organiser's: with the line, members find the enrolment server there. The
            # others are those at which peers answer now, which the line may not know.
            known = usable([line.addresses[0], *addresses, *asked, *line.addresses[1:]])
            whom = str(replace(line, token=b"", addresses=tuple(known[:MAX_ADDRESSES])))
        place = ["--host", options.desk_host, "--port", str(options.desk_port)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "swarm", "desk", "--run-id", run_id, *place, "--output-dir", str(output_dir)],
            env=os.environ | {"INITIAL_PEERS": whom},
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in the terminal is for the peer, which ends it
            preexec_fn=partial(die_with_parent, signal.SIGTERM, os.getpid()),
        )

    @property
    def pid(self) -> int:
        """Process id of the desk."""
        return self._process.pid

    def stop(self) -> None:
        """End the desk, since the peer leaves."""
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()
