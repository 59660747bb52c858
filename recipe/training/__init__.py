"""A Lightning Trainer for a recipe: task, callbacks, loggers, checkpoints."""
