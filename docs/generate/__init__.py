"""What writes the reference pages, one module for each kind of page."""
