"""The data set `glyphs`: characters of many typefaces, drawn on the user's machine by `python -m recipe.glyphs`."""
