"""What is trained: config, presets, data, model, optimizer, metrics, run folder. Knows nothing of how it is distributed."""
