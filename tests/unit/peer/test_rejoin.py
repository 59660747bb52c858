"""The run with which `--resume` goes on, and the peers that do not come back."""

import os
import time

import pytest

from recipe.errors import InputError
from recipe.presets import preset
from recipe.run_folder import RunFolder
from swarm.cli.train import read_start
from swarm.enrolment.removed import Removed
from swarm.network.addresses import NobodyAnswers
from swarm.peer.main import run
from swarm.peer.options import own_recipe, parse_options
from swarm.peer.rejoin import come_back, resumed, trained_before


def checkpoint(output_dir, run_id: str, name: str, written_at: float, file: str = "last.ckpt") -> RunFolder:
    folder = RunFolder.create(output_dir, run_id, name)
    folder.write_recipe(preset("glyphs"))
    (folder.checkpoints / file).touch()
    folder.rounds.touch()
    os.utime(folder.checkpoints / file, (written_at, written_at))
    return folder


@pytest.fixture
def output_dir(tmp_path):
    checkpoint(tmp_path, "older", "anna", 100.0)
    checkpoint(tmp_path, "newer", "anna", 300.0, "step=20.ckpt")
    checkpoint(tmp_path, "newer", "ben", 200.0)
    checkpoint(tmp_path, "half", "cleo", 400.0, ".step=30.ckpt.part")
    checkpoint(tmp_path, "newer", "dora", 450.0, "own-step-7.ckpt")
    checkpoint(tmp_path, "newest", "ddp", 500.0).rounds.unlink()  # no peer's: they alone have rounds
    return tmp_path


@pytest.mark.parametrize(
    ("given", "run_id", "name"),
    [
        ([], "newer", "anna"),
        (["--run-id", "older"], "older", "anna"),
        (["--public-name", "ben"], "newer", "ben"),
    ],
)
def test_a_peer_goes_on_with_the_newest_checkpoint(output_dir, given, run_id, name):
    options = resumed(parse_options(["--resume", "--output-dir", str(output_dir), *given]))
    assert (options.run_id, options.machine.public_name) == (run_id, name)
    assert options.recipe == str(RunFolder(output_dir / run_id / name).recipe)


def test_where_only_demos_were_the_sentence_says_so(tmp_path):
    checkpoint(tmp_path, "local-1", "peer-1", 600.0).identity.touch()
    with pytest.raises(InputError, match=r"in .* but those of `swarm demo`: name one with --run-id"):
        resumed(parse_options(["--resume", "--output-dir", str(tmp_path)]))


def test_a_demo_is_resumed_only_by_its_name(output_dir, capsys):
    checkpoint(output_dir, "local-1", "peer-1", 600.0).identity.touch()
    words = ["--resume", "--output-dir", str(output_dir)]
    options = resumed(parse_options(words))
    assert (options.run_id, options.machine.public_name) == ("newer", "anna")
    assert resumed(parse_options([*words, "--run-id", "local-1"])).machine.public_name == "peer-1"
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(300.0))
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"Going on with run newer as anna, from its checkpoint of {made} (--run-id and")
    assert said[1].startswith("Going on with run local-1 as peer-1, from")
    resumed(parse_options([*words, "--run-id", "newer", "--public-name", "ben"]))
    assert capsys.readouterr().out == "", "that is what was asked for"


def test_an_organiser_goes_on_with_the_recipe_of_before(output_dir):
    words = ["--resume", "--output-dir", str(output_dir)]
    options = resumed(read_start(words).as_peer)
    assert (options.run_id, options.machine.public_name) == ("newer", "anna")
    assert own_recipe(options) == preset("glyphs")
    assert own_recipe(resumed(read_start([*words, "--recipe", "digits"]).as_peer)) == preset("digits")


def test_a_peer_with_addresses_takes_the_recipe_from_there(output_dir):
    address = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    options = resumed(parse_options(["--resume", "--output-dir", str(output_dir), "--initial-peers", address]))
    assert (options.run_id, options.machine.public_name, options.recipe) == ("newer", "anna", None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--public-name", "cleo"], "finds no checkpoint"),
        (["--public-name", "dora"], "finds no checkpoint"),
        (["--run-id", "other"], "finds no checkpoint"),
        (["--start-from", "best.ckpt"], "give one of them"),
        (["--run-id", "/tmp"], "--run-id"),
        (["--public-name", "a*"], "--public-name"),
    ],
)
def test_options_that_match_no_checkpoint_are_refused(output_dir, given, said):
    with pytest.raises(InputError, match=said):
        resumed(parse_options(["--resume", "--output-dir", str(output_dir), *given]))


@pytest.mark.parametrize(("name", "has_trained"), [("ben", True), ("cleo", False), ("dora", False)])
def test_only_a_peer_with_a_checkpoint_of_the_swarm_goes_on_alone(output_dir, name, has_trained):
    """Dora has only its own weights, from before it took over the swarm's: alone it would begin at step 0."""
    words = ["--output-dir", str(output_dir), "--public-name", name, "--run-id", "half" if name == "cleo" else "newer"]
    assert (trained_before(parse_options(words)) is not None) == has_trained


def test_a_peer_resumes_nothing_unasked(output_dir):
    options = parse_options(["--output-dir", str(output_dir)])
    assert resumed(options) is options


@pytest.mark.parametrize(("error", "status"), [(Removed("The organiser has …"), 3), (InputError("There is no …"), 2)])
def test_the_exit_status_shows_that_a_peer_was_removed(monkeypatch, capsys, error, status):
    def read():
        raise error

    monkeypatch.setattr("swarm.peer.main.reap", lambda: None)  # it would reap the children of this process
    assert run(read) == status
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_removed_peer_does_not_try_to_come_back():
    def make_peer(alone: bool):
        raise Removed("The organiser has removed this peer from the run: it sent noise.")

    with pytest.raises(Removed):
        come_back(make_peer, again=True, has_trained=True, leave=lambda _: None, is_time_up=lambda: False)


def test_a_peer_that_cannot_join_gives_up_when_its_time_is_up(monkeypatch, capsys):
    monkeypatch.setattr("swarm.peer.rejoin.RETRY_SECONDS", 0.0)
    tried, looks = [], iter([False, True])

    def make_peer(alone: bool):
        tried.append(alone)
        raise InputError("Its port is taken.")

    assert come_back(make_peer, True, False, lambda _: None, is_time_up=lambda: next(looks)) == 0
    assert len(tried) == 2
    said = capsys.readouterr()
    assert "Its port is taken." in said.err
    assert said.out == "Time is up (--max-time).\n"


@pytest.mark.parametrize(
    ("error", "alone_seconds", "is_promised"),
    [
        (NobodyAnswers("None of these peers can be reached."), 30.0, True),
        (NobodyAnswers("None of these peers can be reached."), 0.0, False),
        (InputError("Its port is taken."), 30.0, False),
    ],
)
def test_only_a_peer_that_nobody_answers_is_told_that_it_will_go_on_alone(
    monkeypatch, capsys, error, alone_seconds, is_promised
):
    monkeypatch.setattr("swarm.peer.rejoin.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("swarm.peer.rejoin.ALONE_SECONDS", alone_seconds)

    def make_peer(alone: bool):
        raise error

    assert come_back(make_peer, again=True, has_trained=True, leave=lambda _: None, is_time_up=lambda: True) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"{error}\nTrying again, ")
    assert ("goes on alone" in said) == is_promised
    assert ("10 minutes at most" in said) != is_promised
