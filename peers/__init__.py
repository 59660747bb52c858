"""Where volunteers run: notebooks, containers, service units."""
