"""Data: images, the order in which a peer visits samples, and how fast samples are loaded."""
