"""A peer whose line is metered for a while: it leaves, waits without a swarm, and comes back as the same peer."""

import os

import pytest

from tests.helpers.cli import PACED, START_SECONDS, TINY, PeerProgram, reaping, summary_of

pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
def test_it_waits_while_its_line_is_metered_and_goes_on_where_it_was(tmp_path):
    says, program = tmp_path / "says", tmp_path / "busctl"
    program.write_text(f'#!/bin/sh\ncat "{says}"\n')
    program.chmod(0o755)
    says.write_text("u 1\n")
    given = ["--recipe", "digits", "--run-id", "home", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", *TINY]
    given += ["--pause-on-metered", "--checkpoint-every-steps", "1000"]
    with reaping() as programs:
        path = f"{tmp_path}:{os.environ['PATH']}"
        programs.append(peer := PeerProgram(tmp_path, "home", "ada", *given, PATH=path, **PACED))
        waits = "This machine's line is metered: this peer is paused until that changes. Ctrl-C ends it."
        peer.wait_until(lambda: waits in peer.output, "it waits before it has begun")
        assert "Starting" not in peer.output
        says.write_text("u 2\n")
        peer.wait_until(lambda: peer.status.step >= 3, "it trains")
        says.write_text("u 3\n")
        peer.wait_until(lambda: peer.output.count(waits) == 2, "it leaves and waits")
        left = summary_of(peer.folder)
        assert left["outcome"] == "paused"
        says.write_text("u 4\n")
        peer.wait_until(lambda: peer.status.step > left["updates"] + 1, "it goes on")
        assert f"Going on from step {left['updates']}" in peer.output
        peer.interrupt()
        assert peer.wait(START_SECONDS) == 0, peer.output
        assert summary_of(peer.folder)["outcome"] == "interrupted"
