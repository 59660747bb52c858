"""Tells whether peers on slow lines all take part: the members of each update, and its time over the least possible.

    python -m analysis home runs/analysis/home          # an experiment's folder, or that of one cell

It also works for cells that failed or still run: it reads only files that the peers write anyway.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.campaigns.cells import Cell, network_of
from analysis.campaigns.payload import num_parameters, payload_bytes
from analysis.campaigns.systems import RUN_ID, SYSTEMS, asked_samples, swarm
from analysis.wan.topology import Host
from recipe.run_folder import RunFolder, read_metrics

STARTED = "started.json"
"""File in a cell's folder with the Unix seconds at which each host's command was started."""
GOODPUT = 0.95
"""Share of a line's rate that is left for a program's own bytes; headers of packets and frames take the rest."""
ADAMW_STATE_BYTES = 12
"""Bytes per parameter in a state: the weight and two running means, in float32."""
FIRST_MICRO_BATCH = "first micro-batch"
"""Name in the peer's log of the last part of a start, in which the peer trains."""


@dataclass(frozen=True)
class RoundEnd:
    """A line of a peer's `rounds.jsonl`."""

    host: str
    ended_at: float
    """Unix seconds."""
    step: int
    outcome: str
    """Outcome of the round: "averaged", "alone", or why it failed."""
    members: tuple[str, ...]
    """Names of the hosts that took part; for a peer that is no host of this cell, the end of its peer id."""
    seconds: float
    """Time from the start of matchmaking to the complete average; 0 for a round that failed."""
    exchange_seconds: float
    """The part of `seconds` from the closed group to the complete average."""

    @property
    def began_at(self) -> float:
        """Unix seconds at which the group was complete."""
        return self.ended_at - self.exchange_seconds


@dataclass(frozen=True)
class Start:
    """The start of a peer, until its first micro-batch."""

    command_at: float
    """Unix seconds."""
    parts: dict[str, float]
    """Seconds of each part of the start, in order; empty if the peer never trained."""
    state_megabytes: float = 0.0
    """Size of the state that the peer took over until then; 0 if its log does not say."""

    @property
    def trains_at(self) -> float | None:
        """Unix seconds at which the first micro-batch began; None if it never did."""
        if not self.parts:
            return None
        return self.command_at + sum(self.parts.values()) - self.parts.get(FIRST_MICRO_BATCH, 0.0)

    @property
    def state_at(self) -> float:
        """Unix seconds at which the peer began to ask for the state."""
        names = list(self.parts)
        before = names[: names.index("state")] if "state" in names else names
        return self.command_at + sum(self.parts[name] for name in before)


def measures_home(cell: Cell) -> bool:
    """Whether the cell is a swarm of ours, whose peers write the files that this module reads."""
    return SYSTEMS[cell.system].command is swarm and cell.peers > 1


def home_numbers(folder: Path, cell: Cell) -> dict[str, Any]:
    """The numbers about a cell that this module finds, as JSON values.

    Returns:
        `updates` (a dict each: step, groups, missed, alone, seconds, limits, over_limit), `whole_updates` (number of
        updates that all peers of the start made together), `worst_over_limit`, `median_over_limit`, `failed` (a dict
        each: host, step, reason), `start`, `memory_gib` and, for a host that joins later, `late`. A number that is not
        known is None. Limits in results of earlier versions are those of equal shares: shares that follow the lines can
        beat these.
    """
    hosts = network_of(cell, folder).hosts[: cell.peers]
    ends = _round_ends(folder, hosts)
    starts = _starts(folder, hosts)
    at_start = [host.name for host in hosts[: cell.peers_at_start]]
    updates = _updates(ends, cell, hosts)
    failed = [end for end in ends if end.outcome not in ("averaged", "alone")]
    ratios = [update["over_limit"] for update in updates if update["over_limit"] is not None]
    return {
        "updates": updates,
        "whole_updates": sum(_is_whole(update, at_start) for update in updates),
        "worst_over_limit": max(ratios, default=None),
        "median_over_limit": statistics.median(ratios) if ratios else None,
        "failed": [{"host": end.host, "step": end.step, "reason": end.outcome} for end in failed],
        "start": _start_numbers(ends, starts, at_start),
        "late": None if cell.last_joins_at_step is None else _late_numbers(ends, starts, cell, hosts),
        "memory_gib": _most_memory(folder),
    }


