"""`swarm control`: checks that come before any peer is called, and what is said of an extension."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest

from recipe.presets import digits
from swarm.cli.organiser import control, deputy
from swarm.membership.control import giving
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from swarm.protocol.orders import Order, What


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["extend"], "swarm control extend needs a value: swarm control extend UPDATES."),
        (["pause", "7"], "swarm control pause takes no value"),
        (["resume", "--at-step", "7"], "leave out --at-step"),
        (["pause", "--json"], "leave it out"),
        (["learning-rate", "0.001"], "The value of learning-rate is 0.001: give 0.01 to 100."),
        (["learning-rate", "nan"], "The value of learning-rate is nan"),
        (["target-batch-size", "0"], "The value of target-batch-size is 0"),
        (["target-batch-size", "8.5"], "give a whole number"),
        (["extend", "1e9"], "The value of extend is 1e+09: give 1 to 1e+07."),
        (["end", "--at-step", "0"], "An order counts from step 1 on"),
        (["pause", "--organiser-key", "no.key"], "is not there"),
        (["pause", "--run-id", "other"], "No run other of yours"),
        (["pause"], "The run cannot be reached: "),
    ],
)
def test_bad_input_is_one_sentence(her_run, capsys, given, says):
    assert control.main(her_run.options(*given)) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("error: ")
    assert "Traceback" not in error


def test_a_deputy_without_the_right_is_refused_at_once(her_run, tmp_path, capsys):
    assert deputy.main([str(tmp_path / "ben.key"), *her_run.options()]) == 0
    assert control.main(her_run.options("pause", "--organiser-key", str(tmp_path / "ben.key"))) == 2
    assert "no right to" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "may_shorten"), [(-1, True), (0, False)])
def test_an_extension_that_may_make_the_run_shorter_says_so(her_run, monkeypatch, more, may_shorten):
    manifest = RunManifest(PROTOCOL, "digits", replace(digits(), averaging="auto"))
    updates = manifest.recipe.total_steps + more
    given = giving.Given(Order(42, What.EXTEND, updates), math.nan, 2)
    monkeypatch.setattr(control, "reaching", lambda *_: nullcontext((None, manifest)))
    monkeypatch.setattr(giving, "give_order", lambda *_: given)
    said: list[str] = []
    assert control.main(her_run.options("extend", str(updates)), said.append) == 0
    assert [words.startswith("The run may be shorter now: ") for words in said] == [False] + [True] * may_shorten
