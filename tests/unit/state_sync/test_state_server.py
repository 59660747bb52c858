"""How a state goes from a donor to who downloads it: in pieces that fit together, from one copy for all who ask.

Streams are pairs of sockets here, served as those of p2pd are.
"""

import asyncio
import contextlib
import pickle
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hivemind.p2p import P2P
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.proto.runtime_pb2 import Tensor
from hivemind.utils import MPFuture, MSGPackSerializer

from swarm.protocol.messages import RoundFailed
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.state_sync import download as download_module
from swarm.state_sync import uploads as uploads_module
from swarm.state_sync.average_log import MAX_AVERAGES
from swarm.state_sync.download import Busy, Download, NoState
from swarm.state_sync.download_messages import PIECE_BYTES, SLICE_BYTES, Offer, Wish, ask_for
from swarm.state_sync.pull import Pull
from swarm.state_sync.serialization import unpack
from swarm.state_sync.squeeze import CHUNK_BYTES, squeeze, unsqueeze
from swarm.state_sync.state_downloader import StateDownloader
from swarm.state_sync.state_server import StateServer
from swarm.state_sync.transfer_status import TransferStatus
from swarm.state_sync.uploads import MAX_SNAPSHOTS, MAX_STATE_UPLOADS
from tests.helpers.hurry import shorter
from tests.helpers.mutation import mutated

IN_A_RACE = replace(DEFAULT_TIMEOUTS, look_seconds=0.02, first_donor_seconds=0.1, race_seconds=0.3, alone_seconds=0.3)
STATE_BYTES = 3 * SLICE_BYTES + PIECE_BYTES + 5


class Donor:
    """Without its process; exports are numbered, as if the state changed all the time."""

    def __init__(self, timeouts: Timeouts = DEFAULT_TIMEOUTS):
        self.step, self.is_averaging = 0, False
        self.server = StateServer(self._export, self, TransferStatus(), timeouts)
        self.exports, self.handed_over, self.lines = 0, [], []

    async def _export(self) -> tuple[bytes, torch.Tensor]:
        self.exports += 1
        content = torch.full((STATE_BYTES,), self.exports, dtype=torch.uint8)
        await asyncio.sleep(0)
        return MSGPackSerializer.dumps(("description", [])), content

    def expect_joiner(self, peer_id) -> None:
        self.handed_over.append(peer_id)

    def answers(self, requests, context):
        return self.server.rpc_download_state(requests, context)

    async def serve(self, peer: str, reader, writer) -> None:
        """A stream, as `swarm.network.hivemind_patches` does."""

        async def requests():
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    yield (await P2P.receive_protobuf(DownloadData, reader))[0]

        answers = self.answers(requests(), SimpleNamespace(remote_id=peer))
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            async for message in answers:
                await P2P.send_protobuf(message, writer)

    async def open_stream(self, peer: str):
        """To this donor."""
        ours, theirs = socket.socketpair()
        line = asyncio.ensure_future(self.serve(peer, *await asyncio.open_connection(sock=theirs)))
        self.lines.append(line)
        return await asyncio.open_connection(sock=ours)

    def hang_up(self) -> None:
        """All lines of this donor break down."""
        for line in self.lines:
            line.cancel()
        self.lines.clear()


async def fetch(donor: Donor, peer: str, average_of: int | None = None, **wishes) -> Download:
    download = Download("the donor", 10**9, average_of, **wishes)
    await Pull(download, lambda: donor.open_stream(peer), lambda: None).run()
    return download


def value_of(download: Download) -> int:
    """The number of the export that has arrived."""
    (value,) = np.unique(download.content.numpy())
    assert len(download.content) == STATE_BYTES
    return int(value)


