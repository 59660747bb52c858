"""What can be learned: each task is a model, data and metrics behind one interface."""
