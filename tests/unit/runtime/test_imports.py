"""While large libraries are imported the garbage collector rests. Afterwards it collects everything else, as before."""

import gc

import pytest

from swarm.runtime.imports import quick_imports


@pytest.fixture(autouse=True)
def thaw():
    yield
    gc.enable()
    gc.unfreeze()


def test_the_collector_rests_and_leaves_alone_the_objects_of_the_import():
    before = gc.get_freeze_count()
    with quick_imports():
        assert not gc.isenabled()
        came_in = [{}]
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert came_in == [{}]


def test_the_collector_is_as_before_after_an_import_that_failed():
    gc.disable()
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import there_is_no_such_module  # noqa: F401
    assert not gc.isenabled()
