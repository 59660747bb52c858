"""Ways to run a peer: notebooks, containers, service units. In any notebook: `from peers import join, preview`."""

from peers.notebook import CannotJoin, join, preview

__all__ = ["CannotJoin", "join", "preview"]
