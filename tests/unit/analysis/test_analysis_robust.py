"""The simulator of liars: what attackers send, by hand; what rules make of it; and a small table from start to end."""

import json

import pytest
import torch

from analysis.endurance.robust import RobustOptions, main, shown
from analysis.endurance.virtual_swarm import ATTACKS, DELAY, RULES, Digits, Network, Sent, Swarm, train
from recipe.errors import InputError

HONEST = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 2.0], [2.0, -2.0]])


def sent(attackers: int = 1, **more) -> Sent:
    return Sent(HONEST.clone(), [10] * 4, attackers, HONEST, **more)


def attacked(attack: str, **more) -> torch.Tensor:
    """The gradient that the first peer sends."""
    return ATTACKS[attack](sent(**more)).parts[0]


def test_attackers_send_what_they_are_named_after():
    others = HONEST[1:]
    assert attacked("none").tolist() == [1.0, 0.0]
    assert attacked("sign flip x 100").tolist() == [-100.0, 0.0]
    assert attacked("noise x 1000").norm() == pytest.approx(1000)
    assert attacked("zeros").tolist() == [0.0, 0.0]
    torch.testing.assert_close(attacked("IPM 0.6"), -0.6 * others.mean(0))
    torch.testing.assert_close(attacked("ALIE"), others.mean(0) - 1.5 * others.std(0))
    old = [torch.full_like(HONEST, float(number)) for number in range(DELAY)]
    assert attacked("delayed", earlier=old).tolist() == [0.0, 0.0], "the oldest"
    assert attacked("delayed", earlier=old[1:]).tolist() == [1.0, 0.0], "as long as there is none"


@pytest.mark.parametrize("attack", ATTACKS)
def test_honest_peers_send_what_they_have(attack):
    found = ATTACKS[attack](sent())
    assert torch.equal(found.parts[1:], HONEST[1:])
    assert found.samples[1:] == [10] * 3


def test_rules_make_means_of_honest_peers_and_only_the_mean_is_carried_off():
    honest = sent(attackers=0)
    for name in ("mean", "trimmed mean", "clip"):
        torch.testing.assert_close(RULES[name](honest), torch.tensor([2.0, 0.0]))
    claimed = ATTACKS["claimed weight"](sent())
    assert claimed.samples[0] == 80
    torch.testing.assert_close(RULES["mean"](claimed), HONEST[1:].sum(0) * 10 / 110)
    lying = ATTACKS["sign flip x 100"](sent())
    assert RULES["mean"](lying)[0] < -20
    for name in RULES.keys() - {"mean"}:
        assert RULES[name](lying)[0] > -0.1, name


def test_gradients_are_those_of_autograd():
    generator = torch.Generator().manual_seed(0)
    network = Network(generator)
    images, labels = torch.rand(3, 5, 64, generator=generator), torch.randint(10, (3, 5), generator=generator)
    found = network.gradients(images, labels)
    for peer in range(3):
        vector = network.vector.detach().clone().requires_grad_()
        first, bias, second, out_bias = vector.split([64 * 32, 32, 320, 10])
        hidden = torch.relu(images[peer] @ first.view(64, 32) + bias)
        torch.nn.functional.cross_entropy(hidden @ second.view(32, 10) + out_bias, labels[peer]).backward()
        torch.testing.assert_close(found[peer], vector.grad, rtol=1e-4, atol=1e-6)


def test_a_training_is_repeatable_and_a_liar_ends_it_where_the_mean_is_taken():
    data, swarm = Digits.load(), Swarm(5, 1, 30)
    assert train(swarm, "none", "clip", 1, data) == train(swarm, "none", "clip", 1, data) > 0.7
    assert train(swarm, "sign flip x 100", "mean", 1, data) < 0.3
    assert train(swarm, "sign flip x 100", "clip", 1, data) > 0.7


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"attacks": ("politeness",)}, "There is no attack 'politeness'"),
        ({"rules": ()}, "--rules needs at least one value"),
        ({"rules": ("majority",)}, "There is no rule 'majority'"),
        ({"attackers": (50,)}, "less than 50"),
        ({"attackers": (0,)}, "more than 0"),
        ({"peers": (1,)}, "at least 2"),
        ({"seeds": 0}, "seeds"),
    ],
)
def test_options_that_cannot_work_are_refused(options, problem):
    with pytest.raises(InputError, match=problem):
        RobustOptions(**options).check()


def test_a_table_from_start_to_end(tmp_path, capsys):
    options = ["--peers", "5", "--attackers", "20", "--attacks", "none", "zeros", "--rules", "mean", "clip"]
    assert main([*options, "--seeds", "2", "--rounds", "3", "--output-dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "robust.json").read_text())
    assert [(row["attack"], row["rule"]) for row in found["rows"]] == [
        (attack, rule) for attack in ("none", "zeros") for rule in ("mean", "clip")
    ]
    assert all(len(row["accuracies"]) == 2 and row["attackers"] == 1 for row in found["rows"])
    said = capsys.readouterr().out
    assert "2/2 5 peers, 1 of them attackers, zeros" in said
    assert shown(found["rows"][0]["accuracies"]) in said
    assert main(["--attackers", "60"]) == 2
