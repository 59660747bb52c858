"""Runs that a desk has seen."""

from collections.abc import Callable

import pytest

from tests.helpers.desk.seen_run import SeenRun


@pytest.fixture
def seen(tmp_path) -> SeenRun:
    return SeenRun(tmp_path / "desk.json")


@pytest.fixture
def another(tmp_path) -> Callable[..., SeenRun]:
    """Make the desk of another run, or one with alerts."""
    return lambda name="desk.json", **options: SeenRun(tmp_path / name, **options)
