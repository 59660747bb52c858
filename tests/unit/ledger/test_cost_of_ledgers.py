"""The programs that measure what ledgers cost, with which the documentation's figures were found."""

import re
import sys

from swarm.desk.ledger.benchmark import main
from swarm.ledger.benchmark import measure


def test_what_a_ledger_costs(tmp_path):
    said = measure(2, 9, tmp_path)
    assert re.fullmatch(r"2 peers, 9 updates: \S+ ms .* and \S+ bytes an update .* reads \S+ lines a second", said)


def test_what_adding_up_costs_beside_a_page(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "20"])
    main()
    said = capsys.readouterr().out
    assert re.fullmatch(r"0 MiB in 3 ledgers are added up in \d+ s, .* a page of 1,000 peers takes \d+ ms .*\n", said)
