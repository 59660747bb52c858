"""What is trained: config, presets, data, model, optimizer, metrics, run folder.

It knows nothing of how the training is distributed.
"""
