"""A volunteer at home: found to be client-mode behind a router, and reachable if the router maps a port."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.cli import PACED, TINY, PeerProgram, Program, reaping
from tests.helpers.homes.nat import INTERNET_IP, ROUTER_IP, Home, home_behind_router, why_not

REASON = why_not()
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(REASON is not None, reason=str(REASON))]

PORT = 31337


@dataclass
class Internet:
    """Two server-mode peers that train without end, and a home behind a router."""

    home: Home
    output_dir: Path
    programs: list[Program]
    address: str

    def volunteer(self, name: str, *options: str) -> PeerProgram:
        arguments = ["--initial-peers", self.address, *options]
        peer = PeerProgram(self.output_dir, "nat", name, *arguments, prefix=self.home.home)
        self.programs.append(peer)
        return peer


@pytest.fixture(scope="module")
def internet(tmp_path_factory) -> Iterator[Internet]:
    output_dir = tmp_path_factory.mktemp("nat")
    with home_behind_router() as home, reaping() as programs:
        options = ["--run-id", "nat", "--total-steps", "100000", "--validate-every-steps", "100000", *TINY]
        first = PeerProgram(output_dir, "nat", "first", *options, prefix=home.internet, **PACED)
        programs.append(first)
        first.wait_until(lambda: first.status.addresses, "it listens")
        address = next(address for address in first.status.addresses if INTERNET_IP in address)
        second = PeerProgram(output_dir, "nat", "second", "--initial-peers", address, prefix=home.internet, **PACED)
        programs.append(second)
        second.wait_for_contribution()
        yield Internet(home, output_dir, programs, address)


def test_behind_a_router_it_is_outbound_only_and_contributes_next_to_two_full_peers(internet):
    peer = internet.volunteer("at-home")
    status = peer.wait_for_contribution(updates=3)
    assert f"client-mode peer, because 0 of 1 peer could call this machine at {ROUTER_IP}" in peer.output
    assert not status.addresses
    assert "To connect other peers" not in peer.output
    peer.wait_until(lambda: peer.status.num_peers == 3, "all three are in one update")
    peer.interrupt()
    assert peer.wait(60) == 0, peer.output


def test_with_a_mapped_port_it_is_a_full_peer(internet):
    internet.home.forward(PORT)
    peer = internet.volunteer("mapped", "--port", str(PORT))
    status = peer.wait_for_contribution(updates=3)
    assert f"server-mode peer, because 1 peer could call this machine at {ROUTER_IP} port {PORT}" in peer.output
    assert any(address.startswith(f"/ip4/{ROUTER_IP}/tcp/{PORT}/") for address in status.addresses)
    peer.interrupt()
    assert peer.wait(60) == 0, peer.output
