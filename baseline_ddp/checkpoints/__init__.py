"""The last and the best state of a DDP run, on disk."""
