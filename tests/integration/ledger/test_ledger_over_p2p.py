"""Ledgers travel over real p2pd, also that of a peer that cannot be called."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from hivemind.p2p import P2P

from swarm.ledger.calls import caller_of
from swarm.ledger.collector import FetchLedgers
from swarm.ledger.ledger import Ledger
from swarm.ledger.server import LedgerServer
from swarm.membership.run_manifest import PROTOCOL
from swarm.network.hivemind_patches import repair_hivemind
from swarm.network.peer_service import PeerService
from swarm.network.signed_records import OwnedRecords, prepare_identity, read_key
from swarm.network.stream_limits import limits_of
from tests.helpers.ledgers.ledger_run import RUN

pytestmark = pytest.mark.timeout(60)


async def nothing(*_):
    yield


class Node:
    """A peer without its training.

    Args:
        folder: where its identity and its ledger are
        name: of both
    """

    def __init__(self, folder: Path, name: str):
        self.key, self.ledger = folder / f"{name}.key", folder / f"{name}.jsonl"
        self.peer_id = prepare_identity(self.key)
        Ledger(self.ledger, RUN, PROTOCOL, OwnedRecords(read_key(self.key)), name).begin()

    async def start(self, initial_peers=(), **options) -> P2P:
        """Answer as a server-mode peer does, or as a client-mode peer with `no_listen`."""
        p2p = await P2P.create(initial_peers=initial_peers, identity_path=str(self.key), **options)
        server = LedgerServer(
            self.ledger, limits_of(p2p).knows, lambda peer, request: caller_of(p2p, peer, RUN)(request)
        )
        service = PeerService(RUN, nothing, nothing, nothing, server.rpc_download_ledger, nothing)
        await (service.answer_downloads if options.get("no_listen") else service.answer)(p2p)
        return p2p


def test_a_ledger_comes_from_the_peer_or_from_one_that_can_call_it(tmp_path):
    repair_hivemind()
    full, shy = Node(tmp_path, "full"), Node(tmp_path, "shy")
    fetched = tmp_path / "fetched"
    fetched.mkdir()

    async def run():
        there = await full.start(host_maddrs=["/ip4/127.0.0.1/tcp/0"], dht_mode="server")
        addresses = await there.get_visible_maddrs()
        behind = await shy.start(addresses, host_maddrs=None, no_listen=True)
        here = await P2P.create(host_maddrs=None, no_listen=True, initial_peers=addresses)
        try:
            limits_of(there).met([shy.peer_id])  # they have been in a group
            asked = {full.peer_id: [full.peer_id], shy.peer_id: [full.peer_id]}
            return await FetchLedgers(RUN, asked, fetched, 2**20)(
                None, SimpleNamespace(protocol=SimpleNamespace(p2p=here))
            )
        finally:
            for p2p in (here, behind, there):
                await p2p.shutdown()

    num_bytes, problems = asyncio.run(asyncio.wait_for(run(), 50))
    assert problems == {full.peer_id: "", shy.peer_id: ""}
    for node in (full, shy):
        (path,) = fetched.glob(f"{node.peer_id.to_base58()}-*.jsonl")
        assert path.read_bytes() == node.ledger.read_bytes()
    assert num_bytes == {node.peer_id: node.ledger.stat().st_size for node in (full, shy)}
