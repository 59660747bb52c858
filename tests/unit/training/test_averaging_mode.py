"""What a swarm may clip, and what it says about that."""

from dataclasses import replace

import pytest

from recipe.errors import InputError
from recipe.presets import preset
from swarm.averaging.robust_mean import Combination
from swarm.training.averaging_mode import Averaging


@pytest.mark.parametrize("averaging", ["sync", "overlap-fp16", "local-topk", "sync-int4"])
def test_averages_are_clipped_unless_the_options_say_otherwise(averaging):
    assert Averaging.named(averaging).rule.clips
    assert "Averages are clipped" in Averaging.named(averaging).protection


def test_the_rule_knows_of_local_steps():
    assert Averaging.local(4).rule == Combination(clips=True, local_steps=4)
    assert Averaging.sync().rule == Combination(clips=True)
    assert Averaging.local(4, robust="off").rule.clips is False


def test_thin_matrices_cannot_be_clipped():
    assert not Averaging.sync("powersgd").rule.clips
    assert "not clipped (codec powersgd)" in Averaging.sync("powersgd").protection
    with pytest.raises(InputError, match="powersgd cannot be clipped"):
        Averaging.sync("powersgd", robust="clip")
    with pytest.raises(InputError, match="--robust off, or --codec int8"):
        replace(preset("digits"), codec="powersgd", robust="clip")
    with pytest.raises(InputError, match="no robust 'perhaps'"):
        Averaging.sync(robust="perhaps")


def test_the_recipe_decides_and_peers_of_different_rules_do_not_meet():
    recipe = preset("digits")
    on, off = (Averaging.of(replace(recipe, robust=robust)) for robust in ("auto", "off"))
    assert on.rule.clips
    assert not off.rule.clips
    assert "--robust off" in off.protection
    assert str(on) != str(off)
    assert str(on) == str(Averaging.of(replace(recipe, robust="clip"))), "auto means the same"
    assert replace(recipe, robust="off").fingerprint != recipe.fingerprint


@pytest.mark.parametrize(
    ("averaging", "has_shared_data", "said"),
    [
        (Averaging.sync(), True, "leave out a member whose stated results differ"),
        (Averaging.sync(), False, "do not recompute each other's micro-batches: each member has samples of its own"),
        (Averaging.sync(robust="off"), True, "micro-batches: that needs --averaging sync or overlap, and clipped"),
        (Averaging.overlap(), True, "leave out a member whose stated results differ"),
        (Averaging.local(), True, "micro-batches: that needs --averaging sync or overlap"),
    ],
)
def test_it_says_whether_work_is_checked(averaging, has_shared_data, said):
    assert said in averaging.protection_of_work(has_shared_data)
