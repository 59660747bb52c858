"""The peers that a newcomer asks to call it, without a network."""

from unittest.mock import AsyncMock

import pytest
from hivemind.p2p import P2P

from swarm.network.reachability import Called, ReachabilityService, measure_reachability
from tests.helpers.programs.ports import free_port

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.parametrize("host", ["xn--bcher-kva.example", "peer.example.org.", "peer.example.org"])
def test_peers_behind_any_name_are_asked(monkeypatch, host):
    """Hivemind cannot parse the addresses with the first two hosts, but p2pd calls them all the same."""
    asked = []

    def stub_of(_p2p, peer_id):
        asked.append(peer_id.to_base58())
        return AsyncMock(rpc_call_back=AsyncMock(return_value=Called("203.0.113.5", True)))

    monkeypatch.setattr(P2P, "create", AsyncMock())
    monkeypatch.setattr(ReachabilityService, "get_stub", stub_of)
    assert measure_reachability([f"/dns4/{host}/tcp/31337/p2p/{PEER}"], free_port()).mode == "server-mode"
    assert asked == [PEER]
