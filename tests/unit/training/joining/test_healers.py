"""Who gives a peer better weights than it holds, and what a leader with another model means."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recipe.errors import InputError
from swarm.state_sync.state_version import StateVersion
from swarm.state_sync.training_state import SharedState
from swarm.training.joining.healers import Healers


def make(step: int) -> StateVersion:
    model = nn.Linear(2, 1)
    state = SharedState(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    return StateVersion(state, step, list(model.parameters()))


def tracker_of(*others: str) -> SimpleNamespace:
    """All others have a state to hand over."""
    swarm = SimpleNamespace(donors=lambda min_step: [*others])
    return SimpleNamespace(others=dict.fromkeys(others), swarm=swarm, name_of=str, distrusted=set())


def healers(version: StateVersion, tracker: SimpleNamespace, sources=(), refuters=()) -> Healers:
    probation = SimpleNamespace(sources=frozenset(sources), refuters=frozenset(refuters))
    return Healers(version, tracker, probation, SimpleNamespace(weights=[*version.state.model.parameters()]))


def test_weights_of_no_use_are_replaced_or_end_a_peer_that_is_alone():
    member, alone = make(5), tracker_of()
    assert healers(member, tracker_of("anna")).find_healer(None) == "anna"
    assert healers(member, tracker_of("anna")).find_healer("anna") == "anna", "nobody else is there"
    both = healers(member, tracker_of("anna", "ben"))
    assert {both.find_healer("anna") for _ in range(20)} == {"ben"}, "not from whom these weights came"
    assert healers(make(0), tracker_of("anna")).find_healer(None) is None, "nobody has better ones than the recipe"
    assert healers(member, alone).find_healer(None) is None, "they are finite: the data may be the reason"
    with torch.no_grad():
        next(member.state.model.parameters()).fill_(torch.nan)
    with pytest.raises(InputError, match="start again"):
        healers(member, alone).find_healer(None)


@pytest.mark.parametrize(
    ("refuters", "found"),
    [(["cleo"], {"cleo"}), ([], {"ben", "cleo"}), (["anna"], {"ben", "cleo"})],
    ids=["who has refuted them", "anybody", "not a donor"],
)
def test_who_replaces_refuted_weights_is_nobody_they_came_from(refuters, found):
    tracker = tracker_of("anna", "ben", "cleo")
    asked = healers(make(5), tracker, sources=["anna"], refuters=refuters)
    assert {asked.find_healer_of_refuted() for _ in range(50)} == found
    assert healers(make(5), tracker_of("anna"), sources=["anna"]).find_healer_of_refuted() is None


def test_a_leader_with_another_model_ends_newcomers_only():
    newcomer, member, tracker = make(0), make(5), tracker_of("anna")
    with pytest.raises(InputError, match="anna averages another model"):
        healers(newcomer, tracker).refused_by("anna")
    assert not tracker.distrusted
    member.advance(b"a round")
    healers(member, tracker).refused_by("anna")
    assert tracker.distrusted == {"anna"}
