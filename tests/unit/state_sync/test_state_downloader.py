"""Download of a state: a broken one goes on, damage is refused, and the fastest donor wins."""

import asyncio
import gc
import pickle
import threading
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch
from hivemind.p2p import P2P
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.proto.runtime_pb2 import Tensor
from hivemind.utils import MPFuture, MSGPackSerializer

from swarm.network.dht_bounds import decoding
from swarm.protocol.messages import RoundFailed
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS, Timeouts
from swarm.state_sync import state_downloader
from swarm.state_sync.download import Download, Downloaded, DownloadRequest, NoState
from swarm.state_sync.download_messages import MAX_DESCRIPTION_BYTES, PIECE_BYTES, SLICE_BYTES, Offer
from swarm.state_sync.pull import Pull
from swarm.state_sync.state_downloader import StateDownloader
from swarm.state_sync.transfer_status import TransferStatus
from tests.helpers.donors import STATE_BYTES, Donor, run, until, value_of
from tests.helpers.virtual_time import run_in_virtual_time

IN_A_RACE = replace(DEFAULT_TIMEOUTS, look_seconds=0.02, first_donor_seconds=0.1, race_seconds=1.0, alone_seconds=1.0)


def test_a_broken_download_goes_on_with_what_is_missing(monkeypatch):
    monkeypatch.setattr("swarm.state_sync.pull.AGAIN_SECONDS", 0.01)

    async def test():
        donor, breaks = Donor(), 0
        download = Download("the donor", DownloadRequest(10**9))

        def break_down(message) -> None:
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


def test_a_state_that_the_donor_has_not_kept_is_downloaded_anew(monkeypatch):
    monkeypatch.setattr("swarm.state_sync.pull.AGAIN_SECONDS", 0.01)

    async def test():
        donor, download, breaks = Donor(), Download("the donor", DownloadRequest(10**9)), []

        def break_down(message) -> None:
            if not breaks and download.num_bytes > SLICE_BYTES:
                breaks.append(True)
                donor.server.state_changed()
                donor.server.uploads.of.clear()
                donor.hang_up()

        await Pull(download, lambda: donor.open_stream("a"), break_down).run()
        assert breaks
        assert value_of(download) == 2

    run(test)


def test_a_donor_that_offers_another_state_each_time_is_given_up(monkeypatch):
    monkeypatch.setattr("swarm.state_sync.pull.AGAIN_SECONDS", 0.01)

    async def test():
        donor, download = Donor(), Download("the donor", DownloadRequest(10**9))

        def break_down(message) -> None:
            if download.offer is not None:
                donor.server.state_changed()
                donor.server.uploads.of.clear()
                donor.hang_up()

        with pytest.raises(RoundFailed, match="another state each time"):
            await Pull(download, lambda: donor.open_stream("a"), break_down).run()

    run(test)


class Newcomer:
    """A newcomer that downloads from donors in the same process."""

    def __init__(self, donors: dict, timeouts: Timeouts = DEFAULT_TIMEOUTS):
        self.donors, self.status = donors, TransferStatus()
        self.downloader = StateDownloader(
            lambda donor: lambda: self.donors[donor].open_stream("me"),
            heard_from=lambda donor: None,
            until_lost=lambda donor: asyncio.Event().wait(),
            status=self.status,
            timeouts=timeouts,
        )

    async def take(self, *donors: str, **wishes) -> Downloaded:
        future = MPFuture()
        await self.downloader.download(donors, DownloadRequest(10**9, **wishes), future)
        return future.result(timeout=0)


class Describes(Donor):
    """A donor of a small state, which it describes in these words."""

    def __init__(self, description: bytes):
        super().__init__()
        self.description = description

    async def _export(self) -> tuple[bytes, torch.Tensor]:
        return self.description, torch.zeros(10, dtype=torch.uint8)


