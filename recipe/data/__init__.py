"""Images: where they come from, which of them make a step, and how fast they are read."""
