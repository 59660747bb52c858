"""A model of the time that a round of a swarm takes, fitted on measured cells and tested on others.

A round has three parts after computing. Matchmaking and the fixed part of the exchange are linear in the round-trip
time. Bytes travel at the slowest link's rate, after TCP's window has doubled up to that rate (slow start):

    meeting  = a + b RTT
    exchange = c + d RTT + transfer(bytes, rate) + slow start

`simulate` makes such rounds with peers that differ in speed, leave and come back, as a simulation of events.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import simpy

from analysis.reporting.results import transfer_seconds

INITIAL_WINDOW_BYTES = 10 * 1448
"""TCP's initial window in bytes (RFC 6928)."""


@dataclass(frozen=True)
class Swarm:
    """The swarm to model: its peers, its update, and its links."""

    peers: int
    samples_per_update: float
    samples_per_second: float
    """Speed of one peer that only computes."""
    micro_batch: int
    payload_bytes: float
    """Bytes of a gradient vector on the network."""
    rtt_ms: float
    up_mbps: float | None
    down_mbps: float | None = None
    overlaps: bool = False
    spread: float = 0.0
    """Standard deviation of the peers' speeds, as a share of the mean."""
    lifetime_seconds: float = math.inf
    """Mean time that a peer stays; another one takes its place `rejoin_seconds` later."""
    rejoin_seconds: float = 60.0

    @property
    def slowest_mbps(self) -> float | None:
        """The slower rate of the two directions; None if both are unlimited."""
        rates = [rate for rate in (self.up_mbps, self.down_mbps) if rate]
        return min(rates) if rates else None


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round that bytes do not explain, fitted on measured rounds."""

    meeting: float = 0.0
    meeting_rtts: float = 1.0
    exchange: float = 0.0
    exchange_rtts: float = 1.0
    other: float = 0.0
    """Time between two rounds that is neither computing nor communication."""

    def meeting_seconds(self, rtt_ms: float) -> float:
        """Seconds of matchmaking in a group of more than one peer."""
        return self.meeting + self.meeting_rtts * rtt_ms / 1e3

    def exchange_seconds(self, swarm: Swarm, peers: int) -> float:
        """Seconds from a closed group to a complete average."""
        if peers < 2:
            return 0.0
        wire = wire_seconds(swarm, peers)
        return self.exchange + self.exchange_rtts * swarm.rtt_ms / 1e3 + wire

    def communication_seconds(self, swarm: Swarm, peers: int) -> float:
        """Seconds of meeting and exchange, at least 0, because a fitted line may fall below zero at its end."""
        meeting = self.meeting_seconds(swarm.rtt_ms) if peers > 1 else 0.0
        return max(0.0, meeting + self.exchange_seconds(swarm, peers))


def wire_seconds(swarm: Swarm, peers: int) -> float:
    """Seconds for the bytes over the slowest link, and for the round trips until TCP's window fills that link."""
    rate = swarm.slowest_mbps
    if not rate or peers < 2:
        return 0.0
    window = rate * 1e6 / 8 * swarm.rtt_ms / 1e3  # bandwidth-delay product
    message = min(swarm.payload_bytes / peers, window)
    doublings = max(0.0, math.log2(message / INITIAL_WINDOW_BYTES)) if message > 0 else 0.0
    # Each doubling takes a round trip, a part of which the growing window already uses.
    return transfer_seconds(swarm.payload_bytes, peers, rate) + max(0.0, doublings - 1) * swarm.rtt_ms / 1e3


@dataclass(frozen=True)
class Measured:
    """Means of a measured setting, in seconds per update."""

    swarm: Swarm
    meeting: float
    exchange: float
    other: float
    samples_per_second: float


def fit(cells: Sequence[Measured]) -> RoundCosts:
    """Fit the costs by least squares on cells of more than one peer.

    A slope needs two round-trip times; with only one, it is taken to be one round trip.
    """
    rtts = np.array([cell.swarm.rtt_ms / 1e3 for cell in cells])
    meeting = _line(rtts, np.array([cell.meeting for cell in cells]))
    wire = np.array([wire_seconds(cell.swarm, cell.swarm.peers) for cell in cells])
    exchange = _line(rtts, np.array([cell.exchange for cell in cells]) - wire)
    return RoundCosts(*meeting, *exchange, float(np.mean([cell.other for cell in cells])))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope of a fitted line."""
    if len(set(x.tolist())) < 2:
        return float(np.mean(y - x)), 1.0
    slope, intercept = np.polyfit(x, y, 1)
    return float(intercept), float(slope)


def simulate(swarm: Swarm, costs: RoundCosts, updates: int = 20) -> float:
    """Samples per second of the simulated swarm over `updates` global updates, after a first one that is left out."""
    world = _World(swarm, costs, random.Random(0))
    return world.run(updates + 1)


class _World:
    """The simulation: peers that compute micro-batches, and rounds between them."""

    def __init__(self, swarm: Swarm, costs: RoundCosts, chance: random.Random) -> None:
        self.swarm, self.costs, self.chance = swarm, costs, chance
        self.environment = simpy.Environment()
        self.samples = 0.0
        self.present = swarm.peers
        self.computing = 0
        self.wanted = self.environment.event()  # the update has its samples
        self.idle = self.environment.event()  # and no peer is within a micro-batch
        self.released = self.environment.event()

    def run(self, updates: int) -> float:
        bell = NormalDist()
        for number in range(self.swarm.peers):  # evenly spaced quantiles: the mean is 1 for any number of peers
            deviation = bell.inv_cdf((number + 0.5) / self.swarm.peers)
            self.environment.process(self._peer(max(0.2, 1.0 + self.swarm.spread * deviation)))
        finished = self.environment.process(self._rounds(updates))
        return self.environment.run(finished)

    def _peer(self, speed: float):
        environment = self.environment
        leaves_at = self._lifetime()
        while True:
            if environment.now >= leaves_at and self.present > 1:
                self.present -= 1
                yield environment.timeout(self.swarm.rejoin_seconds)
                self.present += 1
                leaves_at = environment.now + self._lifetime()
            if self.wanted.triggered:
                yield self.released
                continue
            self.computing += 1
            yield environment.timeout(self.swarm.micro_batch / (self.swarm.samples_per_second * speed))
            self.computing -= 1
            self.samples += self.swarm.micro_batch
            if self.samples >= self.swarm.samples_per_update and not self.wanted.triggered:
                self.wanted.succeed()
            if self.wanted.triggered and not self.computing and not self.idle.triggered:
                self.idle.succeed()

    def _lifetime(self) -> float:
        lifetime = self.swarm.lifetime_seconds
        return math.inf if math.isinf(lifetime) else self.chance.expovariate(1 / lifetime)

    def _rounds(self, updates: int):
        environment, total, began = self.environment, 0.0, 0.0
        busy_until = 0.0
        for update in range(updates):
            yield self.wanted
            if not self.swarm.overlaps and not self.idle.triggered and self.computing:
                yield self.idle
            members, samples, self.samples = self.present, self.samples, 0.0
            communication = self.costs.communication_seconds(self.swarm, members)
            if self.swarm.overlaps:
                yield environment.timeout(max(0.0, busy_until - environment.now) + self.costs.other)
                busy_until = environment.now + communication
            else:
                yield environment.timeout(communication + self.costs.other)
            self.wanted, self.idle = environment.event(), environment.event()
            released, self.released = self.released, environment.event()
            released.succeed()
            if update == 0:
                began = environment.now
            else:
                total += samples
        return total / (environment.now - began)