def limit_seconds(cell: Cell, members: Sequence[Host]) -> dict[str, float]:
    """The least time that an update of these hosts takes: {"computing", "sending"}, in seconds.

    A member that reduces a share x of the vector sends (1 - x) of it to the other reducers, and x to each of the N - 1
    others: 1 + x (N - 2) vectors. It receives as many. So each line carries at least one vector, and all lines together
    carry 2 (N - 1). The limit is that of the best shares, and not of those that the members had. All are
    taken to give samples.
    """
    rates = cell.paced_rates
    paced = sum(rates[host.number - 1] for host in members) if rates else 0.0
    lines = [GOODPUT * min(host.up_mbps or math.inf, host.down_mbps or math.inf) for host in members]
    megabits = (payload_bytes(cell) or 0) * 8 / 1e6  # no limit by sending if the bytes are not known
    return {
        "computing": asked_samples(cell) / paced if paced else 0.0,
        "sending": megabits * max(1 / min(lines), 2 * (len(members) - 1) / sum(lines)),
    }


def _updates(ends: Sequence[RoundEnd], cell: Cell, hosts: Sequence[Host]) -> list[dict[str, Any]]:
    by_name = {host.name: host for host in hosts}
    found, before, limits_before = [], None, {}
    for step in sorted({end.step for end in ends if end.outcome in ("averaged", "alone")}):
        averaged = [end for end in ends if end.step == step and end.outcome == "averaged"]
        alone = sorted(end.host for end in ends if end.step == step and end.outcome == "alone")
        groups = sorted({tuple(sorted(end.members)) for end in averaged})
        # An update is complete when its last member has it.
        at = max((end.ended_at for end in averaged), default=None)
        seconds = at - before if at is not None and before is not None else None
        known = [by_name[name] for group in groups for name in group if name in by_name]
        limits = limit_seconds(cell, known) if len(groups) == 1 and len(known) > 1 else None
        # While peers come or go, fewer compute for a part of the time, so the limit of the slower group counts.
        both = [*limits.values(), *limits_before.values()] if limits else []
        limit = max(both, default=0.0)
        found.append(
            {
                "step": step,
                "groups": [list(group) for group in groups],
                "missed": sorted({name for group in groups for name in group} - {end.host for end in averaged}),
                "alone": alone,
                "seconds": seconds,
                "limits": limits,
                "over_limit": seconds / limit if seconds is not None and limit else None,
            }
        )
        before, limits_before = at, limits or {}
    return found


def _is_whole(update: dict[str, Any], at_start: Sequence[str]) -> bool:
    """Whether all peers of the start were in one group, and each of its members has the average."""
    if len(update["groups"]) != 1 or update["missed"] or update["alone"]:
        return False
    return set(at_start) <= set(update["groups"][0])


def _start_numbers(ends: Sequence[RoundEnd], starts: dict[str, Start], at_start: Sequence[str]) -> dict[str, Any]:
    trains = {name: starts[name].trains_at for name in at_start if name in starts}
    last = max(trains.values()) if len(trains) == len(at_start) and None not in trains.values() else None
    whole = [end for end in ends if end.outcome == "averaged" and set(at_start) <= set(end.members)]
    first_step = min((end.step for end in whole), default=None)
    first = [end for end in whole if end.step == first_step]
    begun = min((end.began_at for end in first), default=None)
    return {
        "seconds_from_command": {name: _minus(at, starts[name].command_at) for name, at in trains.items()},
        "parts": {name: start.parts for name, start in starts.items()},
        "first_whole_step": first_step,
        "first_whole_round_begins_after": _minus(begun, last),
        "first_whole_round_ends_after": _minus(max((end.ended_at for end in first), default=None), last),
    }


