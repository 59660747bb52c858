"""A run that a desk has seen, without a network."""

from __future__ import annotations

from pathlib import Path

from fastapi.testclient import TestClient

from swarm.desk.alerts import Alerts
from swarm.desk.app import build_app
from swarm.desk.desk import Desk
from swarm.desk.report import RunCard
from swarm.membership.progress_record import TRAINING, PeerProgress
from swarm.protocol.certificates import Certificate

CARD = RunCard(
    key="letters.abc",
    run_id="letters",
    model="vit",
    dataset="digits",
    total_steps=10_000,
    target_batch_size=64,
    by_invitation=False,
    join_line="/ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
)
BEGAN = 1_700_000_000.0


class SeenRun:
    """A desk whose clock and peers the test controls.

    Args:
        path: of its history
    """

    def __init__(self, path: Path, card: RunCard = CARD, urls: tuple[str, ...] = ()):
        self.now, self.path = BEGAN, path
        self.ending: list[Certificate] = []
        """Certificates of members that were not renewed."""
        self.alerts = Alerts(urls, clock=lambda: self.now)
        self.desk = Desk(card, path, self.alerts, still_minutes=10, clock=lambda: self.now)

    @property
    def history(self):
        return self.desk.history

    def look(self, *records: tuple[str, PeerProgress] | PeerProgress, after: float = 2.0) -> None:
        """Let the desk look again, so many seconds later; a record without a peer id uses its name as one."""
        self.now += after
        found = dict(item if isinstance(item, tuple) else (item.name, item) for item in records)
        self.desk.turn(found, ending=self.ending)

    def record(
        self, name: str, step: int, rate: float = 10.0, loss: float = 0.5, behind_seconds: float = 0.0, **more
    ) -> PeerProgress:
        """Return a record from right before the next look, by a clock that is so far behind the desk's."""
        fields = {"client_mode": False, "phase": TRAINING, "loss": loss} | more
        return PeerProgress(name, step, 8, rate, BEGAN - 60, self.now + 1 - behind_seconds, **fields)

    def train(self, *names: str, steps: range, seconds: float = 2.0, **more) -> None:
        """Let these peers make updates, all alike."""
        for step in steps:
            self.now += seconds - 2
            self.look(*(self.record(name, step, **more) for name in names))

    @property
    def events(self) -> list[str]:
        return [event.text for event in self.history.events]

    @property
    def web(self) -> TestClient:
        return TestClient(build_app(lambda: self.desk.newest))
