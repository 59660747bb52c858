"""The state that a joiner takes over: everything arrives, and a state that does not fit this model changes nothing."""

import copy
import random

import pytest
import torch
from torch import nn

from swarm.protocol.messages import RoundFailed
from swarm.protocol.wire import LINEAGE_BYTES, MAX_STEP
from swarm.state_sync.serialization import pack, unpack
from swarm.state_sync.state_version import StateVersion
from swarm.state_sync.training_state import SharedState

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
}

LINEAGE = bytes(range(LINEAGE_BYTES))


def make(seed: int, optimizer: str = "adamw", width: int = 6) -> SharedState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width * 4, 3))
    return SharedState(model, [OPTIMIZERS[optimizer](model.parameters())])


def train(state: SharedState, steps: int = 3, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        state.optimizers[0].zero_grad()
        state.model(torch.randn(8, 1, 4, 4, generator=generator)).square().mean().backward()
        state.optimizers[0].step()


def take_over(state: SharedState, description: dict, tensors: list[torch.Tensor]) -> tuple[int, bytes]:
    """Take over a state as a joiner does: a state that does not fit is found before anything changes."""
    state.check(description, tensors)
    return state.take(description, tensors)


def everything(state: SharedState) -> dict:
    """A copy of the model's and the optimizer's own state dictionaries."""
    statistics = state.optimizers[0].state_dict()["state"]
    tensors = {i: {key: value for key, value in s.items() if value is not None} for i, s in statistics.items()}
    return copy.deepcopy({"model": state.model.state_dict(), "optimizer": {i: s for i, s in tensors.items() if s}})


def assert_equal(one, other) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("options", "where_counts_are"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_statistics_come_to_where_the_optimizer_looks_for_them(options, where_counts_are):
    """torch's device without numbers stands for a GPU here.

    Statistics of a parameter of one number are moved as well.
    """
    donor = nn.Sequential(nn.Linear(2, 1), nn.PReLU())
    joiner = copy.deepcopy(donor).to("meta")
    optimizer = torch.optim.AdamW(donor.parameters())
    donor(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = SharedState(joiner, [torch.optim.AdamW(joiner.parameters(), **options)])
    state.take(*SharedState(donor, [optimizer]).export(1, LINEAGE))
    for _, param in state.optimized:
        of_param = state.optimizers[0].state[param]
        assert of_param["step"].device.type == where_counts_are
        assert {of_param[key].device.type for key in ("exp_avg", "exp_avg_sq")} == {"meta"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_models_go_on_alike(optimizer):
    donor, joiner = make(1, optimizer), make(2, optimizer)
    train(donor, steps=4)
    train(joiner, steps=2, seed=9)
    assert take_over(joiner, *donor.export(4, LINEAGE)) == (4, LINEAGE)
    assert_equal(everything(joiner), everything(donor))
    train(donor, seed=5)
    train(joiner, seed=5)
    assert_equal(everything(joiner), everything(donor))


def with_frozen_layer(seed: int) -> SharedState:
    """A model with a frozen first layer, and a last layer that has the weights of the one before."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    model[2].weight = model[1].weight
    return SharedState(model, [torch.optim.AdamW(model.parameters())])


def test_frozen_weights_do_not_travel_and_tied_ones_travel_once():
    donor, joiner = with_frozen_layer(0), with_frozen_layer(1)
    joiner.model[0].load_state_dict(donor.model[0].state_dict())
    donor.model(torch.ones(1, 4)).sum().backward()
    donor.optimizers[0].step()
    description, tensors = donor.export(1, LINEAGE)
    assert [tensor.shape for tensor in tensors[:2]] == [(4, 4), (4,)]
    assert len(tensors) == 2 + 2 * 3, "a weight and a bias, and three statistics of each"
    assert take_over(joiner, description, tensors) == (1, LINEAGE)
    assert joiner.digest() == donor.digest()


def test_a_joiner_that_has_frozen_other_weights_cannot_take_over_a_state():
    donor, joiner = with_frozen_layer(0), with_frozen_layer(1)
    before = joiner.digest()
    with pytest.raises(RoundFailed, match="the same pretrained weights"):
        take_over(joiner, *donor.export(1, LINEAGE))
    assert joiner.digest() == before


def test_a_fresh_state_resets_the_statistics():
    donor, joiner = make(1), make(2)
    train(joiner)
    assert take_over(joiner, *donor.export(0, LINEAGE)) == (0, LINEAGE)
    assert_equal(everything(joiner)["model"], everything(donor)["model"])
    train(donor)
    train(joiner)
    assert_equal(everything(joiner), everything(donor))


def test_what_a_negative_maximum_would_do_is_refused():
    donor, joiner = make(1, "amsgrad"), make(2, "amsgrad")
    train(donor)
    with pytest.raises(RoundFailed, match="max_exp_avg_sq is negative"):
        take_over(joiner, *with_statistic(*donor.export(3, LINEAGE), "max_exp_avg_sq", lambda s: spoil(s, -1.0)))


def test_local_steps_may_be_more_than_global_ones():
    donor, joiner = make(1), make(2)
    train(donor, steps=40)
    with pytest.raises(RoundFailed, match="has made 40 steps, and not 3"):
        take_over(joiner, *donor.export(3, LINEAGE))
    joiner.anchors = {param: param for param in joiner.model.parameters()}
    assert take_over(joiner, *donor.export(3, LINEAGE)) == (3, LINEAGE)


def test_equal_weights_have_one_digest_and_others_another():
    assert make(1).digest() == make(1).digest() == make(1, "sgd").digest()
    different = [make(1), make(2), make(1, width=7), make(1), make(1)]
    next(different[3].model.buffers()).add_(1e-6)
    different[4].model[3].double()
    assert len({state.digest() for state in different}) == len(different)
    first, other = StateVersion(make(1), 0, [torch.zeros(1)]), StateVersion(make(1), 0, [torch.zeros(1)])
    assert first.lineage == other.lineage
    assert StateVersion(make(1), 1, [torch.zeros(1)]).lineage != StateVersion(make(1), 1, [torch.zeros(1)]).lineage


def digest_of(state: SharedState) -> bytes:
    return state.digest_of(*state.held())


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_one_bit_of_what_peers_have_in_common_changes_the_digest(optimizer):
    state, same = make(1, optimizer), make(1, optimizer)
    for each in (state, same):
        train(each)
    expected = digest_of(state)
    assert digest_of(same) == expected
    description, tensors = state.export(3, LINEAGE)
    assert state.digest_of(description["statistics"], tensors) == expected, "as it travels, too"
    common = [*state.model.parameters()]
    common += [value for own in state.optimizers[0].state.values() for value in own.values()]
    for tensor in common:
        before = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[:1].nextafter_(torch.tensor([9.0]))
        assert digest_of(state) != expected
        with torch.no_grad():
            tensor.copy_(before)
    assert digest_of(state) == expected
    for buffer in state.model.buffers():
        buffer.add_(1)
    assert digest_of(state) == expected, "running statistics go their own way between two updates"


def test_the_optimizer_of_local_steps_is_each_peers_own():
    state = make(1)
    train(state)
    anchors = {param: nn.Parameter(param.detach().clone()) for param in state.model.parameters()}
    outer = torch.optim.SGD(anchors.values(), lr=1.0, momentum=0.9)
    state = SharedState(state.model, [state.optimizers[0], outer], anchors)
    expected = digest_of(state)
    train(state)
    assert digest_of(state) == expected
    first = next(iter(anchors.values()))
    outer.state[first]["momentum_buffer"] = torch.ones_like(first)
    assert digest_of(state) != expected
    version = StateVersion(state, 3, list(anchors.values()))
    assert version.attest_received(*version.export()) == version.attest()


def test_own_weights_are_kept_before_far_ones_replace_them():
    donor, own = make(1), make(1)
    train(donor)
    train(own, steps=2)
    kept = []
    version = StateVersion(own, 2, list(own.model.parameters()))
    version.keep_own = lambda step: kept.append((step, own.model[0].weight.clone()))
    near = donor.export(3, LINEAGE)
    assert 0 < own.distance_to(near[1]) < 0.1
    version.load(*near)
    assert kept == []
    before = own.model[0].weight.detach().clone()
    description, tensors = donor.export(3, LINEAGE)
    version.load(
        description, [-tensor if tensor.is_floating_point() else tensor for tensor in tensors[:2]] + tensors[2:]
    )
    ((step, weight),) = kept
    assert step == 3
    assert_equal(weight, before)
    assert_equal(own.model[0].weight, -before)


def test_an_exported_state_does_not_change_any_more():
    donor = make(1)
    train(donor)
    _, tensors = donor.export(3, LINEAGE)
    before = copy.deepcopy(tensors)
    train(donor)
    assert_equal(tensors, before)


def test_max_bytes_leaves_room_for_every_optimizer():
    for optimizer in OPTIMIZERS:
        donor = make(1, optimizer)
        train(donor)
        assert donor.max_bytes > sum(tensor.numel() * tensor.element_size() for tensor in donor.export(0, LINEAGE)[1])


def with_statistics(description, tensors, change) -> tuple:
    """The state with its first statistic of a parameter's shape changed."""
    tensors = list(tensors)
    index = len(tensors) - len(description["statistics"])
    while tensors[index].numel() == 1:
        index += 1
    tensors[index] = change(tensors[index])
    return description, tensors


def spoil(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


def with_statistic(description, tensors, key: str, change) -> tuple:
    """The state with the first statistic of this name changed."""
    tensors = list(tensors)
    number = next(n for n, (_, name) in enumerate(description["statistics"]) if name == key)
    place = len(tensors) - len(description["statistics"]) + number
    tensors[place] = change(tensors[place])
    return description, tensors


def with_all(description, tensors, key: str, change) -> tuple:
    """The state with all statistics of this name changed."""
    names = [None] * (len(tensors) - len(description["statistics"])) + [name for _, name in description["statistics"]]
    return description, [change(one) if name == key else one for name, one in zip(names, tensors, strict=True)]


def without(description, tensors, key: str) -> tuple:
    """The state without the statistics of this name."""
    num_of_model = len(tensors) - len(description["statistics"])
    kept = [number for number, (_, name) in enumerate(description["statistics"]) if name != key]
    tensors = [*tensors[:num_of_model], *(tensors[num_of_model + number] for number in kept)]
    return {**description, "statistics": [description["statistics"][number] for number in kept]}, tensors


def trained(state: SharedState) -> SharedState:
    train(state)
    return state


SPOILED = {
    "another model": lambda d, t: make(3, width=7).export(3, LINEAGE),
    "a missing tensor": lambda d, t: (d, t[:-1]),
    "one tensor too many": lambda d, t: (d, [*t, t[-1]]),
    "no tensors": lambda d, t: (d, []),
    "NaN in a weight": lambda d, t: (d, [spoil(t[0], float("nan")), *t[1:]]),
    "inf in a weight": lambda d, t: (d, [spoil(t[0], float("inf")), *t[1:]]),
    "NaN in a statistic": lambda d, t: with_statistics(d, t, lambda s: spoil(s, float("nan"))),
    "a negative step of the optimizer": lambda d, t: with_statistic(d, t, "step", lambda s: -s),
    "more steps than there were": lambda d, t: with_statistic(d, t, "step", lambda s: s + 1),
    "NaN in the optimizer's step": lambda d, t: with_statistic(d, t, "step", lambda s: s * torch.nan),
    "a negative sum of squares": lambda d, t: with_statistic(d, t, "exp_avg_sq", lambda s: spoil(s, -1e-9)),
    "all of it negated": lambda d, t: (d, [-x for x in t]),
    "a transposed weight": lambda d, t: (d, [t[0].transpose(0, -1), *t[1:]]),
    "a broadcastable weight": lambda d, t: (d, [t[0][:1], *t[1:]]),
    "a weight in another precision": lambda d, t: (d, [t[0].double(), *t[1:]]),
    "a statistic of another shape": lambda d, t: with_statistics(d, t, lambda s: s[:1]),
    "statistics of fewer parameters": lambda d, t: ({**d, "statistics": d["statistics"][1:]}, t),
    "statistics of another optimizer": lambda d, t: trained(make(1, "momentum")).export(3, LINEAGE),
    "one kind of statistics less": lambda d, t: without(d, t, "exp_avg_sq"),
    "names of statistics that control a terminal": lambda d, t: (
        {**d, "statistics": [(index, f"\x1b[2J{key}\n") for index, key in d["statistics"]]},
        t,
    ),
    "statistics in whole numbers": lambda d, t: with_all(d, t, "exp_avg", lambda s: s.long()),
    "single numbers as statistics": lambda d, t: with_all(d, t, "exp_avg", lambda s: s.flatten()[0]),
    "one number in a row as statistics": lambda d, t: with_all(d, t, "exp_avg", lambda s: s.flatten()[:1]),
    "no step": lambda d, t: ({"statistics": d["statistics"]}, t),
    "a huge step": lambda d, t: ({**d, "step": MAX_STEP + 1}, t),
    "a parameter that is not there": lambda d, t: ({**d, "statistics": [(99, "exp_avg"), *d["statistics"][1:]]}, t),
    "not a dictionary": lambda d, t: ([1, 2], t),
    "None": lambda d, t: (None, t),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_state_that_does_not_fit_changes_nothing(spoiled):
    donor, joiner = make(1), make(2)
    train(donor)
    train(joiner, steps=1)
    before = everything(joiner)
    with pytest.raises(RoundFailed, match="state") as error:
        take_over(joiner, *SPOILED[spoiled](*donor.export(3, LINEAGE)))
    assert str(error.value).isprintable()
    assert_equal(everything(joiner), before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_of_one_number_and_groups_with_settings_of_their_own_are_taken_over(optimizer):
    """Examples are the scale of a contrastive loss, and a momentum for some parameters only."""

    def with_scale() -> SharedState:
        model = nn.Linear(3, 2)
        model.scale = nn.Parameter(torch.tensor(1.0))
        groups = [{"params": [model.bias], "momentum": 0.0, "nesterov": False}, {"params": [model.weight, model.scale]}]
        state = SharedState(model, [OPTIMIZERS[optimizer](groups)])
        for _ in range(2):
            model.zero_grad()
            (model(torch.ones(4, 3)) * model.scale).square().mean().backward()
            state.optimizers[0].step()
        return state

    donor, joiner = with_scale(), with_scale()
    take_over(joiner, *donor.export(2, LINEAGE))
    assert_equal(everything(joiner), everything(donor))


def test_every_tensor_survives_its_way():
    tensors = [
        torch.randn(3, 5).t(),
        torch.tensor(True),
        torch.tensor([[1, -2]], dtype=torch.int64),
        torch.empty(0, 4),
        torch.randn(7).to(torch.bfloat16),
        torch.tensor(3.0, dtype=torch.float64),
    ]
    layout, content = pack(tensors)
    assert (content.dtype, len(content)) == (torch.uint8, 3 * 5 * 4 + 1 + 2 * 8 + 0 + 7 * 2 + 8)
    for sent, received in zip(tensors, unpack(layout, content), strict=True):
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert_equal(received, sent)


LAYOUTS = {
    "None": None,
    "an unknown type": [("object", [1])],
    "no type": [([], [1])],
    "no shape": [("float32", 7)],
    "a negative size": [("float32", [-1])],
    "a size that is no integer": [("float32", [True])],
    "a huge tensor": [("float32", [2**62, 2**62])],
    "many dimensions": [("float32", [1] * 1000)],
    "more than there is": [("float32", [151])],
    "less than there is": [("float32", [149])],
    "an empty tensor of huge sizes": [("uint8", [600]), ("uint8", [600] * 7 + [0])],
    "nothing": [],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_does_not_fit_is_refused(layout):
    with pytest.raises(RoundFailed, match="the state"):
        unpack(LAYOUTS[layout], torch.zeros(600, dtype=torch.uint8))


JUNK = [
    None,
    True,
    -1,
    1.5,
    10**30,
    float("nan"),
    "",
    "x" * 1000,
    b"bytes",
    [],
    {},
    [[]],
    (1, 2, 3),
    {"step": 1},
    object,
]


def mutated(description: dict, chance: random.Random):
    """The description with one to three places replaced by junk."""
    description = {"step": description["step"], "statistics": [list(entry) for entry in description["statistics"]]}
    for _ in range(chance.randrange(1, 4)):
        statistics, junk = description.get("statistics"), chance.choice(JUNK)
        kind = chance.randrange(6)
        if kind == 0:
            description["step"] = junk
        elif kind == 1:
            description["statistics"] = junk
        elif kind == 2:
            description.pop(chance.choice(["step", "statistics"]), None)
        elif kind == 3 and isinstance(statistics, list) and statistics:
            statistics[chance.randrange(len(statistics))] = junk
        elif kind == 4 and isinstance(statistics, list) and statistics and isinstance(statistics[-1], list):
            statistics[-1][:1] = [junk]
        elif kind == 5 and isinstance(statistics, list):
            statistics.append([0, junk])
    return description if chance.random() < 0.95 else chance.choice(JUNK)


@pytest.mark.slow
def test_mutated_descriptions_are_refused_and_nothing_else():
    donor, joiner = make(1), make(2)
    train(donor)
    description, tensors = donor.export(3, LINEAGE)
    chance = random.Random(0)
    refused = 0
    for _ in range(2000):
        before = everything(joiner)
        try:
            step, _ = take_over(joiner, mutated(description, chance), tensors)
        except RoundFailed:
            refused += 1
            assert_equal(everything(joiner), before)
        else:
            assert 0 <= step <= MAX_STEP
    assert refused > 1500
