"""How a cluster trains the same recipe with DDP or FSDP."""
