"""A joiner gets into a swarm that makes an update several times a second, and stays in it."""

import json

import pytest

from tests.helpers.cli import PACED, TINY, PeerProgram, reaping

pytestmark = pytest.mark.timeout(200)


def averaged(peer: PeerProgram) -> list[dict]:
    """Rounds that it made with others, and gave samples to."""
    rounds = [json.loads(line) for line in peer.folder.rounds.read_text().splitlines()]
    return [found for found in rounds if found["outcome"] == "averaged" and found["own_samples"] > 0]


def test_a_joiner_contributes_to_a_swarm_of_short_updates(tmp_path):
    with reaping() as programs:
        options = ["--run-id", "fast", "--total-steps", "100000", "--validate-every-steps", "100000", *TINY]
        first = PeerProgram(tmp_path, "fast", "first", *options, **PACED)
        programs.append(first)
        first.wait_until(lambda: first.status.step >= 20, "it makes updates alone")
        joiner = PeerProgram(tmp_path, "fast", "joiner", "--initial-peers", first.address)
        programs.append(joiner)
        joiner.wait_for_contribution(updates=5)
        met = averaged(joiner)
        assert len(met) >= 3
        steps = [found["step"] for found in met]
        # It is in most rounds from its first one on: it does not make up for updates all the time.
        assert len(steps) >= (steps[-1] - steps[0]) / 3
        for peer in (joiner, first):
            peer.interrupt()
            assert peer.wait(60) == 0, peer.output
