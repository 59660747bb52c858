"""`Once`: messages that are said once."""

from swarm.runtime.once import Once


def test_something_is_said_once():
    once = Once()
    assert [once.first() for _ in range(3)] == [True, False, False]


def test_something_is_said_once_of_each():
    once = Once()
    assert [once.first(about) for about in ("ada", "ben", "ada", None, None)] == [True, True, False, True, False]


def test_further_names_are_neither_said_nor_remembered():
    once = Once(most=2)
    assert sum(once.first(number) for number in range(1000)) == 2
    assert not once.first(0)
