"""What a peer decides alone: how patient it is, and how much of its line it gives."""

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
    """What this peer decides alone; nothing here has to agree with the others.

    Args:
        min_peers: do not begin before so many peers that train are there
        matchmaking_seconds: how long to wait at the end of a step for peers that are missing
        averaging_timeout_seconds: give up a round (and try again with those who are left) after so long, or after what
            a line of 2 Mbit/s needs for it, if that is longer
        join_timeout_seconds: give up joining when nobody hands over the state for so long
        line: what rounds and states may take of this peer's line, such as `LineUse(max_upload_mbps=10)`; of one peer
        admission: who may take part; by default everybody
        helps: this peer is a helper: it gives nothing to any round (`swarm.training.helper`)
        timeouts: everything else that this peer waits for
        ledger: file with what each has given, which is handed out to whoever asks; None if this peer keeps none
        state_folder: in which large states are kept to which all may go back; None for that of temporary files
        profile: what others are told of this machine; None for nothing
        slowest_line_mbps: a member that sends as fast as that is never left out for being slow
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
