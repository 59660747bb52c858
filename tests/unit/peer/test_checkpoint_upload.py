"""Checkpoints are uploaded beside the training, and failures of the upload cost it nothing."""

import io
import logging
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import pytest

from recipe.errors import InputError
from recipe.remote_file import RemoteCopy, RemoteFile, describe
from swarm.peer.callbacks.checkpoint_upload import OPTION, CheckpointUpload
from swarm.peer.options import parse_options


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder.parent / "summary.json").write_text("{}")
    return folder


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def finish(upload: CheckpointUpload, checkpoints: Path, seconds: float = 60) -> list[str]:
    """The lines that the person is told at the end."""
    said: list[str] = []
    upload.finish(checkpoints.parent / "summary.json", said.append, seconds)
    return said


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_the_best_the_newest_and_the_summary_arrive(kind, checkpoints, tmp_path):
    url = "memory://bucket/here" if kind == "memory" else f"file://{tmp_path}/far/away"
    upload = CheckpointUpload(f"{url}/", "night-1", "ada")
    upload.check()
    for name in ("step=50.ckpt", "best.ckpt", "step=100.ckpt", "own-step-7.ckpt", "last.ckpt"):
        upload.saved(path := write(checkpoints / name, name.encode() * 1000))
        path.unlink()  # Lightning deletes and replaces them meanwhile
    assert not [line for line in finish(upload, checkpoints) if "Not uploaded" in line]
    files, folder = fsspec.core.url_to_fs(f"{url}/night-1/ada")
    found = {path.rpartition("/")[2]: files.cat_file(path) for path in files.find(folder)}
    assert found["best.ckpt"] == b"best.ckpt" * 1000
    assert found["last.ckpt"] == b"last.ckpt" * 1000
    assert found["summary.json"] == b"{}"
    assert {name.removesuffix(".sha256") for name in found} == {"best.ckpt", "last.ckpt", "summary.json"}


def test_what_uploads_that_were_cut_off_have_left_is_removed_after_a_day(tmp_path):
    names = ("last.ckpt.0123abcd.part", "last.ckpt.89abcdef.part", "best.ckpt.0123abcd.part", "last.ckpt.mine.part")
    old, young, *others = (write(tmp_path / name, b"half") for name in names)
    two_days_ago = time.time() - 2 * 24 * 3600
    for path in (old, *others):
        os.utime(path, (two_days_ago, two_days_ago))
    RemoteFile(f"file://{tmp_path}/last.ckpt", OPTION).write(io.BytesIO(b"whole"))
    left = {young, *others, tmp_path / "last.ckpt", tmp_path / "last.ckpt.sha256"}
    assert set(tmp_path.iterdir()) == left, "a young one may be on its way"


def test_what_was_cut_off_shortly_before_is_removed_a_day_later(tmp_path, monkeypatch):
    """As where a peer is killed in an upload, and its supervisor starts it again at once."""
    left = write(tmp_path / "last.ckpt.0123abcd.part", b"half")
    remote, now = RemoteFile(f"file://{tmp_path}/last.ckpt", OPTION), datetime.now(UTC)
    remote.write(io.BytesIO(b"whole"))
    assert left.exists()

    class Tomorrow(datetime):
        """The next day."""

        @classmethod
        def now(cls, tz=None):
            return now + timedelta(hours=25)

    monkeypatch.setattr("recipe.remote_file.datetime", Tomorrow)
    remote.write(io.BytesIO(b"whole"))
    assert not left.exists()


class Gate(RemoteFile):
    """A remote file on a line on which nothing moves before it is opened."""

    def __init__(self, tmp_path: Path):
        super().__init__(f"file://{tmp_path}/gate.ckpt", OPTION)
        self.begun, self.opened = threading.Event(), threading.Event()
        self.written: list[bytes] = []

    def write(self, content):
        self.begun.set()
        assert self.opened.wait(60)
        self.written.append(content.read())
        return "digest"


def test_a_slow_line_gets_the_newest_and_the_training_does_not_wait(tmp_path):
    copy = RemoteCopy(gate := Gate(tmp_path))
    for number in range(4):
        copy.submit(path := write(tmp_path / "step.ckpt", str(number).encode()))
        path.unlink()
        assert gate.begun.wait(60)
    assert copy.bytes_left == 2, "one is on its way, one waits"
    gate.opened.set()
    assert copy.close()
    assert gate.written == [b"0", b"3"]
    assert copy.bytes_left == 0


