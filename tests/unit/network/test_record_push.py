"""A list is handed out until somebody has taken it."""

from concurrent.futures import Future

from swarm.network import record_push
from swarm.network.record_push import push_until_taken


class Dht:
    """Its peers take a list at the last of so many attempts."""

    owner = b"owner"

    def __init__(self, attempts: int):
        self.attempts, self.made = attempts, 0

    def run_coroutine(self, _push, return_future: bool) -> Future:
        self.made += 1
        taken: Future = Future()
        taken.set_result(int(self.made >= self.attempts))
        return taken


def test_a_list_that_nobody_takes_is_handed_out_again(monkeypatch):
    monkeypatch.setattr(record_push, "AGAIN_SECONDS", 0.01)
    patient, hopeless, alone = Dht(3), Dht(10**9), Dht(10**9)
    assert push_until_taken(patient, "run", "removed", b"signed", ["ada"], 10) == 1
    assert patient.made == 3
    assert push_until_taken(hopeless, "run", "removed", b"signed", ["ada"], 0.2) == 0
    assert hopeless.made > 3
    assert push_until_taken(alone, "run", "removed", b"signed", [], 10) == 0
    assert alone.made == 1, "nobody is there to take it"
