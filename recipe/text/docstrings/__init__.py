"""The data set `docstrings`: the task is to tell from which of four Python libraries a docstring is."""
