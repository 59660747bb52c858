"""Which of several manifests a newcomer believes if it has the organiser's public key."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hivemind.utils import ValueWithExpiration

from recipe.errors import InputError
from recipe.presets import digits
from swarm.membership.run_manifest import (
    PROTOCOL,
    OtherProtocolError,
    RunManifest,
    choose_manifest,
    read_manifests,
)
from tests.helpers.owners import Organiser, subkey_of
from tests.helpers.records import FakeDHT

OTHER_RECIPE = replace(digits(), learning_rate=7e-3)


@pytest.fixture
def organiser() -> Organiser:
    return Organiser("run")


def says(dht: FakeDHT, name: str, manifest: RunManifest) -> None:
    dht.records[subkey_of(name)] = ValueWithExpiration(manifest.to_bytes(), 0.0)


def signed(organiser: Organiser, monkeypatch, recipe, at: int) -> RunManifest:
    with monkeypatch.context() as patch:
        patch.setattr("swarm.membership.run_manifest.time", SimpleNamespace(time=lambda: at))
        return RunManifest(PROTOCOL, "run", recipe).signed_by(organiser.signer)


def test_the_newest_manifest_of_the_organiser_counts_however_many_say_otherwise(organiser, monkeypatch):
    dht, newest = FakeDHT(), signed(organiser, monkeypatch, digits(), at=2000)
    before, stranger = signed(organiser, monkeypatch, OTHER_RECIPE, at=1000), Organiser("run")
    says(dht, "honest", newest)
    for number in range(5):
        says(dht, f"replays {number}", before)
        says(dht, f"makes one up {number}", RunManifest(PROTOCOL, "run", OTHER_RECIPE).signed_by(stranger.signer))
        says(dht, f"says it is open {number}", RunManifest(PROTOCOL, "run", OTHER_RECIPE))
    assert read_manifests(dht, (), "run", organiser.signer.public_key) == {"run": newest}


def test_a_manifest_of_another_organiser_is_not_read(organiser):
    dht = FakeDHT()
    says(dht, "honest", RunManifest(PROTOCOL, "run", digits()).signed_by(organiser.signer))
    assert read_manifests(dht, (), "run", Organiser("run").signer.public_key, timeout_seconds=0) == {}


def test_only_the_organisers_signature_shows_that_her_run_is_of_another_protocol(organiser):
    dht, key, older = FakeDHT(), organiser.signer.public_key, RunManifest(PROTOCOL - 1, "run", digits())
    signed, claimed = (
        older.signed_by(organiser.signer),
        replace(older.signed_by(Organiser("run").signer), organiser=key),
    )
    says(dht, "stranger", claimed)
    assert read_manifests(dht, (), "run", key, timeout_seconds=0) == {}
    says(dht, "peer", signed)
    with pytest.raises(OtherProtocolError, match="The run speaks protocol"):
        read_manifests(dht, (), "run", key, timeout_seconds=0)
    says(dht, "another peer", newest := RunManifest(PROTOCOL, "run", digits()).signed_by(organiser.signer))
    assert read_manifests(dht, (), "run", key) == {"run": newest}


@pytest.mark.parametrize("begun", [-1, "1000", True, 2**40])
def test_a_run_with_an_impossible_time_of_its_beginning_is_refused(organiser, begun):
    made = RunManifest(PROTOCOL, "run", digits(), begun=begun).signed_by(organiser.signer)
    with pytest.raises(InputError, match="in the future"):
        RunManifest.from_bytes(made.to_bytes())


def test_a_signature_without_an_organiser_makes_no_open_run(organiser):
    data = RunManifest(PROTOCOL, "run", digits()).signed_by(organiser.signer).to_bytes()
    assert RunManifest.from_bytes(data).organiser
    with pytest.raises(InputError, match="is signed and names no organiser"):
        RunManifest.from_bytes(data.replace(b'"organiser"', b'"rganiser"'))


def test_a_join_line_is_refused_where_its_addresses_lead_to_another_run(organiser):
    with pytest.raises(InputError, match=r"no run run of this organiser: ask the organiser .* for a new join line"):
        choose_manifest({}, "run", organiser.signer.public_key)
