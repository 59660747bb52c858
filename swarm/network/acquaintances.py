"""Peers that this peer has dealt with. Names cost a stranger nothing, so only peers that took part are noted here."""

from __future__ import annotations

from collections.abc import Iterable

from hivemind.p2p import PeerID

MAX_ACQUAINTANCES = 4096


class Acquaintances:
    """Peers that a person named, that were in a group with this peer, or that showed a certificate of its run.

    Of more than `MAX_ACQUAINTANCES`, the latest are kept.
    """

    def __init__(self) -> None:
        self._peers: dict[PeerID, None] = {}

    def add(self, peers: Iterable[PeerID]) -> list[PeerID]:
        """Note these peers as the latest; return those that were not known before."""
        new = []
        for peer in peers:
            if peer in self._peers:
                del self._peers[peer]
            else:
                new.append(peer)
            self._peers[peer] = None
        while len(self._peers) > MAX_ACQUAINTANCES:
            del self._peers[next(iter(self._peers))]
        return new

    def drop(self, peers: Iterable[PeerID]) -> None:
        """Forget these peers: they are strangers from now on."""
        for peer in peers:
            self._peers.pop(peer, None)

    @property
    def peers(self) -> tuple[PeerID, ...]:
        """All noted peers, the latest last."""
        return tuple(self._peers)

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def __len__(self) -> int:
        return len(self._peers)