def test_the_description_of_a_large_model_is_read_and_the_other_downloads_go_on(monkeypatch):
    decoded_in = []
    monkeypatch.setattr(
        state_downloader, "loads", lambda *message: decoded_in.append(threading.get_ident()) or decoding.loads(*message)
    )
    metadata = {"step": 7, "statistics": [(number // 3, "exp_avg") for number in range(6000)]}
    layout = [("float32", [64, 64, 3, 3])] * 8000

    async def test():
        donor = Describes(MSGPackSerializer.dumps((metadata, layout)))
        taken = await Newcomer({"anna": donor}).take("anna")
        assert (taken.description, taken.layout) == (metadata, layout)
        assert decoded_in
        assert threading.get_ident() not in decoded_in

    run(test)


def test_a_description_of_very_many_values_is_refused():
    """For the same number of bytes, they take a hundred times as long to read, and sixty times as much memory."""

    async def test():
        liar = Describes(MSGPackSerializer.dumps(("description", [[[]] * 65_000] * 15)))
        assert len(liar.description) < MAX_DESCRIPTION_BYTES
        with pytest.raises(NoState) as error:
            await Newcomer({"anna": liar}).take("anna")
        assert "too many values" in error.value.reasons["anna"]

    run(test)


class Damaged(Donor):
    """A donor. One bit of what it sends is flipped on the way."""

    async def answers(self, requests, context):
        number = 0
        async for message in super().answers(requests, context):
            number += 1
            if number == 2 and (sent := message.tensor_part.buffer):
                message.tensor_part.buffer = bytes([sent[0] ^ 16]) + sent[1:]
            yield message


def test_damage_on_the_way_is_noticed():
    async def test():
        newcomer = Newcomer({"anna": Damaged(), "ben": Donor()})
        with pytest.raises(NoState) as error:
            await newcomer.take("anna")
        assert "the digests differ" in error.value.reasons["anna"]
        assert newcomer.downloader.broken is None, "it is of no use"
        again = pickle.loads(pickle.dumps(error.value))
        assert (again.reasons, str(again)) == (error.value.reasons, str(error.value))
        taken = await newcomer.take("anna", "ben")
        assert (taken.donor, taken.description) == ("ben", "description"), "then another one is asked"
        assert len(taken.content) == STATE_BYTES

    run(test)


class Garbled(Donor):
    """A donor. The second piece that it ever sends cannot be read."""

    def __init__(self):
        super().__init__()
        self.sent = 0

    async def answers(self, requests, context):
        async for message in super().answers(requests, context):
            if message.tensor_part.buffer:
                self.sent += 1
                if self.sent == 2:
                    message.tensor_part.CopyFrom(Tensor(buffer=b"garbage", size=[4]))
            yield message


def test_after_a_piece_that_cannot_be_read_the_donor_is_asked_for_everything_again(monkeypatch):
    monkeypatch.setattr("swarm.state_sync.pull.AGAIN_SECONDS", 0.01)

    async def test():
        newcomer = Newcomer({"anna": Garbled()})
        with pytest.raises(NoState) as error:
            await newcomer.take("anna")
        assert "a part of the state" in error.value.reasons["anna"]
        assert newcomer.downloader.broken is None, "that piece would be missing for ever"
        assert len((await newcomer.take("anna")).content) == STATE_BYTES

    run(test)


class Fails(Donor):
    """A donor. Its answer is an error, with a text that would clear a terminal and fake a line."""

    async def serve(self, peer, reader, writer):
        await P2P.send_protobuf(RPCError(message="no room\x1b[2J\nTook over step 7"), writer)
        await reader.read()  # until the newcomer hangs up
        writer.close()


def test_the_text_of_an_error_does_not_control_the_newcomers_terminal():
    async def test():
        with pytest.raises(NoState) as error:
            await Newcomer({"anna": Fails()}).take("anna")
        assert error.value.reasons["anna"] == "the donor could not send it: no room[2JTook over step 7"

    run(test)


# ---- slow donors ----------------------------------------------------------------------------------------------------


class Slow(Donor):
    """A donor that sends this many bytes per second in all.

    Args:
        line: line of the receiver, which all its donors share
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


@pytest.mark.parametrize("is_awaited", [True, False], ids=["who joins", "who trains"])
def test_a_donor_that_drips_is_given_up(monkeypatch, is_awaited):
    """The donor sends 24 kB/s."""

    async def test():
        newcomer = Newcomer({"anna": Slow(24_000)})
        with pytest.raises(NoState) as error:
            await newcomer.take("anna", is_awaited=is_awaited)
        assert "kB/s" in error.value.reasons["anna"]
        assert newcomer.status.looks > 1, "the trainer would take it for one that stands still"

    run_in_virtual_time(test, monkeypatch, seconds=600)


@pytest.mark.parametrize(("is_awaited", "kilobytes"), [(True, 60), (False, 300)], ids=["who joins", "who trains"])
def test_an_honest_donor_on_a_slow_line_is_waited_for(monkeypatch, is_awaited, kilobytes):
    """At least 0.5 Mbit/s for a peer that only waits for the state, and 2.4 Mbit/s for one that trains."""

    async def test():
        newcomer = Newcomer({"anna": Slow(1000.0 * kilobytes)})
        donor = (await newcomer.take("anna", is_awaited=is_awaited)).donor
        assert donor == "anna"

    run_in_virtual_time(test, monkeypatch, seconds=600)


def test_a_training_peer_has_a_deadline_that_follows_the_bytes():
    def began_before(seconds: float, **options) -> Download:
        download = Download("anna", DownloadRequest(10**12, **options))
        download.accept(Offer(0.0, b"s" * 16, 10**9, (b"d" * 32,) * -(-(10**9) // SLICE_BYTES), b""))
        download.began, download.wire_bytes = download.heard - seconds, 10**12
        return download

    began_before(4000).judge()
    with pytest.raises(RoundFailed, match=r"has sent 0% of it in 40[45]"):
        began_before(4050).judge()
    began_before(40_000, is_awaited=True).judge()


def test_further_streams_that_hang_do_not_end_a_download(monkeypatch):
    async def test():
        donor, opened = Slow(1e5), []

        async def open_stream():
            opened.append(True)
            if len(opened) > 1:
                await asyncio.Event().wait()
            return await donor.open_stream("me")

        download = Download("the donor", DownloadRequest(10**9))
        await Pull(download, open_stream, lambda message: None).run()
        assert value_of(download) == 1
        assert len(opened) > 1

    run_in_virtual_time(test, monkeypatch, seconds=600)


def test_a_download_goes_on_without_a_further_stream_that_its_donor_ends(monkeypatch):
    """A donor ends streams of strangers that have many, to make room for others."""

    async def test():
        donor, opened = Slow(1e5), []

        async def open_stream():
            opened.append(True)
            return await donor.open_stream("me")

        def end_one(message) -> None:
            if download.offer is not None and download.num_bytes > STATE_BYTES / 2 and not ended:
                ended.append(len(opened))
                donor.lines[-1].cancel()

        download, ended = Download("the donor", DownloadRequest(10**9)), []
        await Pull(download, open_stream, end_one).run()
        assert value_of(download) == 1
        assert ended == [len(opened)], "it does not begin again"
        assert len(opened) > 1

    run_in_virtual_time(test, monkeypatch, seconds=600)


def test_a_faster_donor_is_found_beside_a_slow_one(monkeypatch):
    async def test():
        donors = {"anna": Slow(1e5), "ben": Slow(2e5), "cleo": Slow(1.5e6), "dan": Donor()}
        newcomer = Newcomer(donors, IN_A_RACE)
        donor = (await newcomer.take(*donors)).donor
        assert donor == "cleo", "three take part"
        assert donors["dan"].exports == 0
        await until(lambda: not any(upload.streams for upload in donors["anna"].server.uploads.of.values()))

    run_in_virtual_time(test, monkeypatch, seconds=600)


def test_a_donor_that_is_ahead_on_a_shared_line_has_to_fill_it_alone(monkeypatch):
    """The newcomer's line carries 1 MB/s.

    Ben's line carries more, but gets less than Anna's as long as they share it.
    """

    async def test():
        line_lock, crowd_lock, donors = asyncio.Lock(), asyncio.Lock(), {}

        async def line(num_bytes: int) -> None:
            async with line_lock:
                await asyncio.sleep(num_bytes / 1e6)

        async def line_of_ben(num_bytes: int) -> None:
            await line(num_bytes)
            if any(upload.streams for upload in donors["anna"].server.uploads.of.values()):
                async with crowd_lock:
                    await asyncio.sleep(num_bytes / 3e5)

        donors |= {"anna": Slow(4e5, line), "ben": Slow(1e8, line_of_ben)}
        donor = (await Newcomer(donors, IN_A_RACE).take(*donors)).donor
        assert donor == "ben"

    run_in_virtual_time(test, monkeypatch, seconds=600)


class Silent(Donor):
    """A donor that never answers."""

    async def answers(self, requests, context):
        await asyncio.Event().wait()
        yield


class Copies(Donor):
    """A donor whose trainer needs 5 s for a copy."""

    async def _export(self):
        await asyncio.sleep(5.0)
        return await super()._export()


def test_a_donor_that_is_asked_late_has_as_long_to_answer_as_the_first(monkeypatch):
    """It is asked when the first three donors have been silent for as long as a donor may be."""

    async def test():
        donors = {"anna": Silent(), "ben": Silent(), "cleo": Silent(), "dan": Copies()}
        donor = (await Newcomer(donors).take(*donors)).donor
        assert donor == "dan"

    run_in_virtual_time(test, monkeypatch, seconds=600)


def test_no_other_donor_is_asked_for_a_state_that_is_here_at_once():
    async def test():
        newcomer = Newcomer({"anna": Donor(), "ben": Donor()})
        donor = (await newcomer.take("anna", "ben")).donor
        assert donor == "anna"
        assert newcomer.donors["ben"].exports == 0

    run(test)


async def break_off(newcomer: Newcomer, name: str) -> None:
    """Begin a download from this donor, and give it up in the middle."""
    uploads, taking = newcomer.donors[name].server.uploads, asyncio.ensure_future(newcomer.take(name))
    await until(lambda: any(upload.sent_bytes > SLICE_BYTES for upload in uploads.of.values()))
    newcomer.downloader.cancel()
    with pytest.raises(NoState, match="given up"):
        await taking
    assert newcomer.downloader.broken is not None


def test_bytes_that_have_arrived_are_of_use_in_the_next_attempt(monkeypatch):
    """The donor is gone for longer than a download waits."""

    async def test():
        donor = Slow(3e6)
        newcomer = Newcomer({"anna": donor})
        await break_off(newcomer, "anna")
        had = newcomer.downloader.broken.num_bytes
        assert had > 0
        donor.server.state_changed()
        content = (await newcomer.take("anna")).content
        assert set(content.unique().tolist()) == {1}, "it is still the state of then"

    run_in_virtual_time(test, monkeypatch, seconds=600)


def test_a_broken_download_is_not_held_beside_the_one_that_follows_it(monkeypatch):
    async def test():
        newcomer = Newcomer({name: Slow(3e6) for name in ("anna", "ben", "cleo")})
        await break_off(newcomer, "anna")
        of_anna = weakref.ref(newcomer.downloader.broken)
        await asyncio.sleep(40)
        await break_off(newcomer, "ben")
        gc.collect()
        assert of_anna() is None
        await asyncio.sleep(40)
        assert newcomer.downloader.broken is not None, "its own time has not passed"
        await asyncio.sleep(DEFAULT_TIMEOUTS.kept_seconds - 40 + 1)
        assert newcomer.downloader.broken is None
        await break_off(newcomer, "cleo")
        of_cleo = weakref.ref(newcomer.downloader.broken)
        await newcomer.take("cleo")
        gc.collect()
        assert of_cleo() is None

    run_in_virtual_time(test, monkeypatch, seconds=600)


@pytest.mark.parametrize("bit", ["size", "index"])
def test_a_piece_that_does_not_match_the_request_is_refused(bit):
    async def test():
        download = Download("anna", DownloadRequest(10**9))
        download.accept(Offer(0.0, b"s" * 16, PIECE_BYTES, (b"d" * 32,), b""))
        download.next_piece()
        size = PIECE_BYTES - 1 if bit == "size" else PIECE_BYTES
        with pytest.raises(RoundFailed, match=r"another size|digests differ"):
            download.take(0, DownloadData(tensor_part=Tensor(buffer=bytes(size))), 0.1)
        assert not download.is_sound

    run(test)
