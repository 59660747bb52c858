"""Peers that this one has dealt with: a stranger can have as many names as it likes, these have done something."""

from __future__ import annotations

from collections.abc import Iterable

from hivemind.p2p import PeerID

MAX_ACQUAINTANCES = 4096


class Acquaintances:
    """Who was given by a person, or has been in a group with this peer; of more than 4,096, the latest."""

    def __init__(self) -> None:
        self._peers: dict[PeerID, None] = {}

    def add(self, peers: Iterable[PeerID]) -> list[PeerID]:
        """Note them; returns those that were not known before."""
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
        """These are strangers from now on."""
        for peer in peers:
            self._peers.pop(peer, None)

    @property
    def peers(self) -> tuple[PeerID, ...]:
        """All of them, the latest last."""
        return tuple(self._peers)

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    def __len__(self) -> int:
        return len(self._peers)
