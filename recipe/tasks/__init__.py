"""Tasks that can be learned: each is a model, data and metrics behind one interface."""
