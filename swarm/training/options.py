"""The settings that each peer chooses for itself: its patience, and how much of its line it gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm.averaging.slow_members import USUAL_MBPS
from swarm.protocol.admission import OPEN, Admission
from swarm.protocol.notes import Profile
from swarm.runtime.line_use import LineUse
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts


@dataclass(frozen=True)
class CoordinatorOptions:
    """The settings that each peer chooses for itself; they may differ from peer to peer.

    Args:
        min_peers: number of training peers that have to be there before this peer begins
        matchmaking_seconds: how long to wait at the end of a step for peers that are missing
        averaging_timeout_seconds: give up a round after so long, or after the time that a line of 2 Mbit/s needs for
            it, if that is longer; then try again with the remaining peers
        join_timeout_seconds: give up joining if no peer hands over the state for so long
        line: what rounds and states may take of this peer's line, such as `LineUse(max_upload_mbps=10)`
        admission: decides which peers may take part; by default all
        helps: this peer is a helper: it gives nothing to any round (`swarm.training.helper`)
        timeouts: the other times for which this peer waits
        ledger: file of what each member has given, which any peer can ask for; None if this peer keeps none
        state_folder: folder for large earlier states, to which all peers may go back; None for the folder of temporary
            files
        profile: what other peers are told about this machine; None for nothing
        slowest_line_mbps: a member that sends at this rate or faster is never left out for being slow
    """

    min_peers: int = 1
    matchmaking_seconds: float = 5.0
    averaging_timeout_seconds: float = 60.0
    join_timeout_seconds: float = 120.0
    line: LineUse | None = None
    admission: Admission = OPEN
    helps: bool = False
    timeouts: Timeouts = DEFAULT_TIMEOUTS
    ledger: Path | None = None
    state_folder: Path | None = None
    profile: Profile | None = None
    slowest_line_mbps: float = USUAL_MBPS
