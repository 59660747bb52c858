"""Faults of a soak: each breaks something, waits in `yield` for some seconds, and repairs it."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator

from analysis.endurance.soak_result import Event
from analysis.endurance.volunteers import Volunteer
from analysis.wan.lab import Lab


class Faults:
    """Faults that happen to volunteers in a lab. A subclass sets the attributes, and appends an event before each
    fault."""

    lab: Lab
    random: random.Random
    volunteers: list[Volunteer]
    events: list[Event]

    def faults(self) -> list[Callable[[], Iterator[float]]]:
        """All faults. `part_killed` is listed twice, because a peer has three parts."""
        return [
            *(self.killed, self.first_peer_killed, self.part_killed, self.part_killed, self.frozen),
            *(self.first_peer_frozen, self.link_down, self.link_slow, self.network_divided),
            *(self.disk_full, self.terminal_closed, self.all_but_one_killed, self.all_killed),
        ]

    def killed(self) -> Iterator[float]:
        """Kill -9 one peer; it starts again, as systemd would start it."""
        yield from self._kill([self._victim()])

    def first_peer_killed(self) -> Iterator[float]:
        """Kill -9 the peer that was started first; it leads, if it was never away since."""
        yield from self._kill([self._first()])

    def all_but_one_killed(self) -> Iterator[float]:
        """Kill -9 all peers but one, which trains on."""
        yield from self._kill(self.random.sample(self.volunteers, len(self.volunteers) - 1))

    def all_killed(self) -> Iterator[float]:
        """Kill -9 all peers, as a power cut everywhere: the swarm goes on from its checkpoints."""
        yield from self._kill(self.volunteers)

    def _kill(self, victims: list[Volunteer]) -> Iterator[float]:
        self.events[-1].victims = [peer.name for peer in victims]
        for peer in victims:
            peer.kill()
        yield 3.0
        for peer in victims:
            self._revive(peer)

    def _revive(self, peer: Volunteer) -> None:
        peer.start(self._address())

    def terminal_closed(self) -> Iterator[float]:
        """Send SIGHUP to one peer; it starts again, as systemd would start it."""
        self._victim().close_terminal()
        yield 0.0

    def disk_full(self) -> Iterator[float]:
        """Limit the size of one peer's files, as on a full disk. If the peer ends by that, it counts as another
        fault."""
        peer = self._victim()
        was_running = peer.is_running
        peer.limit_files(full=True)
        yield 15.0
        peer.limit_files(full=False)
        if was_running and not peer.is_running:
            self.events[-1].fault += ", of which the peer died"

    def part_killed(self) -> Iterator[float]:
        """Kill one process of a peer; the peer has to notice."""
        peer = self._victim()
        part = self.random.choice(("p2pd", "the DHT process", "the averaging process"))
        self.events[-1].fault = f"{part} killed"
        peer.kill_part(part)
        yield 0.0

    def frozen(self) -> Iterator[float]:
        """Stop one peer with SIGSTOP, as a closed laptop does."""
        yield from self._freeze(self._victim())

    def first_peer_frozen(self) -> Iterator[float]:
        """Stop the peer that was started first, with SIGSTOP."""
        yield from self._freeze(self._first())

    def _freeze(self, peer: Volunteer) -> Iterator[float]:
        self.events[-1].victims = [peer.name]
        peer.send(signal.SIGSTOP)
        yield 15.0
        peer.send(signal.SIGCONT)

    def link_down(self) -> Iterator[float]:
        """Cut one peer off: no packet gets through, and no connection is closed."""
        peer = self._victim()
        others = [other.host for other in self.volunteers if other != peer]
        self.lab.divide([peer.host], others)
        yield 15.0
        self.lab.reunite([peer.host], others)

    def link_slow(self) -> Iterator[float]:
        """Limit one peer's link to 0.2 Mbit/s in both directions."""
        peer = self._victim()
        self.lab.slow_down(peer.host, 0.2)
        yield 15.0
        self.lab.speed_up(peer.host)

    def network_divided(self) -> Iterator[float]:
        """Divide the network into two halves that do not reach each other."""
        hosts = [peer.host for peer in self.volunteers]
        self.random.shuffle(hosts)
        one, other = hosts[: len(hosts) // 2], hosts[len(hosts) // 2 :]
        self.events[-1].victims = [host.name for host in one]
        self.lab.divide(one, other)
        yield 25.0
        self.lab.reunite(one, other)

    def _first(self) -> Volunteer:
        return min(self.volunteers, key=lambda peer: peer.started)

    def _victim(self) -> Volunteer:
        running = [peer for peer in self.volunteers if peer.is_running]
        peer = self.random.choice(running or self.volunteers)
        self.events[-1].victims = [peer.name]
        return peer

    def _address(self) -> str | None:
        """Address of a running peer; None if there is none. Without it, a starting peer uses the addresses that it
        remembers."""
        alive = [peer.address for peer in self.volunteers if peer.is_running and peer.address]
        return alive[0] if alive else None
