"""A run that begins on a neutral node of the DHT: Hivemind's own program, which belongs to no run."""

import re
from functools import partial

import pytest

from swarm.membership import run_manifest
from tests.helpers.cli import START_SECONDS, TINY, PeerProgram, Program, reaping, summary_of

pytestmark = pytest.mark.timeout(300)

OWN = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
HASTY = "tests.helpers.programs.hasty_peer"


@pytest.fixture
def node(tmp_path):
    """Address of a stock `hivemind-dht`, which knows of no run before the test's."""
    with reaping() as programs:
        options, log = ["--host_maddrs", "/ip4/127.0.0.1/tcp/0"], tmp_path / "node.log"
        programs.append(stock := Program("hivemind.hivemind_cli.run_dht", options, log))
        found = stock.wait_until(lambda: re.search(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+", stock.output), "it listens")
        yield found.group()


def test_a_run_begins_on_a_neutral_node_if_it_is_named_and_goes_on_when_the_second_peer_has_used_up_its_traffic(
    node, tmp_path, refused, monkeypatch
):
    monkeypatch.setattr(run_manifest, "read_manifests", partial(run_manifest.read_manifests, timeout_seconds=3.0))
    for given in (["--recipe", "digits"], []):
        sentence = refused("--initial-peers", node, *OWN, *given)
        assert "The peers there know of no run" in sentence
        assert "--recipe NAME --run-id NAME --initial-peers ADDRESS starts a run there" in sentence
    with reaping() as programs:
        given = ["--recipe", "digits", "--run-id", "new", "--initial-peers", node, *OWN, *TINY, "--min-peers", "2"]
        programs.append(first := PeerProgram(tmp_path, "new", "first", *given, "--max-steps", "24", module=HASTY))
        first.wait_until(lambda: "No peer trains run new there yet: this peer starts it." in first.output, "it starts")
        first.wait_until(lambda: "Started run new as first" in first.output, "it says so")
        joining = ["--initial-peers", node, *OWN, "--max-traffic-gb", "0.0006"]  # a few rounds
        programs.append(second := PeerProgram(tmp_path, "new", "second", *joining))
        assert second.wait(START_SECONDS) == 0, second.output
        assert first.wait(START_SECONDS) == 0, first.output
        assert "Joining run new as second" in second.output
        assert summary_of(first.folder)["outcome"] == "completed"
        left = summary_of(second.folder)
        assert left["outcome"] == "traffic limit reached"
        assert 0 < left["updates"] < 24
        assert left["max_num_peers"] == 2
        assert 6e5 <= left["traffic_bytes"] < 1e7


def test_a_wrong_address_starts_nothing(refused):
    address = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    given = ["--recipe", "digits", "--run-id", "new", "--initial-peers", address]
    assert "None of these peers can be reached" in refused(*given)
