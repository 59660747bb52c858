"""Everything about what is trained: config, presets, data, model, optimizer, metrics, run folder.

This package does not depend on how the training is distributed.
"""
