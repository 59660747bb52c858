"""A helper goes without data and micro-batches, and waits for no peer."""

import threading
from dataclasses import replace

import pytest

from recipe.errors import InputError
from recipe.glyphs.archive import REFERENCE_DIGEST
from recipe.presets import preset
from recipe.registry import build_data
from swarm.enrolment.join_line import JoinLine
from swarm.membership.run_manifest import PROTOCOL, RunManifest
from swarm.peer.checkpoints import newest_checkpoint
from swarm.peer.helping import desk_process
from swarm.peer.helping.helper import NoData, digest_for
from swarm.peer.options import RoleOptions, parse_options
from swarm.runtime.bell import Bell
from swarm.training.helper import HelperStrategy
from swarm.training.options import CoordinatorOptions


def manifest(recipe: str, classes: str = "") -> RunManifest:
    return RunManifest(PROTOCOL, "night-1", preset(recipe), classes)


@pytest.mark.parametrize(
    ("recipe", "classes", "given", "digest"),
    [
        ("digits", "", None, ""),
        ("cifar10-vit-tiny", "", None, ""),
        ("glyphs", "", None, REFERENCE_DIGEST),
        ("glyphs", "", "1234", "1234"),
        ("glyphs", "5678", None, "5678"),
        ("imagefolder-vit-small", "", "1234", "1234"),
        ("imagefolder-vit-small", "5678", None, "5678"),
    ],
)
def test_a_helper_knows_which_data_the_others_have(recipe, classes, given, digest, tmp_path):
    run = manifest(recipe, classes)
    data = NoData(run.recipe, digest_for(run, tmp_path, given))
    assert run.with_classes(data.digest, tmp_path).classes == digest


def test_a_helper_takes_the_digest_of_data_that_are_there(tmp_path):
    assert digest_for(manifest("docstrings"), tmp_path, None) == build_data(preset("docstrings")).digest != ""


def test_a_run_on_a_folder_does_not_begin_before_a_digest_of_its_images_is_given(tmp_path):
    with pytest.raises(InputError, match="give their --data-digest"):
        digest_for(manifest("imagefolder-vit-small"), tmp_path, None)


def test_other_images_than_the_runs_are_refused(tmp_path):
    with pytest.raises(InputError, match="are not the data of run"):
        manifest("glyphs", "5678").with_classes("1234", tmp_path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data-digest", "1234"], "--data-digest is for a helper"),
        (["--role", "helper", "--desk-port", "70000"], "--desk-port is 70000"),
    ],
)
def test_options_that_cannot_work_are_refused(words, sentence):
    with pytest.raises(InputError, match=sentence):
        parse_options(words)


OWN, MET, HERS = (f"/ip4/192.0.2.{host}/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N" for host in "123")


@pytest.fixture
def handed_on(monkeypatch, tmp_path):
    """A function that starts the desk of a peer, and returns which addresses or join line the desk is given."""
    told: list[str] = []
    monkeypatch.setattr(desk_process.subprocess, "Popen", lambda *_, env, **__: told.append(env["INITIAL_PEERS"]))

    def start(addresses: list[str], asked: list[str], line: JoinLine | None) -> str:
        desk_process.DeskProcess(RoleOptions(desk_port=0), "night-1", addresses, asked, line, tmp_path)
        return told.pop()

    return start


def test_the_desk_of_a_peer_that_cannot_be_called_asks_the_peers_that_it_has_asked(handed_on):
    assert handed_on([], [MET], None) == MET
    assert handed_on([OWN], [MET], None) == f"{OWN} {MET}"


def test_the_desk_of_a_member_asks_peers_that_answer_now_and_gets_no_invitation(handed_on):
    others = [HERS.replace("31337", str(port)) for port in range(1, 7)]
    line = JoinLine("night-1", bytes(32), (HERS, MET, *others), bytes(16))
    told = JoinLine.parse(handed_on([OWN], [MET], line))
    assert told == replace(line, token=b"", addresses=(HERS, OWN, MET, *others[:5]))
    assert JoinLine.parse(handed_on([], [], line)) == replace(line, token=b"")


def test_a_helper_has_to_be_reachable(refused):
    said = refused("--role", "helper", "--client-mode", "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    assert said.startswith("error: A helper has to be a peer that others can call, and this one cannot be")
    assert "--client-mode was given" in said


def test_a_helper_waits_for_no_peer_before_it_takes_part():
    options = CoordinatorOptions(min_peers=3, matchmaking_seconds=2.0)
    strategy = HelperStrategy(64, "run", options=options)
    assert strategy.options == replace(options, min_peers=0, helps=True)


def test_a_trainer_goes_on_with_the_checkpoint_of_a_helper(tmp_path):
    import torch

    torch.save({"global_step": 3, "state_dict": {"weight": torch.ones(2)}}, tmp_path / "step=3.ckpt")
    path, found = newest_checkpoint(tmp_path, needed=True, data_name="VisionData")
    assert path == tmp_path / "step=3.ckpt"
    assert (found["global_step"], found["VisionData"]) == (3, None)


def test_a_bell_is_heard_once_however_often_it_was_rung():
    bell = Bell()
    assert not bell.wait(0.0)
    for _ in range(3):
        bell.ring()
    assert bell.wait(0.0)
    assert not bell.wait(0.0)
    threading.Thread(target=bell.ring).start()
    assert bell.wait(10.0)
