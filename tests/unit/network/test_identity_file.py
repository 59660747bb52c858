"""The file of a peer's private key: made once, whole or not at all."""

import multiprocessing
import resource
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import load_der_private_key
from hivemind.p2p import PeerID

from recipe.errors import InputError
from swarm.network.signed_records import claim_identity, peer_with, prepare_identity, read_key


def test_it_is_made_once_and_for_its_user_alone(tmp_path):
    path = tmp_path / "new folder" / "peer.key"
    peer_id = prepare_identity(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert prepare_identity(path) == peer_id


def test_one_process_uses_it_at_a_time_and_its_end_gives_it_back(tmp_path):
    """A child that outlives its peer does not hold it."""
    path = tmp_path / "peer.key"
    prepare_identity(path)
    claim_identity(path)
    claim_identity(path)
    (tmp_path / "other.key").write_bytes(b"")
    in_a_child = multiprocessing.get_context("fork").Pool(1)
    with in_a_child:
        assert in_a_child.apply(refusal, [path]).startswith(f"A running peer uses the identity {path} already")
        assert in_a_child.apply(refusal, [tmp_path / "other.key"]) == ""
    claim_identity(tmp_path / "other.key")


def test_where_no_lock_can_be_made_the_identity_is_used_without_one(tmp_path, monkeypatch):
    """A folder of secrets that this user may only read, for instance; the administrator may write everywhere."""

    refused = []

    def refuse(path: Path, mode: str) -> None:
        refused.append(path)
        raise PermissionError(f"{path} may only be read")

    monkeypatch.setattr(Path, "open", refuse)
    claim_identity(tmp_path / "peer.key")
    assert refused == [tmp_path / "peer.key.lock"]


def refusal(path: Path) -> str:
    try:
        claim_identity(path)
    except InputError as error:
        return str(error)
    return ""


def test_a_full_disk_leaves_no_part_of_a_key(tmp_path):
    """Such a part could not be read when there is room again."""
    path, limits = tmp_path / "peer.key", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(InputError, match=r"peer\.key cannot be used \(File too large\)"):
            prepare_identity(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    prepare_identity(path)


def test_the_numbers_of_a_key_are_checked_once_in_a_process(tmp_path, monkeypatch):
    """Each check takes 40 ms, and a start needs the key at five places."""
    loads = []

    def load(*arguments, **options):
        loads.append(arguments)
        return load_der_private_key(*arguments, **options)

    monkeypatch.setattr(serialization, "load_der_private_key", load)
    identity = tmp_path / "ada.key"
    peer_id = prepare_identity(identity)
    assert prepare_identity(identity) == peer_with(read_key(identity)) == peer_id
    assert len(loads) == 1
    assert PeerID.from_identity(identity.read_bytes()) == peer_id
