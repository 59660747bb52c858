"""What a notebook says of a peer that has ended, without a swarm."""

import sys

import pytest

from peers.notebook import CannotJoin, join

PEER = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_a_peer_that_leaves_no_summary(tmp_path, monkeypatch):
    """As on a full disk."""
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(CannotJoin, match=r"could not write its summary: is the disk full\? See .*ada\.log"):
        join(PEER, public_name="ada", output_dir=tmp_path)
