"""A run whose peers keep ledgers, without a network."""

import pytest

from tests.helpers.ledgers.ledger_run import NAMES, LedgerRun


@pytest.fixture
def run(tmp_path) -> LedgerRun:
    """A run in which three peers have made ten updates, and signed each."""
    run = LedgerRun(tmp_path / "letters")
    run.start(*NAMES)
    for _ in range(10):
        run.update()
    run.close()
    return run