def test_a_file_that_cannot_be_opened_does_not_take_the_place_of_one_that_waits(tmp_path):
    copy = RemoteCopy(gate := Gate(tmp_path))
    copy.submit(write(tmp_path / "a", b"first"))
    assert gate.begun.wait(60)
    copy.submit(write(tmp_path / "b", b"second"))
    with pytest.raises(FileNotFoundError):
        copy.submit(tmp_path / "missing")
    gate.opened.set()
    assert copy.close(60)
    assert (gate.written, copy.problem) == ([b"first", b"second"], None)


def test_a_newer_one_ends_the_waiting_for_the_next_attempt(tmp_path):
    class Broken(RemoteFile):
        tried = threading.Event()

        def write(self, content):
            if content.read() == b"old":
                self.tried.set()
                raise ConnectionResetError("cut")
            return "digest"

    copy = RemoteCopy(Broken(f"file://{tmp_path}/x", OPTION), first_pause_seconds=3600)
    copy.submit(write(tmp_path / "a", b"old"))
    assert Broken.tried.wait(60)
    copy.submit(write(tmp_path / "a", b"new"))
    assert copy.close(60)
    assert (copy.sha256, copy.problem) == ("digest", None)


def test_a_storage_that_fails_is_told_of_once_and_the_end_is_bounded(checkpoints, tmp_path, caplog):
    upload = CheckpointUpload(f"file://{tmp_path}/far", "night-1", "ada", attempts=2, first_pause_seconds=0.01)
    (tmp_path / "far").write_text("where a folder has to be")
    with caplog.at_level(logging.WARNING):
        for name in ("best.ckpt", "last.ckpt"):
            upload.saved(write(checkpoints / name, b"x"))
        said = finish(upload, checkpoints)
    assert len([record for record in caplog.records if "Nothing could be uploaded" in record.getMessage()]) == 1
    assert said[-1].startswith(f"Not uploaded to {upload.url}: best.ckpt, last.ckpt, summary.json. Copy them")


def test_a_file_that_could_not_be_read_is_named_at_the_end(checkpoints, tmp_path):
    upload = CheckpointUpload(f"file://{tmp_path}/far", "night-1", "ada")
    upload.saved(write(checkpoints / "last.ckpt", b"an old one"))
    upload.saved(checkpoints / "best.ckpt")  # was never written: the disk is full
    upload.saved(checkpoints / "step=100.ckpt")
    assert finish(upload, checkpoints)[-1].startswith(f"Not uploaded to {upload.url}: best.ckpt, last.ckpt. Copy them")


def test_the_end_does_not_wait_for_ever(checkpoints, tmp_path, monkeypatch):
    upload, gate = CheckpointUpload(f"file://{tmp_path}/far", "night-1", "ada"), threading.Event()
    monkeypatch.setattr(RemoteFile, "write", lambda self, content: gate.wait(60) and "digest")
    upload.saved(write(checkpoints / "last.ckpt", b"x" * 100))
    said = finish(upload, checkpoints, seconds=0.5)
    assert said[0].startswith("Uploading what is left")
    assert said[-1].startswith("Not uploaded")
    gate.set()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://bucket/folder", "gcsfs"),
        ("abfs://container/folder", "adlfs"),
        ("gopher://host/folder", "cannot be used"),
    ],
)
def test_an_address_that_cannot_be_opened_is_refused_with_the_name_of_the_package(url, says):
    with pytest.raises(InputError, match=says) as error:
        parse_options(["--upload-to", url])
    assert "--upload-to" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["ftp://ada:hunter22@host/folder", "s3://AKIA:hunter22@bucket/x", "https://host/x?sig=hunter22"]
)
def test_a_password_in_the_address_is_refused_without_saying_it(url):
    with pytest.raises(InputError, match="--upload-to must not hold a password") as error:
        parse_options(["--upload-to", url])
    assert "hunter22" not in str(error.value)


def test_no_error_tells_a_secret(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    text = "403 of https://ada:pw@host/key?X-Amz-Signature=abc123 with wJalrXUtnFEMI\nand more"
    said = describe(PermissionError(text))
    assert said == "PermissionError: 403 of https://…@host/key?… with …"


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "far").write_text("a file")
    with pytest.raises(InputError, match="Nothing can be written to"):
        CheckpointUpload(f"file://{tmp_path}/far", "night-1", "ada").check()
