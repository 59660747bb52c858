"""What adding up ledgers costs beside a page of 1,000 peers: `python -m swarm.desk.ledger.benchmark [UPDATES]`."""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil

from recipe.interrupts import status_of
from swarm.desk.alerts import Alerts
from swarm.desk.desk import Desk, open_socket, page_url, served
from swarm.desk.ledger.bookkeeper import Bookkeeper
from swarm.desk.ledger.credits import Credits
from swarm.desk.report import RunCard
from swarm.ledger.benchmark import RUN, measure
from swarm.ledger.collector import Collected
from swarm.membership.progress_record import TRAINING, PeerProgress

NUM_PEERS, NUM_LEDGERS = 1000, 3
LOOK_SECONDS = 0.5


class BusyDesk:
    """A desk that sees many peers; it measures how long a visitor waits for the page.

    Args:
        folder: for the history
        credits: by the ledger
    """

    def __init__(self, folder: Path, credits: Credits):
        card = RunCard(RUN, "benchmark", "vit", "digits", 10**6, 64, by_invitation=False, join_line="ADDRESS")
        self.desk, self._step = Desk(card, folder / "desk.json", Alerts([]), 10, credits), 0
        self.refreshes: list[float] = []
        self.most_bytes = 0
        """Most memory of the process that adds up (PSS): memory shared with other processes is divided among them."""

    def turn(self, url: str) -> None:
        """Let all peers make an update, and load the page once.

        Args:
            url: of the page
        """
        self._step, now = self._step + 1, time.time()
        record = PeerProgress("peer", self._step, 8, 10.0, now - 9, now, False, TRAINING, 0.5)
        self.desk.turn({f"id-{number}": record for number in range(NUM_PEERS)})
        began = time.perf_counter()
        with urllib.request.urlopen(f"{url}/live", timeout=60) as answer:
            answer.read()
        self.refreshes.append(time.perf_counter() - began)
        for child in psutil.Process().children():
            try:
                self.most_bytes = max(self.most_bytes, child.memory_full_info().pss)
            except psutil.Error:  # it has just ended
                pass
        time.sleep(LOOK_SECONDS)


def main() -> None:
    """Measures, and prints the result."""
    num_updates = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as path:
        ledgers = Path(path) / RUN
        ledgers.mkdir()
        measure(NUM_LEDGERS, num_updates, ledgers)
        size = sum(file.stat().st_size for file in ledgers.iterdir())
        credits = Credits(ledgers.with_name(f"{RUN}.credits.json"), RUN)
        books, busy = Bookkeeper(lambda: Collected(0, (), {}), ledgers, credits), BusyDesk(Path(path), credits)
        listener = open_socket("127.0.0.1", 0)
        with served(lambda: busy.desk.newest, listener):
            busy.turn(page_url(listener))
            busy.refreshes.clear()
            adding, began = threading.Thread(target=books.turn), time.perf_counter()
            adding.start()
            while adding.is_alive():
                busy.turn(page_url(listener))
            seconds = time.perf_counter() - began
    times = [1000 * seconds for seconds in busy.refreshes]
    print(
        f"{size / 2**20:,.0f} MiB in {NUM_LEDGERS} ledgers are added up in {seconds:.0f} s, by a process of "
        f"{busy.most_bytes / 2**20:,.0f} MiB. Meanwhile a page of {NUM_PEERS:,} peers takes "
        f"{statistics.median(times):.0f} ms (at most {max(times):.0f}, n = {len(times)})."
    )


if __name__ == "__main__":
    sys.exit(status_of(main))