async def until(condition) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about")


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_pieces_fit_together_and_all_who_ask_at_once_share_a_copy():
    async def test():
        donor = Donor()
        for download in await asyncio.gather(fetch(donor, "a"), fetch(donor, "b")):
            assert value_of(download) == 1
            assert MSGPackSerializer.loads(download.offer.description) == ("description", [])
        assert donor.exports == 1
        await until(lambda: not donor.server.uploads.of), "nothing is kept"

    run(test)


def test_who_has_taken_the_state_gets_the_averages_of_the_updates_since():
    async def test():
        donor, average = Donor(), torch.arange(300_000.0) / 3
        await fetch(donor, "anna")
        await donor.server.keep_average(0, b"before", b"after", average)
        donor.step = 1
        download = await fetch(donor, "anna", average_of=0)
        assert donor.handed_over == [], "it has yet to ask for more"
        description, layout = MSGPackSerializer.loads(download.offer.description)
        assert list(description) == [0, b"before", [b"after"]]
        assert torch.equal(*unpack(layout, download.content), average)
        for peer in ("anna", "a stranger"):
            with pytest.raises(RoundFailed, match="does not have it"):
                await fetch(donor, peer, average_of=1)
        assert donor.handed_over == ["anna"], "it is there, and waited for"

    run(test)


def test_who_waits_for_an_average_has_it_when_the_round_ends():
    async def test():
        donor, average = Donor(replace(DEFAULT_TIMEOUTS, making_seconds=1.0)), torch.arange(300_000.0)
        await fetch(donor, "anna")
        with pytest.raises(RoundFailed, match="does not have it"):  # at once: there is no round
            await asyncio.wait_for(fetch(donor, "anna", average_of=0, waits=True), 0.1)
        assert donor.handed_over == ["anna"], "it can come to the next round"
        donor.is_averaging = True
        with pytest.raises(RoundFailed, match="does not have it"):
            await fetch(donor, "anna", average_of=0, waits=True)
        assert donor.handed_over == ["anna"], "the round has closed without it"
        waiting = asyncio.ensure_future(fetch(donor, "anna", average_of=0, waits=True))
        assert not (await asyncio.wait([waiting], timeout=0.3))[0]
        await donor.server.keep_average(0, b"before", b"after", average)
        _, layout = MSGPackSerializer.loads((download := await waiting).offer.description)
        assert torch.equal(*unpack(layout, download.content), average)

    run(test)


def test_a_state_that_has_changed_is_copied_anew():
    async def test():
        donor = Donor()
        await fetch(donor, "a")
        donor.server.state_changed()
        assert value_of(await fetch(donor, "b")) == 2

    run(test)


def test_a_few_get_the_state_at_a_time_and_the_others_hear_how_long_that_takes():
    async def test():
        donor = Donor()
        streams = [await begin(donor, f"peer {number}") for number in range(MAX_STATE_UPLOADS)]
        with pytest.raises(Busy) as busy:
            await fetch(donor, "another")
        assert 0.5 <= busy.value.seconds < 600
        await donor.server.keep_average(0, b"", b"", torch.ones(100))
        assert len((await fetch(donor, "another", average_of=0)).content) == 200, "an average is short"
        await finish(streams.pop())
        assert value_of(await fetch(donor, "another")) == 1
        for upload in donor.server.uploads.of.values():
            upload.moved_at -= DEFAULT_TIMEOUTS.stalled_seconds
        for _ in range(MAX_STATE_UPLOADS):
            streams.append(await begin(donor, f"late {len(streams)}"))
        assert len(streams) == MAX_STATE_UPLOADS + 1, "who takes nothing is in nobody's way"
        for _, writer in streams:
            writer.close()

    run(test)


async def begin(donor: Donor, peer: str):
    """A download that stops after the first piece."""
    reader, writer = await donor.open_stream(peer)
    for metadata in (Wish().to_bytes(), ask_for(0)):
        await P2P.send_protobuf(DownloadData(metadata=metadata), writer)
    offer, _ = await P2P.receive_protobuf(DownloadData, reader)
    assert Offer.from_bytes(offer.metadata, 10**9).num_bytes == STATE_BYTES
    await P2P.receive_protobuf(DownloadData, reader)
    return reader, writer


