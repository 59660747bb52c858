"""How many rounds of honest peers an attack may spoil."""

from collections.abc import Iterable

MAX_FAILED = 3


def failed_of(outcomes: Iterable[str]) -> list[str]:
    """Return the outcomes of failed rounds. A peer with too few samples goes on computing, which is no failure."""
    return [outcome for outcome in outcomes if outcome not in ("averaged", "alone") and "too few" not in outcome]


def assert_few_failed(outcomes: Iterable[str]) -> None:
    """Check that hardly any round has failed."""
    failed = failed_of(outcomes)
    assert len(failed) <= MAX_FAILED, failed
