"""The benchmark of attacks: its arithmetic by hand, and once a whole attacked swarm."""

import json
import math

import pytest

from analysis.endurance import attacks
from analysis.endurance.attacks import (
    AttackOptions,
    is_held,
    longest_pause_seconds,
    more_mb,
    ratios,
    row,
    updates_per_second,
)
from analysis.endurance.honest_swarm import first_naming
from recipe.errors import InputError
from recipe.training.pacing import VARIABLE


def found(*rates: tuple[float, float], problem: str | None = None, named: int = 3, failed: int = 0) -> dict:
    """A result of pairs of (calm, attacked) updates per second."""
    window = {"named_by": 0, "failed_rounds": 0, "lines": [], "peak_mb": {"peer-1": 500.0, "peer-2": 400.0}}
    window["longest_pause_seconds"] = 1.5
    pairs = [
        {
            "calm": window | {"attacked": False, "updates_per_second": calm},
            "attacked": window
            | {"attacked": True, "updates_per_second": attacked, "named_by": named, "failed_rounds": failed}
            | {"longest_pause_seconds": 1.5 + failed},
        }
        for calm, attacked in rates
    ]
    return {"attack": "drip", "pairs": pairs, "problem": problem}


def test_updates_that_were_half_made_count_half():
    moments = [10.0, 12.0, 14.0, 16.0, 20.0]
    assert updates_per_second(moments, 12.0, 16.0) == pytest.approx(0.5)
    assert updates_per_second(moments, 13.0, 18.0) == pytest.approx((3.5 - 1.5) / 5)
    assert updates_per_second(moments, 16.5, 17.5) == pytest.approx(0.25), "a stall is seen, however short the time"
    assert updates_per_second(moments, 20.0, 40.0) == 0.0, "no update has been made since"
    assert updates_per_second([10.0], 0.0, 40.0) == 0.0


def test_the_longest_pause_reaches_over_the_ends_of_the_time():
    moments = [10.0, 12.0, 14.0, 16.0, 20.0]
    assert longest_pause_seconds(moments, 13.0, 18.0) == pytest.approx(2.0), "it began at 12"
    assert longest_pause_seconds(moments, 17.0, 21.0) == pytest.approx(4.0)
    assert longest_pause_seconds(moments, 20.0, 40.0) == pytest.approx(20.0), "no update has been made since"
    assert longest_pause_seconds([], 0.0, 40.0) == pytest.approx(40.0)


def test_a_row_has_the_mean_of_the_ratios_of_pairs_and_its_interval():
    result = found((1.0, 0.9), (2.0, 2.0), (1.0, 1.1), named=2, failed=1)
    assert ratios(result) == pytest.approx([0.9, 1.0, 1.1])
    shown = row(result)
    # Student's 4.303 for two degrees of freedom, times 0.1 over the root of 3.
    assert shown["ratio"] == f"1.00 ± {4.303 * 0.1 / math.sqrt(3):.2f}"
    assert (shown["without"], shown["with"], shown["n"]) == ("1.33", "1.33", "3")
    assert shown["failed rounds"] == "3 (calm 0)"
    assert shown["longest pause, s"] == "2.5 (calm 1.5)"
    assert shown["named by"] == "2 to 2"
    assert is_held(result)


def test_a_swarm_that_lost_more_than_a_tenth_or_did_not_live_has_not_held():
    assert not is_held(found((1.0, 0.8), (1.0, 0.9)))
    assert is_held(found((1.0, 0.85), (1.0, 0.97)))
    ended = found((1.0, 1.0), problem="peer-2 ended (failed)")
    assert not is_held(ended)
    assert row(ended)["problem"] == "peer-2 ended (failed)"
    nothing = row(found(problem="the peers did not train within 180 s"))
    assert (nothing["n"], nothing["ratio"], nothing["without"], nothing["named by"]) == ("0", "–", "–", "–")
    assert not is_held(found())


def test_memory_is_of_the_peer_and_the_pair_where_the_attack_took_most():
    result = found((1.0, 1.0), (1.0, 1.0))
    assert (more_mb(result), row(result)["more MB"]) == (0.0, "0")
    result["pairs"][0]["attacked"]["peak_mb"] = {"peer-1": 490.0, "peer-2": 480.0}
    result["pairs"][1]["calm"]["peak_mb"] = {"peer-1": 300.0, "peer-2": 380.0}
    result["pairs"][1]["attacked"]["peak_mb"] = {"peer-1": 330.0, "peer-2": 385.0}
    assert more_mb(result) == 80.0
    assert is_held(result)
    result["pairs"][0]["attacked"]["peak_mb"]["peer-2"] = 501.0
    assert not is_held(result), "101 MB"
    assert row(found())["more MB"] == "–"


def test_an_attacker_is_named_by_its_name_or_its_id():
    text = "step 3 · training\nNo state from mallory: it sent nothing\nQmBad sent a part that is not finite\n"
    assert first_naming(text, set()) == "No state from mallory: it sent nothing"
    assert first_naming(text.replace("mallory", "somebody"), {"QmBad"}) == "QmBad sent a part that is not finite"
    assert first_naming("step 3 · training", {"QmBad"}) is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"attacks": ("politeness",)}, "There is no attack politeness"),
        ({"peers": 1}, "peers"),
        ({"seconds": 0.0}, "more than 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, problem):
    with pytest.raises(InputError, match=problem):
        AttackOptions(**options).check()


@pytest.mark.long
@pytest.mark.skipif(not attacks.ATTACKER.exists(), reason="the attackers are not there")
def test_a_swarm_is_measured_without_and_with_an_attacker(tmp_path, monkeypatch, capsys):
    """The attacker claims a step and does not answer. The test does not judge how fast the swarm is meanwhile."""
    for variable in (VARIABLE, "OMP_NUM_THREADS", "INITIAL_PEERS"):
        monkeypatch.setenv(variable, "1")  # main() sets them for its peers; this puts them back afterwards
    monkeypatch.setattr(attacks, "SETTLE_SECONDS", 0.0)
    options = ["--repeat", "1", "--seconds", "4", "--peers", "2", "--target-batch-size", "64"]
    attacks.main(["claim", *options, "--output-dir", str(tmp_path / "out")])
    (result,) = json.loads((tmp_path / "out" / "attacks.json").read_text())["results"]
    assert result["problem"] is None
    assert len(result["pairs"]) == 1
    assert all(pair[name]["updates_per_second"] > 0 for pair in result["pairs"] for name in ("calm", "attacked"))
    assert all(pair[name]["peak_mb"].keys() == {"peer-1", "peer-2"} for pair in result["pairs"] for name in pair)
    assert all(min(pair[name]["peak_mb"].values()) > 100 for pair in result["pairs"] for name in pair), "with torch"
    assert all("mallory" in line for pair in result["pairs"] for line in pair["attacked"]["lines"])
    assert "claim 1/1:" in capsys.readouterr().out
