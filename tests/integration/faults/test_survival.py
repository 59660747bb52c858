"""What a peer keeps on disk for its return, and what a bad disk costs it."""

import logging
import os
import resource
import signal
import socket
import warnings
from functools import partial
from threading import Event
from types import SimpleNamespace

import msgpack
import pytest
import torch

from recipe.data.vision_data import VisionData
from recipe.errors import InputError
from recipe.run_folder import RunFolder
from recipe.training.checkpoint_io import AtomicCheckpointIO
from recipe.training.loggers import PatientTensorBoardLogger
from swarm.membership.announcer import addresses_in
from swarm.network.known_peers import MAX_REMEMBERED, met_before, read_book, write_book
from swarm.network.signed_records import peer_of
from swarm.peer.checkpoints import newest_checkpoint, save_own, sweep_checkpoints
from swarm.peer.session import Session
from swarm.training.throughput import MAX_DROPPED, Throughput
from tests.helpers.owners import subkey_of

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADDRESS = f"/ip4/203.0.113.5/tcp/31337/p2p/{PEER}"


class Entry:
    def __init__(self, value: object):
        self.value = value


# ---- addresses -----------------------------------------------------------------------------------------------------


def test_a_book_holds_addresses_and_nothing_else(tmp_path):
    book = RunFolder(tmp_path / "run" / "me").peers
    book.parent.mkdir(parents=True)
    assert read_book(book) == []
    write_book(book, [ADDRESS, ADDRESS, "/ip4/1.2.3.4"])
    assert read_book(book) == [ADDRESS]
    for damaged in ("", "[]", "{", '{"addresses": 7}', '{"addresses": [7, null, "x"]}'):
        book.write_text(damaged)
        assert read_book(book) == []
    write_book(tmp_path / "nowhere" / "book", [ADDRESS])  # a disk that does not work costs the book only


def test_only_a_listening_peer_is_met_again(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        here = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{PEER}"
        gone = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
        for run, name, address in (("run", "me", gone), ("run", "you", here), ("other", "me", gone)):
            RunFolder.create(tmp_path, run, name)
            write_book(RunFolder(tmp_path / run / name).peers, [address])
        assert met_before(tmp_path, "run") == [here]
        assert met_before(tmp_path, "other") == []
        assert met_before(tmp_path, None, [here]) == [here]
        assert met_before(tmp_path, None, [gone.replace(PEER, PEER[:-1] + "M")]) == [], "another swarm"
        assert met_before(tmp_path / "empty", "run") == []


def test_addresses_of_strangers_are_bounded_and_their_own():
    subkey, me = subkey_of("anna"), peer_of(subkey_of("me"))
    anna = peer_of(subkey)
    address = f"/ip4/203.0.113.5/tcp/31337/p2p/{anna}"
    assert addresses_in(Entry({subkey: Entry(msgpack.packb([address]))}), me) == [address]
    assert addresses_in(Entry({subkey: Entry(msgpack.packb([address]))}), anna) == []
    assert addresses_in(Entry({subkey: Entry(msgpack.packb([ADDRESS]))}), me) == [], "another peer's address"
    many = [f"/ip4/203.0.113.5/tcp/{port}/p2p/{anna}" for port in range(1, 999)]
    assert 0 < len(addresses_in(Entry({subkey: Entry(msgpack.packb(many))}), me)) < MAX_REMEMBERED
    for nonsense in (
        None,
        7,
        {7: Entry(msgpack.packb([address]))},
        {subkey: 7},
        {subkey: Entry(address)},
        {subkey: Entry(b"\xc1")},
        {subkey: Entry([[]])},
    ):
        assert addresses_in(Entry(nonsense), me) == []


# ---- how a run ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "resumed_step", "step", "has_used_up", "outcome"),
    [
        (3, None, 10, False, "completed"),
        (3, None, 10, True, "completed"),
        (0, 10, 10, False, "completed"),
        (0, None, 10, False, "over before this peer took part"),
        (0, 9, 10**6, False, "over before this peer took part"),
        (3, None, 9, False, "time is up"),
        (3, None, 9, True, "traffic limit reached"),
    ],
)
def test_only_a_peer_that_has_taken_part_completes_a_run(updates, resumed_step, step, has_used_up, outcome):
    session = SimpleNamespace(
        supervisor=SimpleNamespace(found=None),
        traffic=SimpleNamespace(has_stopped=has_used_up),
        pause=SimpleNamespace(has_stopped=False),
        stop_requested=Event(),
        options=SimpleNamespace(leaving=SimpleNamespace(target_accuracy=None)),
        metrics=SimpleNamespace(updates=updates),
        work=SimpleNamespace(own=SimpleNamespace(resumed_step=resumed_step)),
        why_ended=None,
    )
    assert Session.outcome(session, SimpleNamespace(global_step=step, max_steps=10, callback_metrics={})) == outcome


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def save(path, step: int) -> None:
    AtomicCheckpointIO().save_checkpoint({"global_step": step, VisionData.__qualname__: {}, "state_dict": {}}, path)


