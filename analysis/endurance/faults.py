"""What goes wrong in a night: each fault breaks something, waits in `yield` for some seconds, and mends it."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator

from analysis.endurance.soak_result import Event
from analysis.endurance.volunteers import Volunteer
from analysis.wan.lab import Lab


class Faults:
    """Happens to volunteers in a lab; a subclass sets the attributes, and appends the event before each fault."""

    lab: Lab
    random: random.Random
    volunteers: list[Volunteer]
    events: list[Event]

    def faults(self) -> list[Callable[[], Iterator[float]]]:
        """All of them; parts of a peer die twice as often as anything else, because there are three."""
        return [
            *(self.killed, self.first_peer_killed, self.part_killed, self.part_killed, self.frozen),
            *(self.first_peer_frozen, self.link_down, self.link_slow, self.network_divided),
            *(self.disk_full, self.terminal_closed, self.all_but_one_killed, self.all_killed),
        ]

    def killed(self) -> Iterator[float]:
        """kill -9 of one peer, which starts again as systemd would start it."""
        yield from self._kill([self._victim()])

    def first_peer_killed(self) -> Iterator[float]:
        """kill -9 of the one that was started first; if it has not been away since, it leads."""
        yield from self._kill([self._first()])

    def all_but_one_killed(self) -> Iterator[float]:
        """The last one trains on."""
        yield from self._kill(self.random.sample(self.volunteers, len(self.volunteers) - 1))

    def all_killed(self) -> Iterator[float]:
        """A power cut everywhere: the swarm goes on from its checkpoints."""
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
        """SIGHUP of one peer, which starts again as systemd would start it."""
        self._victim().close_terminal()
        yield 0.0

    def disk_full(self) -> Iterator[float]:
        """One peer cannot write more to any file than a little; if it ends by that, it is another fault."""
        peer = self._victim()
        was_running = peer.is_running
        peer.limit_files(full=True)
        yield 15.0
        peer.limit_files(full=False)
        if was_running and not peer.is_running:
            self.events[-1].fault += ", of which the peer died"

    def part_killed(self) -> Iterator[float]:
        """One of its processes dies alone; the peer has to notice."""
        peer = self._victim()
        part = self.random.choice(("p2pd", "the DHT process", "the averaging process"))
        self.events[-1].fault = f"{part} killed"
        peer.kill_part(part)
        yield 0.0

    def frozen(self) -> Iterator[float]:
        """SIGSTOP, as on a laptop that is closed."""
        yield from self._freeze(self._victim())

    def first_peer_frozen(self) -> Iterator[float]:
        """SIGSTOP of the one that was started first."""
        yield from self._freeze(self._first())

    def _freeze(self, peer: Volunteer) -> Iterator[float]:
        self.events[-1].victims = [peer.name]
        peer.send(signal.SIGSTOP)
        yield 15.0
        peer.send(signal.SIGCONT)

    def link_down(self) -> Iterator[float]:
        """Nothing gets through, and nobody is told."""
        peer = self._victim()
        others = [other.host for other in self.volunteers if other != peer]
        self.lab.divide([peer.host], others)
        yield 15.0
        self.lab.reunite([peer.host], others)

    def link_slow(self) -> Iterator[float]:
        """0.2 Mbit/s in both directions."""
        peer = self._victim()
        self.lab.slow_down(peer.host, 0.2)
        yield 15.0
        self.lab.speed_up(peer.host)

    def network_divided(self) -> Iterator[float]:
        """Two halves that do not see each other."""
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
        """Of anyone who can be asked; who starts without goes by what it remembers."""
        alive = [peer.address for peer in self.volunteers if peer.is_running and peer.address]
        return alive[0] if alive else None
