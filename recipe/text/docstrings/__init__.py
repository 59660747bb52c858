"""The data set `docstrings`: which of four Python libraries a docstring is from."""
