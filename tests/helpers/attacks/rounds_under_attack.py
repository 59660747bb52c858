"""How many rounds of honest peers an attack may spoil."""

from collections.abc import Iterable

MAX_FAILED = 3


def assert_few_failed(outcomes: Iterable[str]) -> None:
    """Hardly any round has failed; who has too few samples yet computes on."""
    failed = [outcome for outcome in outcomes if outcome not in ("averaged", "alone") and "too few" not in outcome]
    assert len(failed) <= MAX_FAILED, failed
