"""Trains a recipe on a cluster: in one process, with DDP or with FSDP, started by torchrun."""
