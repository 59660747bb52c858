"""Run folder: names, atomic files, metrics that survive crashes and full disks."""

import json
import math
import socket
import stat
import warnings

import pytest

from recipe.errors import InputError
from recipe.presets import preset
from recipe.run_folder import RunFolder, read_metrics, whole_file, write_json, write_private
from recipe.training.loggers import JsonlLogger


def test_layout(tmp_path):
    folder = RunFolder.create(tmp_path / "runs", "run-1", "alice")
    assert folder.path == tmp_path / "runs" / "run-1" / "alice"
    assert folder.checkpoints.is_dir()
    paths = (folder.recipe, folder.environment, folder.metrics, folder.tensorboard, folder.summary, folder.status)
    names = ["recipe.json", "environment.json", "metrics.jsonl", "tensorboard", "summary.json", "status.json"]
    assert [path.name for path in paths] == names
    RunFolder.create(tmp_path / "runs", "run-1", "alice")  # again, as after a restart


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "a" * 65, "ü", "a\n"])
def test_names_that_are_refused(tmp_path, name):
    with pytest.raises(InputError, match="--run-id"):
        RunFolder.create(tmp_path, name, "alice")
    with pytest.raises(InputError, match="--public-name"):
        RunFolder.create(tmp_path, "run", name)


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="--output-dir") as caught:
        RunFolder.create(tmp_path / "file", "run", "alice")
    assert str(tmp_path / "file") in str(caught.value)


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "status.json"
    write_json(path, {"loss": math.nan, "list": [math.inf, 1.5], "text": "a"})
    assert json.loads(path.read_text()) == {"loss": None, "list": [None, 1.5], "text": "a"}
    with pytest.raises(TypeError):
        write_json(path, {"loss": object()})
    assert json.loads(path.read_text())["text"] == "a"
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_a_full_disk_leaves_the_old_file_and_no_half(tmp_path):
    path = tmp_path / "best.ckpt"
    path.write_bytes(b"old")

    def write_on_a_full_disk() -> None:
        with whole_file(path) as file:
            file.write(b"half of the new")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_on_a_full_disk()
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


def test_environment_and_recipe(tmp_path):
    folder = RunFolder.create(tmp_path, "run", "alice")
    folder.write_environment()
    folder.write_recipe(preset("digits"))
    environment = json.loads(folder.environment.read_text())
    assert environment["versions"]["torch"]
    assert environment["cores"] >= 1
    assert environment["memory_gib"] > 0
    machine_facts = {key: value for key, value in environment.items() if key != "command_line"}
    assert socket.gethostname() not in json.dumps(machine_facts)
    assert type(preset("digits")).from_json(folder.recipe.read_text()) == preset("digits")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("join swarm://SECRET --port 1", "join swarm://… --port 1"),
        ("join “swarm://SECRET SECRET” SECRET --port 1", "join “swarm://… --port 1"),
        ("join Swarm:/SECRET --port 1", "join swarm://… --port 1"),
        ("peer --initial-peers swarm://SECRET --initial_peers=swarm://SECRET", None),
        ("peer --certificate SECRET --port 1", "peer --certificate … --port 1"),
        ("peer --certificate=SECRET --port 1", "peer --certificate=… --port 1"),
        ("peer --upload-to ftp://ada:SECRET@example.org/a", "peer --upload-to ftp://…@example.org/a"),
        ("peer --certificate-days 3 --port 1", "peer --certificate-days 3 --port 1"),
    ],
)
def test_the_command_line_that_is_kept_lets_no_reader_in(tmp_path, monkeypatch, given, kept):
    """People are asked to send the file when they need help."""
    monkeypatch.setattr("sys.argv", given.split())
    folder = RunFolder.create(tmp_path, "run", "alice")
    folder.write_environment()
    text = folder.environment.read_text()
    assert "SECRET" not in text
    expected = kept or "peer --initial-peers swarm://… --initial_peers=swarm://…"
    assert json.loads(text)["command_line"] == expected.split()


def test_summary(tmp_path):
    folder = RunFolder.create(tmp_path, "run", "alice")
    numbers = {"steps": 3, "samples": 96, "seconds": 1.5, "val_accuracy": None, "train_loss": math.nan}
    folder.write_summary(preset("digits"), run_id="run", outcome="completed", max_num_peers=2, rounds=3, **numbers)
    expected = {"run_id": "run", "recipe": "digits", "outcome": "completed", "max_num_peers": 2, "rounds": 3}
    fingerprint = {"fingerprint": preset("digits").fingerprint}
    assert json.loads(folder.summary.read_text()) == expected | fingerprint | numbers | {"train_loss": None}


def test_metrics_lines(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log_metrics({"train/loss": 1.5}, step=1)
    assert len(read_metrics(logger.path)) == 1  # readable at once
    logger.log_metrics({"train/loss": math.nan, "train/lr": math.inf}, step=2)
    first, second = read_metrics(logger.path)
    assert (first["step"], first["train/loss"]) == (1, 1.5)
    assert first["time"] > 1.7e9
    assert (second["train/loss"], second["train/lr"]) == (None, None)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_private_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch, overwrite):
    path = tmp_path / "new folder" / "key"
    write_private(path, b"first", overwrite)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"first", 0o600)
    path.chmod(0o644)
    if not overwrite:
        with pytest.raises(FileExistsError):
            write_private(path, b"second")
        path.unlink()

    def fail(_file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            write_private(path, b"second", overwrite)
    assert [file.read_bytes() for file in path.parent.iterdir()] == [b"first"] * overwrite
    write_private(path, b"second", overwrite)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"second", 0o600)


def test_a_torn_line_is_skipped_and_swallows_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == [], "there is no file yet"
    JsonlLogger(path).log_metrics({"train/loss": 1.0}, step=1)
    with open(path, "a") as file:
        file.write('{"time": 1, "st')
    assert [line["step"] for line in read_metrics(path)] == [1]
    JsonlLogger(path).log_metrics({"train/loss": 2.0}, step=2)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_a_full_disk_warns_once(tmp_path, monkeypatch):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("recipe.training.loggers.append_line", full)
        with pytest.warns(UserWarning, match="No space left"):
            logger.log_metrics({"train/loss": 1.0}, step=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logger.log_metrics({"train/loss": 1.0}, step=2)
    logger.log_metrics({"train/loss": 1.0}, step=3)
    assert [line["step"] for line in read_metrics(logger.path)] == [3]
