"""The best checkpoint at a remote address: a folder, and a real S3 server on loopback."""

import hashlib
import io
import json
import os
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F

from recipe.errors import InputError
from recipe.presets import preset
from recipe.remote_file import RemoteCopy, RemoteFile
from recipe.run_folder import RunFolder
from recipe.training.checkpoint_io import best_checkpoint
from recipe.training.task import ClassificationTask
from tests.helpers.clusters import Cluster, run_cluster, train
from tests.helpers.programs.ports import free_port

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


OPTION = "--best-checkpoint-url"


@pytest.fixture(scope="module")
def s3():
    """moto's server with an empty bucket. Yields its address and the credentials as environment variables."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", free_port(), verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        yield environment
    server.stop()


def names(remote: RemoteFile, folder: str) -> set[str]:
    remote.filesystem.invalidate_cache()
    return {path.rpartition("/")[2] for path in remote.filesystem.ls(folder, detail=False)}


def follow(remote: RemoteFile, **options) -> RemoteCopy:
    return RemoteCopy(remote, first_pause_seconds=0.01, **options)


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_content_and_sha256_arrive(kind, s3, tmp_path):
    folder = f"file://{tmp_path}/new/folder" if kind == "file" else "s3://bucket/some/key"
    remote = RemoteFile(f"{folder}/best.ckpt", OPTION)
    remote.check()
    content = os.urandom(9 * 2**20)  # more than one chunk, and more than one part of S3
    for written in (b"first", content):
        (tmp_path / "best.ckpt").write_bytes(written)
        copy = follow(remote)
        copy.submit(tmp_path / "best.ckpt")
        copy.close()
        assert copy.problem is None
    assert remote.filesystem.cat_file(remote.path) == content
    digest = hashlib.sha256(content).hexdigest()
    assert copy.sha256 == digest
    assert remote.filesystem.cat_file(f"{remote.path}.sha256").decode() == f"{digest}  best.ckpt\n"
    assert names(remote, remote.path.rpartition("/")[0]) == {"best.ckpt", "best.ckpt.sha256"}


class FlakyFile(RemoteFile):
    """A file whose first uploads break in the middle."""

    failures = 2

    def write(self, content):
        if self.failures:
            self.failures -= 1
            return super().write(Torn(content.read()))
        return super().write(content)


class Torn(io.BytesIO):
    def read(self, size=-1):
        if self.tell():
            raise ConnectionResetError("the line is cut")
        return super().read(size // 2)


def test_a_torn_upload_is_tried_again_and_never_seen(s3, tmp_path):
    remote = FlakyFile("s3://bucket/torn/best.ckpt", OPTION)
    remote.filesystem.pipe_file("bucket/torn/best.ckpt", b"the one before")
    path = tmp_path / "best.ckpt"
    path.write_bytes(b"x" * 20_000_000)
    seen, done = set(), threading.Event()

    def watch():
        reader = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
        while not done.is_set():
            seen.add(reader.info("bucket/torn/best.ckpt", refresh=True)["size"])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        copy = follow(remote)
        copy.submit(path)
        copy.close()
    finally:
        done.set()
        watcher.join(20)
    assert (copy.problem, remote.failures) == (None, 0)
    assert seen <= {len(b"the one before"), 20_000_000}
    assert names(remote, "bucket/torn") == {"best.ckpt", "best.ckpt.sha256"}


def test_giving_up_says_why_and_keeps_the_old_file(tmp_path):
    remote = FlakyFile(f"file://{tmp_path}/best.ckpt", OPTION)
    remote.failures = 99
    (tmp_path / "best.ckpt").write_bytes(b"the one before")
    (tmp_path / "new").write_bytes(b"y" * 1000)
    copy = follow(remote, attempts=3)
    copy.submit(tmp_path / "new")
    copy.close()
    assert copy.problem == "ConnectionResetError: the line is cut"
    assert remote.failures == 96
    assert (tmp_path / "best.ckpt").read_bytes() == b"the one before"


@pytest.mark.parametrize(("written_before", "content"), [(0, b"the one before"), (1, b"new")])
def test_a_checksum_never_names_other_content(written_before, content, tmp_path, monkeypatch):
    """The disk is full before the first writing of the checksum, or after it."""
    remote = RemoteFile(f"file://{tmp_path}/best.ckpt", OPTION)
    before = remote.write(io.BytesIO(b"the one before"))
    write, left = remote.filesystem.pipe_file, [None] * written_before

    def write_or_fail(path, value):
        if not left:
            raise OSError(28, "No space left on device")
        left.pop()
        write(path, value)

    monkeypatch.setattr(remote.filesystem, "pipe_file", write_or_fail)
    with pytest.raises(OSError, match="No space left"):
        remote.write(io.BytesIO(b"new"))
    assert (tmp_path / "best.ckpt").read_bytes() == content
    assert (tmp_path / "best.ckpt.sha256").read_text() == ("" if written_before else f"{before}  best.ckpt\n")


def test_training_does_not_wait_and_only_the_newest_is_copied(tmp_path):
    written, begins, may_end = [], threading.Event(), threading.Event()

    class SlowFile(RemoteFile):
        def write(self, content):
            begins.set()
            may_end.wait(60)
            written.append(content.read())
            return "sum"

    copy = follow(SlowFile(f"file://{tmp_path}/best.ckpt", OPTION))
    for number in range(5):
        path = tmp_path / "best"
        path.write_bytes(str(number).encode())
        copy.submit(path)
        path.unlink()  # Lightning replaces the file while it is being copied
        assert begins.wait(20)
    assert written == []
    may_end.set()
    copy.close()
    assert written == [b"0", b"4"]


@pytest.mark.parametrize(
    ("url", "message"),
    [("gopher://somewhere/best.ckpt", "cannot be used"), ("file:///proc/none/best.ckpt", "Nothing can be written")],
)
def test_addresses_that_cannot_work(url, message):
    with pytest.raises(InputError, match=message):
        RemoteFile(url, OPTION).check()


def test_s3_without_credentials(s3, monkeypatch, tmp_path):
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    began = time.monotonic()
    with pytest.raises(InputError, match="check the address and your credentials"):
        RemoteFile("s3://bucket/best.ckpt", OPTION).check()
    assert time.monotonic() - began < 60


RECIPE = replace(
    preset("digits"),
    embed_dim=16,
    depth=1,
    num_heads=2,
    total_steps=6,
    validate_every_steps=2,
    target_batch_size=32,
)


def arguments(folder: Path) -> list:
    (folder / "recipe.json").write_text(RECIPE.to_json())
    return ["--recipe", folder / "recipe.json", "--output-dir", folder, "--run-id", "run", "--batch-size", 16]


def test_a_run_copies_its_best_checkpoint(s3, tmp_path):
    options = arguments(tmp_path)
    url = ["--best-checkpoint-url", "s3://bucket/run/best.ckpt"]
    assert run_cluster(2, [*options, *url], environment=s3, log=tmp_path / "log") == [0, 0], (
        tmp_path / "log"
    ).read_text()
    local = (tmp_path / "run" / "ddp-2" / "checkpoints" / "best.ckpt").read_bytes()
    remote = RemoteFile("s3://bucket/run/best.ckpt", OPTION)
    assert remote.filesystem.cat_file(remote.path) == local
    assert hashlib.sha256(local).hexdigest() in remote.filesystem.cat_file(f"{remote.path}.sha256").decode()
    assert torch.load(io.BytesIO(local), weights_only=True)["recipe"] == RECIPE.to_json()


@pytest.mark.parametrize("lost", ["the address", "the summary"])
def test_a_best_checkpoint_that_never_arrived_is_copied_when_the_run_is_started_again(tmp_path, lost):
    """torchrun does so with --max-restarts. Without a summary the run has results to make, and nothing to validate."""
    away, log = tmp_path / "away", tmp_path / "log"
    options = [*arguments(tmp_path), "--best-checkpoint-url", f"file://{away}/best.ckpt"]
    with Cluster(1, train_without_uploads, [str(option) for option in options], log=log) as cluster:
        assert cluster.results() == [1]
    assert "could not be copied" in log.read_text()
    folder = RunFolder(tmp_path / "run" / "single-1")
    before = json.loads(folder.summary.read_text())
    assert before["best_checkpoint"]["sha256"] is None
    if lost == "the summary":
        folder.summary.unlink()
    with Cluster(1, train_without_uploads, [str(option) for option in [*options, "--resume"]], log=log) as cluster:
        assert cluster.results() == [1], "it is still not there"
    assert run_cluster(1, [*options, "--resume"], log=log) == [0], log.read_text()
    content = (folder.checkpoints / "best.ckpt").read_bytes()
    assert (away / "best.ckpt").read_bytes() == content
    after = json.loads(folder.summary.read_text())
    assert after["best_checkpoint"]["sha256"] == hashlib.sha256(content).hexdigest()
    if lost == "the address":
        assert after == before | {"best_checkpoint": after["best_checkpoint"]}, "what was measured stays"


def train_without_uploads(options: list[str]) -> int:
    """Like `train`, but the remote address takes a probe and no file."""
    from baseline_ddp import results, session

    def refuse(remote, content):
        raise OSError("no room there")

    RemoteFile.write = refuse
    session.RemoteCopy = results.RemoteCopy = partial(RemoteCopy, attempts=1)
    return train(options)


def test_a_run_that_was_moved_keeps_its_best_checkpoint(tmp_path):
    """As when the folder is mounted elsewhere: what Lightning stored in the snapshot are absolute paths."""
    before, after, log = tmp_path / "before", tmp_path / "after", tmp_path / "log"
    before.mkdir()
    train_with_accuracy(1, [*arguments(before), "--max-steps", 2], log)
    best = (before / "run" / "single-1" / "checkpoints" / "best.ckpt").read_bytes()
    before.rename(after)
    train_with_accuracy(0, [*arguments(after), "--resume"], log)
    assert json.loads((after / "run" / "single-1" / "summary.json").read_text())["steps"] == 6
    assert (after / "run" / "single-1" / "checkpoints" / "best.ckpt").read_bytes() == best


def test_snapshots_of_earlier_versions_have_the_best_score_under_the_same_key(tmp_path):
    assert best_checkpoint(tmp_path).state_key == ModelCheckpoint(monitor="val/top1", mode="max").state_key


def train_with_accuracy(accuracy: int, options: list, log: Path) -> None:
    with Cluster(1, train_and_guess, [str(option) for option in options], accuracy, log=log) as cluster:
        assert cluster.results() == [0], log.read_text()


def train_and_guess(options: list[str], accuracy: int) -> int:
    """Like `train`, but validation images are all guessed right (accuracy 1) or all wrong (0)."""

    def guess(self, batch, batch_idx):
        labels = batch[1].clamp(min=0)
        self.val_loss.update(1.0)
        self.val_metrics.update(F.one_hot((labels + 1 - accuracy) % 10, 10).float(), batch[1])

    ClassificationTask.validation_step = guess
    return train(options)