def test_the_newest_checkpoint_that_can_be_read(tmp_path):
    assert newest_checkpoint(tmp_path, True, VisionData.__qualname__) == (None, None)
    for step in (7, 9):
        save_own(tmp_path, step, partial(save, step=step))
    assert [path.name for path in tmp_path.iterdir()] == ["own-step-9.ckpt"], (
        "the newest of these, and never gone on from"
    )
    for number, name in enumerate(("best.ckpt", "step=50.ckpt", "last.ckpt", ".last.ckpt.7.tmp")):
        save(tmp_path / name, step=number)
        os.utime(tmp_path / name, (number, number))
    assert newest_checkpoint(tmp_path, True, VisionData.__qualname__)[1]["global_step"] == 2
    (tmp_path / "last.ckpt").write_bytes(b"half a file")
    path, content = newest_checkpoint(tmp_path, True, VisionData.__qualname__)
    assert (path.name, content["global_step"]) == ("step=50.ckpt", 1)
    spoiled = {"global_step": 3, VisionData.__qualname__: {}, "state_dict": {"weight": torch.tensor([1.0, torch.nan])}}
    AtomicCheckpointIO().save_checkpoint(spoiled, tmp_path / "step=60.ckpt")
    assert newest_checkpoint(tmp_path, True, VisionData.__qualname__)[0].name == "step=50.ckpt", (
        "the newest one is not finite"
    )
    for file in tmp_path.glob("*.ckpt"):
        file.write_bytes(b"")
    assert newest_checkpoint(tmp_path, False, VisionData.__qualname__) == (None, None)
    with pytest.raises(InputError, match="No checkpoint in"):
        newest_checkpoint(tmp_path, True, VisionData.__qualname__)


def test_a_wrong_clock_makes_no_checkpoint_the_newest(tmp_path):
    for step, written_at in ((50, 2e9), (100, 1e9)):
        save(tmp_path / f"step={step}.ckpt", step)
        os.utime(tmp_path / f"step={step}.ckpt", (written_at, written_at))
    assert newest_checkpoint(tmp_path, True, VisionData.__qualname__)[0].name == "step=100.ckpt"


def test_what_earlier_lives_left_does_not_fill_the_disk(tmp_path):
    kept = ["best.ckpt", "step=150.ckpt", "step=200.ckpt", "step=250.ckpt", "step=x.ckpt"]
    for name in (*kept, "step=50.ckpt", "step=100.ckpt", "step=300.ckpt"):
        (tmp_path / name).touch()
    sweep_checkpoints(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept[:-1], "step=300.ckpt", "step=x.ckpt"]


@pytest.fixture
def full_disk():
    """A disk on which the kernel refuses to write more than 64 KiB to a file, as it does when a disk is full."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_the_checkpoint_only(tmp_path, full_disk, caplog):
    path = tmp_path / "last.ckpt"
    files, big = AtomicCheckpointIO(), {"weights": torch.zeros(100_000)}
    files.save_checkpoint({"step": 1}, path)
    for _ in range(3):
        files.save_checkpoint(big, path)
    assert torch.load(path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "make room" in warning
    files.save_checkpoint({"step": 2}, path)
    assert torch.load(path) == {"step": 2}


def test_an_old_checkpoint_stays_until_a_newer_one_could_be_written(tmp_path, full_disk):
    """Lightning has the oldest one removed after each attempt, successful or not."""
    files, big = AtomicCheckpointIO(), {"weights": torch.zeros(100_000)}
    for step in (1, 2):
        files.save_checkpoint({"step": step}, tmp_path / f"step={step}.ckpt")
    for step in (3, 4):
        files.save_checkpoint(big, tmp_path / f"step={step}.ckpt")
        files.remove_checkpoint(tmp_path / f"step={step - 2}.ckpt")
    assert {file.name for file in tmp_path.iterdir()} == {"step=1.ckpt", "step=2.ckpt"}
    files.save_checkpoint({"step": 5}, tmp_path / "step=5.ckpt")
    files.remove_checkpoint(tmp_path / "step=3.ckpt")
    assert [file.name for file in tmp_path.iterdir()] == ["step=5.ckpt"]


def test_own_weights_stay_until_newer_ones_could_be_written(tmp_path, full_disk):
    files = AtomicCheckpointIO()
    small, big = {"step": 1}, {"weights": torch.zeros(100_000)}
    assert save_own(tmp_path, 7, partial(files.save_checkpoint, small)) == tmp_path / "own-step-7.ckpt"
    assert save_own(tmp_path, 9, partial(files.save_checkpoint, big)) is None
    assert [file.name for file in tmp_path.iterdir()] == ["own-step-7.ckpt"]
    assert save_own(tmp_path, 11, partial(files.save_checkpoint, small)) == tmp_path / "own-step-11.ckpt"
    assert [file.name for file in tmp_path.iterdir()] == ["own-step-11.ckpt"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_costs_the_curves_only(tmp_path, full_disk):
    board = PatientTensorBoardLogger(tmp_path, name="", version="")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3000):
            board.log_metrics({"loss": 1.0}, step)
            if step % 500 == 0:
                board.save()
        board.finalize("success")
    (warning,) = (str(item.message) for item in caught if item.category is UserWarning)
    assert "TensorBoard files cannot be written any more" in warning


def test_every_third_useless_step_in_a_row_is_noticed():
    """The donor that is asked then may have just gone; after another three drops another one is asked."""
    throughput = Throughput()
    assert [throughput.drop_all() for _ in range(2 * MAX_DROPPED + 2)].count(True) == 2
    throughput.note(8, 1.0)
    throughput.take()
    assert [throughput.drop_all() for _ in range(MAX_DROPPED)] == [False] * (MAX_DROPPED - 1) + [True]
