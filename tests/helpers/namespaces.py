"""A mark for tests of the lab, which need network namespaces."""

import pytest

from analysis.wan import sandbox
from recipe.errors import InputError


def _problem() -> str:
    try:
        sandbox.wrapped([])
    except InputError as error:
        return str(error)
    return ""


needs_namespaces = pytest.mark.skipif(bool(_problem()), reason=_problem())