async def finish(stream) -> None:
    reader, writer = stream
    for index in range(1, -(-STATE_BYTES // PIECE_BYTES)):
        await P2P.send_protobuf(DownloadData(metadata=ask_for(index)), writer)
        await P2P.receive_protobuf(DownloadData, reader)
    writer.close()


def test_a_stranger_cannot_fill_a_donors_memory(monkeypatch):
    """Who asks again and again has one download, and who comes under many names does not get a copy for each."""
    monkeypatch.setattr(uploads_module, "MAX_STATE_UPLOADS", 1000)

    async def test():
        donor, writers = Donor(), []
        for _ in range(5):
            writers.append((await begin(donor, "a"))[1])
            donor.server.state_changed()
        assert len(donor.server.uploads.of) == 1
        for number in range(MAX_SNAPSHOTS - 1):
            writers.append((await begin(donor, f"peer {number}"))[1])
            donor.server.state_changed()
        with pytest.raises(RoundFailed, match="does not have it"):
            await fetch(donor, "one more")
        assert len(donor.server.uploads.of) == MAX_SNAPSHOTS
        for writer in writers:
            writer.close()

    run(test)


def test_who_asks_for_nothing_gets_nothing():
    async def test():
        donor = Donor()
        for metadata in (b"", b"x", bytes(1000), Offer().to_bytes()):
            reader, writer = await donor.open_stream("a")
            await P2P.send_protobuf(DownloadData(metadata=metadata), writer)
            with pytest.raises(asyncio.IncompleteReadError):
                await P2P.receive_protobuf(DownloadData, reader)
            writer.close()
        assert donor.exports == 0
        reader, writer = await begin(donor, "a")
        await P2P.send_protobuf(DownloadData(metadata=b"a piece, please"), writer)
        with pytest.raises(asyncio.IncompleteReadError):
            await P2P.receive_protobuf(DownloadData, reader)
        writer.close()

    run(test)


def test_nobody_can_ask_for_the_same_piece_without_end(monkeypatch):
    monkeypatch.setattr(uploads_module, "MAX_WINDOW_BYTES", PIECE_BYTES)

    async def test():
        donor = Donor()
        reader, writer = await begin(donor, "a")

        async def ask_again_and_again() -> None:
            while True:
                await P2P.send_protobuf(DownloadData(metadata=ask_for(0)), writer)
                await P2P.receive_protobuf(DownloadData, reader)

        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await ask_again_and_again()
        assert donor.server.uploads.of["a"].sent_bytes < 2 * STATE_BYTES + 3 * PIECE_BYTES
        writer.close()

    run(test)


def test_who_hangs_up_in_the_middle_can_go_on_for_a_while_and_is_forgotten_then(monkeypatch):
    async def test():
        donor = Donor()
        _, writer = await begin(donor, "a")
        writer.close()
        await until(lambda: not donor.server.uploads.of["a"].streams)
        donor.server.uploads.sweep()
        assert "a" in donor.server.uploads.of
        donor.server.uploads.of["a"].moved_at -= 2 * DEFAULT_TIMEOUTS.kept_seconds
        donor.server.uploads.sweep()
        assert donor.server.uploads.of == {}

    run(test)


def test_a_stranger_cannot_make_the_trainer_export_without_end():
    async def test():
        donor = Donor()
        shared = [donor.server.snapshot() for _ in range(3)]
        assert shared[0] is shared[1] is shared[2], "it has not been made yet"
        donor.server.state_changed()
        newer = donor.server.snapshot()
        assert newer is not shared[0]
        await asyncio.wait([shared[0].ready, newer.ready])
        await asyncio.sleep(0)
        assert donor.server.snapshot() is not newer

    run(test)


def test_a_broken_download_goes_on_with_what_is_missing(monkeypatch):
    monkeypatch.setattr("swarm.state_sync.pull.AGAIN_SECONDS", 0.01)

    async def test():
        donor, breaks = Donor(), 0
        download = Download("the donor", 10**9)

        def break_down() -> None:
            nonlocal breaks
            if breaks < 3 and download.offer is not None and download.num_bytes > breaks * STATE_BYTES / 4:
                breaks += 1
                donor.hang_up()

        await Pull(download, lambda: donor.open_stream("a"), break_down).run()
        assert breaks == 3
        assert value_of(download) == donor.exports == 1
        sent = donor.server.uploads.of["a"].sent_bytes if "a" in donor.server.uploads.of else STATE_BYTES
        assert sent < 2 * STATE_BYTES, "what was here was not sent again"

    run(test)


def test_what_the_donor_has_not_kept_is_downloaded_anew(monkeypatch):
    monkeypatch.setattr("swarm.state_sync.pull.AGAIN_SECONDS", 0.01)

    async def test():
        donor, download, breaks = Donor(), Download("the donor", 10**9), []

        def break_down() -> None:
            if not breaks and download.num_bytes > SLICE_BYTES:
                breaks.append(True)
                donor.server.state_changed()
                donor.server.uploads.of.clear()
                donor.hang_up()

        await Pull(download, lambda: donor.open_stream("a"), break_down).run()
        assert breaks
        assert value_of(download) == 2

    run(test)


class Newcomer:
    """Downloads from donors in the same process."""

    def __init__(self, donors: dict, timeouts: Timeouts = DEFAULT_TIMEOUTS):
        self.donors, self.status = donors, TransferStatus()
        self.downloader = StateDownloader(
            lambda donor: lambda: self.donors[donor].open_stream("me"),
            heard_from=lambda donor: None,
            until_lost=lambda donor: asyncio.Event().wait(),
            status=self.status,
            timeouts=timeouts,
        )

    async def take(self, *donors: str, **wishes):
        future = MPFuture()
        await self.downloader.download(donors, 10**9, wishes, future)
        return future.result(timeout=0)


class Damaged(Donor):
    """One bit of what this donor sends is another one when it arrives."""

    async def answers(self, requests, context):
        number = 0
        async for message in super().answers(requests, context):
            number += 1
            if number == 2 and (sent := message.tensor_part.buffer):
                message.tensor_part.buffer = bytes([sent[0] ^ 16]) + sent[1:]
            yield message


def test_what_arrives_is_what_was_sent():
    async def test():
        newcomer = Newcomer({"anna": Damaged(), "ben": Donor()})
        with pytest.raises(NoState) as error:
            await newcomer.take("anna")
        assert "the digests differ" in error.value.reasons["anna"]
        assert newcomer.downloader.broken is None, "it is of no use"
        again = pickle.loads(pickle.dumps(error.value))
        assert (again.reasons, str(again)) == (error.value.reasons, str(error.value))
        donor, metadata, _, content = await newcomer.take("anna", "ben")
        assert (donor, metadata, len(content)) == ("ben", "description", STATE_BYTES), "then another one is asked"

    run(test)


def test_who_is_too_far_behind_gets_no_average_any_more():
    """Else everybody who asks and reads nothing would hold one for good."""

    async def test():
        donor = Donor()
        await donor.server.keep_average(0, b"", b"", torch.zeros(100))
        reader, writer = await donor.open_stream("a stranger")
        await P2P.send_protobuf(DownloadData(metadata=Wish(0).to_bytes()), writer)
        await P2P.receive_protobuf(DownloadData, reader)  # from now on averages are kept
        for step in range(1, MAX_AVERAGES + 1):
            assert not reader.at_eof()
            await donor.server.keep_average(step, b"", b"", torch.zeros(100))
        with pytest.raises(asyncio.IncompleteReadError):
            await asyncio.wait_for(P2P.receive_protobuf(DownloadData, reader), 5)
        writer.close()

    run(test)


# ---- slow donors ----------------------------------------------------------------------------------------------------


class Slow(Donor):
    """Sends so many bytes per second, in all.

    Args:
        line: that of the one who takes them, so that all share it
    """

    def __init__(self, bytes_per_second: float, line: Callable[[int], Awaitable[None]] | None = None):
        super().__init__()
        self._lock, self._seconds_per_byte, self._line = asyncio.Lock(), 1 / bytes_per_second, line

    async def answers(self, requests, context):
        async for message in super().answers(requests, context):
            if self._line is not None:
                await self._line(len(message.tensor_part.buffer))
            async with self._lock:
                await asyncio.sleep(len(message.tensor_part.buffer) * self._seconds_per_byte)
            yield message


def in_a_hurry(monkeypatch, times: float) -> Timeouts:
    """Times are so many times shorter, and rates as much higher."""
    for name in ("SLOWEST_BYTES_PER_SECOND", "USUAL_BYTES_PER_SECOND"):
        monkeypatch.setattr(download_module, name, getattr(download_module, name) * times)
    return shorter(times)


@pytest.mark.parametrize("is_awaited", [True, False], ids=["who joins", "who trains"])
def test_a_donor_that_drips_is_given_up(monkeypatch, is_awaited):
    """At 24 kB/s, of a larger state; times are 20 times shorter here."""
    timeouts = in_a_hurry(monkeypatch, 20)

    async def test():
        newcomer = Newcomer({"anna": Slow(20 * 24_000)}, timeouts)
        with pytest.raises(NoState) as error:
            await newcomer.take("anna", is_awaited=is_awaited)
        assert "kB/s" in error.value.reasons["anna"]
        assert newcomer.status.looks > 1, "the trainer would take it for one that stands still"

    run(test)


@pytest.mark.parametrize(("is_awaited", "kilobytes"), [(True, 60), (False, 300)], ids=["who joins", "who trains"])
def test_an_honest_donor_on_a_slow_line_is_waited_for(monkeypatch, is_awaited, kilobytes):
    """Half a megabit per second, for who has nothing better to do, and 2.4 for who has."""
    timeouts = in_a_hurry(monkeypatch, 20)

    async def test():
        newcomer = Newcomer({"anna": Slow(20_000.0 * kilobytes)}, timeouts)
        donor, *_ = await newcomer.take("anna", is_awaited=is_awaited)
        assert donor == "anna"

    run(test)


def test_who_trains_has_a_deadline_that_follows_the_bytes():
    def began_before(seconds: float, **options) -> Download:
        download = Download("anna", 10**12, **options)
        download.accept(Offer(0.0, b"s" * 16, 10**9, (b"d" * 32,) * -(-(10**9) // SLICE_BYTES), b""))
        download.began, download.wire_bytes = download.heard - seconds, 10**12
        return download

    began_before(4000).judge()
    with pytest.raises(RoundFailed, match=r"has sent 0% of it in 40[45]"):
        began_before(4050).judge()
    began_before(40_000, is_awaited=True).judge()


def test_a_faster_donor_is_found_beside_a_slow_one():
    async def test():
        donors = {"anna": Slow(1e5), "ben": Slow(2e5), "cleo": Slow(1.5e6), "dan": Donor()}
        newcomer = Newcomer(donors, IN_A_RACE)
        donor, *_ = await newcomer.take(*donors)
        assert donor == "cleo", "three take part"
        assert donors["dan"].exports == 0
        await until(lambda: not any(upload.streams for upload in donors["anna"].server.uploads.of.values()))

    run(test)


def test_who_is_ahead_on_a_shared_line_has_to_fill_it_alone():
    """The newcomer's line carries 1 MB/s. Ben has more than that, and gets less than Anna as long as they share it."""

    async def test():
        lock, donors = asyncio.Lock(), {}

        async def line(num_bytes: int) -> None:
            async with lock:
                await asyncio.sleep(num_bytes / 1e6)

        async def line_of_ben(num_bytes: int) -> None:
            await line(num_bytes)
            if any(upload.streams for upload in donors["anna"].server.uploads.of.values()):
                await asyncio.sleep(num_bytes / 1e6)

        donors |= {"anna": Slow(6e5, line), "ben": Slow(1e8, line_of_ben)}
        donor, *_ = await Newcomer(donors, IN_A_RACE).take(*donors)
        assert donor == "ben"

    run(test)


def test_nobody_else_is_asked_for_a_state_that_is_here_at_once():
    async def test():
        newcomer = Newcomer({"anna": Donor(), "ben": Donor()})
        donor, *_ = await newcomer.take("anna", "ben")
        assert donor == "anna"
        assert newcomer.donors["ben"].exports == 0

    run(test)


def test_what_has_arrived_is_of_use_in_the_next_attempt():
    """The donor is not there for longer than a download waits."""

    async def test():
        donor = Slow(3e6)
        newcomer = Newcomer({"anna": donor})
        taking = asyncio.ensure_future(newcomer.take("anna"))
        await until(lambda: donor.exports and any(u.sent_bytes > SLICE_BYTES for u in donor.server.uploads.of.values()))
        newcomer.downloader.cancel()
        with pytest.raises(NoState, match="given up"):
            await taking
        assert newcomer.downloader.broken is not None
        had = newcomer.downloader.broken.num_bytes
        assert had > 0
        donor.server.state_changed()
        _, _, _, content = await newcomer.take("anna")
        assert set(content.unique().tolist()) == {1}, "it is still the state of then"

    run(test)


@pytest.mark.parametrize("bit", ["size", "index"])
def test_what_nobody_has_asked_for_is_refused(bit):
    async def test():
        download = Download("anna", 10**9)
        download.accept(Offer(0.0, b"s" * 16, PIECE_BYTES, (b"d" * 32,), b""))
        download.next_piece()
        size = PIECE_BYTES - 1 if bit == "size" else PIECE_BYTES
        with pytest.raises(RoundFailed, match=r"another size|digests differ"):
            download.take(0, DownloadData(tensor_part=Tensor(buffer=bytes(size))), 0.1)
        assert not download.is_sound

    run(test)


# ---- fewer bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4, 4097, CHUNK_BYTES])
def test_squeezed_bytes_come_back(size):
    chance = np.random.default_rng(0)
    for content in (chance.standard_normal(size // 4 + 1).astype(np.float32).view(np.uint8), chance.bytes(size + 4)):
        chunk = np.frombuffer(bytes(content), np.uint8)[:size]
        assert unsqueeze(squeeze(chunk)) == chunk.tobytes()


def test_weights_take_a_sixth_fewer_bytes_and_noise_no_more():
    weights = np.random.default_rng(0).standard_normal(CHUNK_BYTES // 4).astype(np.float32)
    assert len(squeeze(weights.view(np.uint8)).buffer) < 0.86 * CHUNK_BYTES
    noise = np.frombuffer(np.random.default_rng(0).bytes(CHUNK_BYTES), np.uint8)
    assert len(squeeze(noise).buffer) <= CHUNK_BYTES


def test_mutated_messages_are_bytes_or_refused():
    chance = random.Random(0)
    weights = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    good = squeeze(weights.view(np.uint8))
    for _ in range(10_000):
        sizes = [chance.choice([256, 255, 0, 2**14, 2**14 + 1, 2**32 - 1])][: chance.randrange(2)]
        message = Tensor(buffer=mutated(good.buffer, chance), size=sizes)
        try:
            assert len(unsqueeze(message)) <= max(CHUNK_BYTES, len(message.buffer))
        except RoundFailed:
            pass
