"""Reports of a run at one moment: the content of `/api/v1`, of the page, and of the metrics."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from swarm.desk.health import Finding, Level, is_over, verdict
from swarm.desk.history import History
from swarm.desk.ledger.credits import Credits
from swarm.desk.seen import Event, PeerSeen, Point, State, Test
from swarm.desk.timeline import CELL_SECONDS, WORDS, Failure, Round
from swarm.protocol.notes import Profile
from swarm.protocol.orders import Orders

MAX_STRIPS = 30


@dataclass(frozen=True)
class RunCard:
    """What the desk shows of a run and does not change while the desk runs.

    Args:
        key: prefix of the run's keys in the DHT
        by_invitation: only members take part
        join_line: what a volunteer pastes after `swarm join`; it has an invitation only if one is to be shown
        has_invitation: whether the join line has an invitation
        project_url: address of the repository of this program; empty if the page does not say where that is
    """

    key: str
    run_id: str
    model: str
    dataset: str
    total_steps: int
    target_batch_size: int
    by_invitation: bool
    join_line: str
    has_invitation: bool = False
    project_url: str = ""

    @property
    def join_command(self) -> str:
        """The command with which a volunteer joins."""
        return f"swarm join {self.join_line}"

    @property
    def setup_command(self) -> str:
        """The command with which a volunteer installs this program before."""
        return (
            f"git clone {shlex.quote(self.project_url)} swarm-vit && cd swarm-vit && make setup && . .venv/bin/activate"
        )


@dataclass(frozen=True)
class Plan:
    """How the run is to go on, by its recipe and the organiser's orders.

    Args:
        total_steps: updates of the whole run, by all orders, also those that are coming
        target_batch_size: samples of the next update
        is_paused: no peer computes for the next update
    """

    total_steps: int
    target_batch_size: int
    is_paused: bool


def plan(card: RunCard, orders: Orders, step: int) -> Plan:
    """How a run is to go on from a step.

    Args:
        step: updates that were made
    """
    return Plan(
        orders.total_steps(math.inf, card.total_steps),
        orders.target_batch_size(step, card.target_batch_size),
        orders.is_paused(step),
    )


class SwarmReport(BaseModel):
    """The run as a whole. Times are seconds since 1970. What peers say about themselves is claimed, not audited."""

    time: float
    run_id: str
    model: str
    dataset: str
    by_invitation: bool
    level: Level
    sentence: str = Field(description="says whether the run is well, and if not, why")
    findings: list[Finding]
    step: int | None
    total_steps: int
    is_over: bool
    is_paused: bool = Field(description="whether the organiser has paused the run")
    seconds_left: float | None = Field(
        description="seconds to the end of the run, if updates go on as fast as the last ones"
    )
    target_batch_size: int
    loss: float | None
    lowest_loss: float | None
    accuracy: float | None = Field(description="median of the peers' last validations, 0 to 1")
    samples_per_second: float
    updates_per_minute: float | None
    bytes_per_second: float | None = Field(
        description="bytes per second that all peers together send, over the last half minute"
    )
    sent_bytes: int = Field(description="bytes sent by all peers that the desk has seen, since each of them started")
    num_peers: int
    num_full_peers: int = Field(description="number of peers that other peers can call")
    updated_at: float | None = Field(description="when the desk saw the last update")
    watched_since: float


class PeerReport(BaseModel):
    """A peer, as it describes itself in its last progress record."""

    peer_id: str
    name: str = Field(description="chosen by the peer: several peers may have the same name")
    state: State
    phase: str
    role: Literal["server-mode", "client-mode", "helper"]
    reachable: bool
    reached: str = Field(description="how other peers call it, or that they cannot, as it says")
    device: str | None = Field(description="device on which it computes; null if it does not say")
    version: str | None = Field(description="version of its software; null if it does not say")
    step: int
    samples_per_second: float
    share: float | None = Field(description="its part of the samples that all peers compute now, 0 to 1")
    loss: float | None
    accuracy: float | None
    upload_bytes_per_second: float | None = Field(
        description="bytes per second it sent in the fastest of its latest averages: its line carries at least that"
    )
    sent_bytes: int | None = Field(description="bytes sent for rounds, states and ledgers, since its first start")
    received_bytes: int | None
    joined_at: float
    seen_at: float = Field(description="when it wrote its newest record, by the desk's clock")
    claimed_samples: float = Field(
        description="its samples in all updates that the desk has seen, estimated from its claims"
    )


class PeersReport(BaseModel):
    """The peers that are there, the fastest first, and then those that went in the last hour."""

    time: float
    peers: list[PeerReport]


class HistoryReport(BaseModel):
    """The curves, with at most 1,000 points; the last 200 events; and at most 1,000 tests of the weights."""

    time: float
    points: list[Point]
    events: list[Event]
    tests: list[Test] = Field(description="results on the test samples, as stated by the peers that made the tests")


class Strip(BaseModel):
    """What a peer did in each cell of the timeline."""

    peer_id: str
    name: str
    states: str = Field(description="a letter for each cell, as `letters` explains it; a space: not known")


class TimelineReport(BaseModel):
    """The last ten minutes of at most 30 peers, as far as progress records tell, and the last 30 updates seen."""

    time: float
    began_at: float | None = Field(description="when the first cell began")
    cell_seconds: float
    letters: dict[str, str]
    updates: list[int] = Field(description="number of updates made in each cell")
    strips: list[Strip]
    rounds: list[Round]
    trying: list[Failure] = Field(description="why rounds of the next updates have failed so far, as peers say")


def swarm_report(card: RunCard, run: Plan, history: History, found: Sequence[Finding], now: float) -> SwarmReport:
    """The report of the run as a whole.

    Args:
        run: how the run is to go on
        found: what is not as it should be
        now: seconds since 1970
    """
    level, sentence = verdict(history, run.total_steps, list(found), now, run.is_paused)
    pace, here = history.updates_per_minute(now), history.here
    left = run.total_steps - (history.step or 0)
    return SwarmReport(
        time=now,
        run_id=card.run_id,
        model=card.model,
        dataset=card.dataset,
        by_invitation=card.by_invitation,
        level=level,
        sentence=sentence,
        findings=[*found],
        step=history.step,
        total_steps=run.total_steps,
        is_over=is_over(history, run.total_steps, now),
        is_paused=run.is_paused,
        seconds_left=60 * max(0, left) / pace if pace and not run.is_paused else None,
        target_batch_size=run.target_batch_size,
        loss=history.loss,
        lowest_loss=history.lowest_loss,
        accuracy=history.accuracy,
        samples_per_second=history.samples_per_second,
        updates_per_minute=pace,
        bytes_per_second=history.bytes_per_second,
        sent_bytes=history.sent,
        num_peers=len(here),
        num_full_peers=sum(not peer.client_mode for peer in here),
        updated_at=history.updated_at,
        watched_since=history.began_at,
    )


def peers_report(history: History, now: float) -> PeersReport:
    """The report of the peers that are there, and of those that went in the last hour.

    Args:
        now: seconds since 1970
    """
    total = history.samples_per_second
    return PeersReport(time=now, peers=[_peer(peer_id, peer, total) for peer_id, peer in history.shown(now).items()])


@dataclass(frozen=True)
class Leader:
    """One of the peers that have given the most samples."""

    peer_id: str
    name: str
    samples: float


@dataclass(frozen=True)
class Leaders:
    """The peers that have given the most samples so far, whether they are still there or not.

    Args:
        peers: the one that has given most comes first
        confirmed_at: time of the ledger that confirms the numbers, seconds since 1970; None: the peers claim them
        num_findings: lines of that ledger that were changed and count for nothing
        trouble: a sentence, if the newest updates are missing in the ledger; else empty
    """

    peers: list[Leader]
    confirmed_at: float | None = None
    num_findings: int = 0
    trouble: str = ""


def leaders_report(history: History, most: int, credits: Credits | None = None) -> Leaders:
    """The peers that have given most, by the ledger as soon as it has an update, else by the pace that each one states.

    Args:
        most: number of peers
        credits: by the run's ledger; None if it is not fetched
    """
    if credits is not None and credits.peers:
        peers = [Leader(found.peer, found.name, found.samples) for found in credits.peers[:most]]
        return Leaders(peers, credits.time, credits.num_findings, credits.trouble)
    given = sorted(history.peers.items(), key=lambda item: -item[1].samples)[:most]
    peers = [Leader(peer_id, peer.name, peer.samples) for peer_id, peer in given if peer.samples > 0]
    return Leaders(peers, trouble=credits.trouble if credits is not None else "")


def timeline_report(history: History, peers: PeersReport) -> TimelineReport:
    """The report of the last ten minutes of the first 30 peers.

    Args:
        peers: report of the peers, in the order in which they are shown
    """
    seen = history.timeline
    shown = [peer for peer in peers.peers if peer.peer_id in seen.strips][:MAX_STRIPS]
    return TimelineReport(
        time=peers.time,
        began_at=seen.cells[0] if seen.cells else None,
        cell_seconds=CELL_SECONDS,
        letters=WORDS,
        updates=[*seen.updates],
        strips=[Strip(peer_id=peer.peer_id, name=peer.name, states=seen.strips[peer.peer_id]) for peer in shown],
        rounds=[*seen.rounds],
        trying=seen.trying,
    )


def history_report(history: History, now: float) -> HistoryReport:
    """The report of the curves, the events and the tests.

    Args:
        now: seconds since 1970
    """
    return HistoryReport(time=now, points=[*history.points], events=[*history.events], tests=[*history.tests])


def _peer(peer_id: str, peer: PeerSeen, total_rate: float) -> PeerReport:
    profile = peer.profile or Profile()
    return PeerReport(
        peer_id=peer_id,
        name=peer.name,
        state=peer.state,
        phase=peer.phase,
        role="helper" if peer.helps else "client-mode" if peer.client_mode else "server-mode",
        reachable=not peer.client_mode,
        reached="not reachable" if peer.client_mode else profile.reached or "reachable",
        device=profile.device or None,
        version=profile.version or None,
        step=peer.step,
        samples_per_second=peer.rate,
        share=peer.rate / total_rate if peer.computes and total_rate > 0 else None,
        loss=peer.loss,
        accuracy=peer.accuracy,
        upload_bytes_per_second=profile.upload,
        sent_bytes=None if peer.profile is None else peer.sent,
        received_bytes=None if peer.profile is None else peer.received,
        joined_at=peer.joined,
        seen_at=peer.seen_at,
        claimed_samples=peer.samples,
    )
