"""Trains the same recipe with other systems, as their documents say, or tuned. Nothing here uses `swarm/`."""
