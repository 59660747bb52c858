"""Measures where the time of a step goes, and draws it."""
