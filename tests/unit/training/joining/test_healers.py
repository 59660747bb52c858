"""Which donor gives a peer better weights than it holds, and what a leader with another model means."""

from types import SimpleNamespace

import pytest
import torch

from recipe.errors import InputError
from swarm.state_sync.state_version import StateVersion
from swarm.training.joining.healers import Healers
from tests.helpers.donors import version_at


def tracker_of(*others: str) -> SimpleNamespace:
    """A tracker whose other peers all have a state to hand over."""
    swarm, trust = SimpleNamespace(donors=lambda min_step: [*others]), SimpleNamespace(distrusted=set())
    records = dict.fromkeys(others, SimpleNamespace(client_mode=False))
    return SimpleNamespace(others=records, swarm=swarm, name_of=str, trust=trust)


def healers(version: StateVersion, tracker: SimpleNamespace, sources=(), refuters=()) -> Healers:
    probation = SimpleNamespace(sources=frozenset(sources), refuters=frozenset(refuters))
    gradients = SimpleNamespace(weights=[*version.state.model.parameters()])
    return Healers(SimpleNamespace(version=version, tracker=tracker, gradients=gradients), probation)


def test_weights_of_no_use_are_replaced_or_end_a_peer_that_is_alone():
    member, alone = version_at(5), tracker_of()
    assert healers(member, tracker_of("anna")).find_healer(None) == "anna"
    assert healers(member, tracker_of("anna")).find_healer("anna") == "anna", "no other peer is there"
    both = healers(member, tracker_of("anna", "ben"))
    assert {both.find_healer("anna") for _ in range(20)} == {"ben"}, "not the donor of these weights"
    assert healers(version_at(0), tracker_of("anna")).find_healer(None) is None, (
        "no peer has better weights than a recipe"
    )
    assert healers(member, alone).find_healer(None) is None, "they are finite: the data may be the reason"
    with torch.no_grad():
        next(member.state.model.parameters()).fill_(torch.nan)
    with pytest.raises(InputError, match="Start again"):
        healers(member, alone).find_healer(None)


@pytest.mark.parametrize(
    ("refuters", "found"),
    [(["cleo"], {"cleo"}), ([], {"ben", "cleo"}), (["anna"], {"ben", "cleo"})],
    ids=["who has refuted them", "anybody", "not a donor"],
)
def test_a_donor_that_replaces_refuted_weights_is_no_source_of_them(refuters, found):
    tracker = tracker_of("anna", "ben", "cleo")
    asked = healers(version_at(5), tracker, sources=["anna"], refuters=refuters)
    assert {asked.find_healer_of_refuted() for _ in range(50)} == found
    assert healers(version_at(5), tracker_of("anna"), sources=["anna"]).find_healer_of_refuted() is None


def test_a_leader_with_another_model_ends_newcomers_only():
    newcomer, member, tracker = version_at(0), version_at(5), tracker_of("anna")
    with pytest.raises(InputError, match="anna averages another model"):
        healers(newcomer, tracker).refused_by("anna")
    assert not tracker.trust.distrusted
    member.advance(b"a round")
    healers(member, tracker).refused_by("anna")
    assert tracker.trust.distrusted == {"anna"}


def test_a_newcomer_does_not_end_because_one_of_several_leaders_has_another_model():
    tracker = tracker_of("anna", "liar")
    tracker.others["cleo"] = SimpleNamespace(client_mode=True)  # never leads, so it cannot refuse
    newcomer = healers(version_at(0), tracker)
    newcomer.refused_by("liar")
    assert tracker.trust.distrusted == {"liar"}
    with pytest.raises(InputError, match="anna averages another model"):
        newcomer.refused_by("anna")
