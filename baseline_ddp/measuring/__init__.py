"""Where the time of a step goes, and the pictures of it."""
