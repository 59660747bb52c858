"""While large libraries are imported nothing is collected, and afterwards everything else is, as before."""

import gc

import pytest

from swarm.runtime.imports import quick_imports


@pytest.fixture(autouse=True)
def thaw():
    yield
    gc.enable()
    gc.unfreeze()


def test_the_collector_rests_and_leaves_alone_what_has_come_in():
    before = gc.get_freeze_count()
    with quick_imports():
        assert not gc.isenabled()
        came_in = [{}]
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert came_in == [{}]


def test_it_rests_again_after_an_import_that_failed():
    gc.disable()
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import there_is_no_such_module  # noqa: F401
    assert not gc.isenabled()
