"""The last and the best checkpoint of a DDP run, on disk."""
