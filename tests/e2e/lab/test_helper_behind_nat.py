"""Volunteers who are all at home behind a router train, because a helper with a public address trains nothing."""

from __future__ import annotations

import re

import pytest
import torch

from tests.helpers.cli import PACED, START_SECONDS, TINY, PeerProgram, reaping, summary_of
from tests.helpers.nat import INTERNET_IP, ROUTER_IP, home_behind_router, why_not

REASON = why_not()
pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(REASON is not None, reason=str(REASON))]

UPDATES = 12
VOLUNTEERS = ("ada", "ben", "cleo", "dan")


def test_four_volunteers_behind_a_router_and_a_helper_end_with_the_same_bits(tmp_path):
    """By invitation, as `swarm start` begins a run. That open peers hold the same bits is shown with forked ones."""
    with home_behind_router() as home, reaping() as programs:
        limits = ["--total-steps", str(UPDATES), "--validate-every-steps", str(UPDATES)]
        role = ["--role", "helper", "--desk-port", "0"]
        options = [*role, "--by-invitation", "--port", "31337", "--run-id", "nat", *limits, *TINY]
        helper = PeerProgram(tmp_path, "nat", "helper", *options, prefix=home.internet)
        programs.append(helper)
        line = helper.wait_until(lambda: re.search(r"swarm://\S+", helper.output), "it prints a join line")[0]
        helper.wait_until(lambda: helper.status.phase == "waiting for somebody who trains", "it waits")
        peers = [
            PeerProgram(
                tmp_path,
                "nat",
                name,
                *("--initial-peers", line, "--min-peers", "4"),
                prefix=home.home,
                **PACED,
            )
            for name in VOLUNTEERS
        ]
        programs += peers
        for peer in (*peers, helper):
            assert peer.wait(START_SECONDS) == 0, peer.output
    for peer in peers:
        assert f"outbound-only peer, because 0 of 1 peer could call this machine at {ROUTER_IP}" in peer.output
    assert INTERNET_IP in helper.output
    assert "The desk of run nat: http://" in helper.output, "it has ended with the helper, else a process were left"
    summaries = [summary_of(peer.folder) for peer in (helper, *peers)]
    assert [summary["outcome"] for summary in summaries] == ["completed"] * 5
    assert [summary["samples"] > 0 for summary in summaries] == [False, True, True, True, True]
    assert summaries[0]["max_num_peers"] == 5
    assert summaries[0]["updates"] == UPDATES
    saved, *others = [
        torch.load(peer.folder.checkpoints / "last.ckpt", weights_only=False) for peer in (helper, *peers)
    ]
    for other in others:
        assert other["global_step"] == saved["global_step"] == UPDATES
        weights = [key for key in saved["state_dict"] if key.startswith("model.")]
        assert weights
        assert all(torch.equal(saved["state_dict"][key], other["state_dict"][key]) for key in weights)
        torch.testing.assert_close(saved["optimizer_states"], other["optimizer_states"], rtol=0, atol=0)