def _late_numbers(
    ends: Sequence[RoundEnd], starts: dict[str, Start], cell: Cell, hosts: Sequence[Host]
) -> dict[str, Any]:
    late = hosts[-1]
    start = starts.get(late.name)
    if start is None:
        return {"problem": "it was never started"}
    own = [end for end in ends if end.host == late.name and end.outcome == "averaged"]
    first = min(own, key=lambda end: end.ended_at, default=None)
    megabytes = start.state_megabytes or ADAMW_STATE_BYTES * num_parameters(cell) / 1e6
    fastest_donor = max((host.up_mbps or 1e5 for host in hosts[:-1]), default=1e5)
    line = megabytes * 8 / (GOODPUT * min(late.down_mbps or 1e5, fastest_donor))
    joins_at = first.began_at if first else None
    others = [end for end in ends if end.host != late.name and end.outcome == "averaged"]
    before = [end.seconds for end in others if end.ended_at <= start.command_at]
    while_joining = [
        end.seconds
        for end in others
        if end.ended_at > start.command_at and (joins_at is None or end.ended_at - end.seconds < joins_at - 1.0)
    ]
    usual = statistics.median(before) if before else None
    return {
        "parts": start.parts,
        "state_megabytes": megabytes,
        "line_seconds": line,
        "state_over_line": start.parts["state"] / line if "state" in start.parts else None,
        "first_step": first.step if first else None,
        "first_round_begins_after": _minus(joins_at, start.command_at),
        "first_round_ends_after": _minus(first.ended_at if first else None, start.command_at),
        "joining_over_line": _minus(joins_at, start.state_at) / line if first else None,
        "others_before": {"median": usual, "worst": max(before, default=None)},
        "others_meanwhile": {
            "median": statistics.median(while_joining) if while_joining else None,
            "worst": max(while_joining, default=None),
            "worst_over_usual": max(while_joining) / usual if while_joining and usual else None,
        },
    }


def _minus(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier


def _round_ends(folder: Path, hosts: Sequence[Host]) -> list[RoundEnd]:
    """The ends of all rounds of all peers, oldest first."""
    names = _names_of_peers(folder, hosts)
    found = []
    for host in hosts:
        for line in read_metrics(RunFolder(folder / "runs" / RUN_ID / host.name).rounds):
            meeting, exchange = line.get("meeting_seconds") or 0.0, line.get("exchange_seconds") or 0.0
            ended_at = line["time"] - (line.get("apply_seconds") or 0.0)
            members = tuple(names.get(member, member[-6:]) for member in line.get("members", ()))
            end = RoundEnd(host.name, ended_at, line["step"], line["outcome"], members, meeting + exchange, exchange)
            found.append(end)
    return sorted(found, key=lambda end: end.ended_at)


def _names_of_peers(folder: Path, hosts: Sequence[Host]) -> dict[str, str]:
    """{peer id: host}, from the addresses in the peers' logs."""
    found = {}
    for host in hosts:
        ids = re.findall(rf"/ip4/{re.escape(host.address)}/tcp/\d+/p2p/(\w+)", _log(folder, host))
        found |= dict.fromkeys(ids, host.name)
    return found


def _log(folder: Path, host: Host) -> str:
    file = folder / "logs" / f"{host.name}.log"
    return file.read_text(errors="replace") if file.exists() else ""


def _starts(folder: Path, hosts: Sequence[Host]) -> dict[str, Start]:
    """The starts of the hosts whose command was started, by name."""
    file = folder / STARTED
    moments = json.loads(file.read_text()) if file.exists() else {}
    found = {}
    for host in hosts:
        if host.name not in moments:
            continue
        until, _, since = _log(folder, host).partition("First contribution ")
        said = since.partition("\n")[0].partition("after the command: ")[2]
        parts = {name.strip(): float(seconds) for name, seconds in re.findall(r"([\w -]+?) ([\d.]+) s\b", said)}
        taken_over = re.findall(r"Took over step \d+ from .*?: ([\d.]+) MB", until)
        found[host.name] = Start(moments[host.name], parts, sum(map(float, taken_over)) if parts else 0.0)
    return found


def _most_memory(folder: Path) -> float | None:
    """Largest memory of all processes of the cell together, in GiB; None if it was not recorded."""
    used = [line["memory"] for line in read_metrics(folder / "watch.jsonl") if "memory" in line]
    return max(used) / 2**30 if used else None
