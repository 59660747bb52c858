"""Texts: how they are read, split into tokens and classified."""
