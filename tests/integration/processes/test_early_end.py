"""What remains of a peer that leaves before it has the swarm's weights."""

import pytest

from tests.helpers.cli import LEAVE_SECONDS, PACED, START_SECONDS, TINY, PeerProgram, reaping, summary_of

pytestmark = pytest.mark.timeout(300)

SILENT = "tests.helpers.programs.silent_donor"


@pytest.fixture(scope="module")
def left_early(tmp_path_factory):
    """A peer that its time limit has ended, while the only donor sends nothing."""
    output_dir = tmp_path_factory.mktemp("early")
    options = ["--run-id", "early", "--total-steps", "100000", "--validate-every-steps", "100000", *TINY]
    with reaping() as programs:
        donor = PeerProgram(output_dir, "early", "donor", *options, module=SILENT, **PACED)
        programs.append(donor)
        donor.wait_until(lambda: donor.status.step >= 2, "it has a state to hand over")
        limit = ["--initial-peers", donor.address, "--max-time", "00:00:25"]
        peer = PeerProgram(output_dir, "early", "hasty", *limit)
        programs.append(peer)
        assert peer.wait(START_SECONDS + LEAVE_SECONDS) == 0, peer.output
        yield peer


def test_a_peer_that_waits_for_a_state_leaves_when_its_time_is_up(left_early):
    summary = summary_of(left_early.folder)
    assert (summary["outcome"], summary["steps"], summary["samples"]) == ("time is up", 0, 0), left_early.output
    if sum(summary["start_seconds"].values()) > 24:
        pytest.skip("this machine is so busy that its time was up before it asked for a state")


def test_a_peer_without_the_swarms_weights_keeps_none(left_early):
    assert not list(left_early.folder.checkpoints.glob("*.ckpt"))
    assert "Weights: none yet" in left_early.output
    assert "To use:" not in left_early.output
