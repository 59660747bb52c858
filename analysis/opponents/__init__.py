"""The same recipe under other systems, as their own documents say, or tuned. Nothing here uses `swarm/`."""
