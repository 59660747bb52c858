"""How a cluster trains the recipe: one process, DDP or FSDP, started by torchrun."""
