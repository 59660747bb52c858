"""A donor hands out its state in pieces that fit together, from one copy for all joiners, with a bound for each."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
import torch
from hivemind.p2p import P2P
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.utils import MSGPackSerializer

from swarm.protocol.messages import RoundFailed
from swarm.runtime.timeouts import DEFAULT_TIMEOUTS
from swarm.state_sync import state_server
from swarm.state_sync import uploads as uploads_module
from swarm.state_sync.average_log import MAX_AVERAGES
from swarm.state_sync.download import Busy
from swarm.state_sync.download_messages import PIECE_BYTES, Offer, Wish, ask_for
from swarm.state_sync.serialization import unpack
from swarm.state_sync.uploads import MAX_SNAPSHOTS, MAX_STATE_UPLOADS, content_of
from tests.helpers.donors import STATE_BYTES, Donor, begin, fetch, finish, run, until, value_of
from tests.helpers.virtual_time import run_in_virtual_time


def test_pieces_fit_together_and_all_joiners_at_once_share_a_copy():
    async def test():
        donor = Donor()
        for download in await asyncio.gather(fetch(donor, "a"), fetch(donor, "b")):
            assert value_of(download) == 1
            assert MSGPackSerializer.loads(download.offer.description) == ("description", [])
        assert donor.exports == 1
        await until(lambda: not donor.server.uploads.of), "nothing is kept"

    run(test)


def test_a_peer_that_has_taken_the_state_gets_the_averages_of_later_updates():
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


def test_a_peer_that_waits_for_an_average_has_it_when_the_round_ends(monkeypatch):
    async def test():
        donor, average = Donor(replace(DEFAULT_TIMEOUTS, making_seconds=1.0)), torch.arange(300_000.0)
        await fetch(donor, "anna")
        with pytest.raises(RoundFailed, match="does not have it"):  # at once, since there is no round
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

    run_in_virtual_time(test, monkeypatch)


def test_a_state_that_has_changed_is_copied_anew():
    async def test():
        donor = Donor()
        await fetch(donor, "a")
        donor.server.state_changed()
        assert value_of(await fetch(donor, "b")) == 2

    run(test)


def test_the_next_joiner_gets_the_state_after_a_copy_that_failed(monkeypatch):
    """Two newcomers take turns, and each of them comes back; the state does not change meanwhile."""
    monkeypatch.setattr("swarm.state_sync.pull.AGAIN_SECONDS", 0.01)

    class Short(Donor):
        async def _export(self):
            content = await super()._export()
            if self.exports == 1:
                raise OSError("no room in shared memory")
            return content

    async def test():
        donor = Short()
        failed = await asyncio.gather(fetch(donor, "a"), fetch(donor, "b"), return_exceptions=True)
        assert all(isinstance(one, RoundFailed) for one in failed), "they share a copy"
        assert donor.exports == 1
        assert value_of(await fetch(donor, "b")) == 2
        assert value_of(await fetch(donor, "a")) == 3

    run(test)


def test_a_few_joiners_get_the_state_at_a_time_and_the_others_hear_how_long_that_takes():
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
        assert len(streams) == MAX_STATE_UPLOADS + 1, "a peer that takes nothing is in no other's way"
        for _, writer in streams:
            writer.close()

    run(test)


def test_a_stranger_cannot_fill_a_donors_memory(monkeypatch):
    """A stranger that asks again and again has one download. Many names do not get a copy each."""
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


def test_a_stranger_cannot_have_the_same_average_packed_again_and_again(monkeypatch):
    packed = []
    monkeypatch.setattr(state_server, "content_of", lambda *said: packed.append(said) or content_of(*said))

    async def test():
        donor, writers = Donor(), []
        await donor.server.keep_average(0, b"before", b"after", torch.arange(100.0))
        for number in range(20):
            _, writer = await donor.open_stream(f"peer {number % 2}")
            writers.append(writer)
            await P2P.send_protobuf(DownloadData(metadata=Wish(0).to_bytes()), writer)
        await until(lambda: len(donor.server.uploads.of) == 2)
        assert (await fetch(donor, "another", average_of=0)).is_complete
        assert len(packed) == 1
        for writer in writers:
            writer.close()

    run(test)


async def ask_for_average(donor: Donor, name: str, step: int) -> tuple[Offer, asyncio.StreamWriter]:
    """Ask for an average under this name, and take nothing of it."""
    reader, writer = await donor.open_stream(name)
    await P2P.send_protobuf(DownloadData(metadata=Wish(step).to_bytes()), writer)
    offer, _ = await P2P.receive_protobuf(DownloadData, reader)
    return Offer.from_bytes(offer.metadata, 10**9), writer


def test_many_names_that_ask_for_averages_do_not_fill_a_donors_memory(monkeypatch):
    """They ask for those of two steps in turn, so what was copied last is of no use for the next name."""
    monkeypatch.setattr(uploads_module, "MAX_COPIED_BYTES", 50_000)

    async def test():
        donor, writers = Donor(), []
        await fetch(donor, "anna")  # from now on averages are kept
        for step in range(4):  # together 16,000 bytes from the first one on, and 12,000 from the second one on
            await donor.server.keep_average(step, bytes([step]), bytes([step + 1]), torch.full((1000,), 1 / 3))
        uploads = donor.server.uploads.of
        for number in range(100):
            offer, writer = await ask_for_average(donor, f"peer {number}", number % 2)
            assert offer.snapshot, "names that have hung up are in no other's way"
            writer.close()
            await until(lambda: not any(upload.streams for upload in uploads.values()))
        assert sum(snapshot.held_bytes for snapshot in {upload.snapshot for upload in uploads.values()}) < 66_000
        for number in range(9):
            offer, writer = await ask_for_average(donor, f"waiting {number}", number % 2)
            writers.append(writer)
        assert not offer.snapshot, "names that wait keep theirs"
        assert sum(snapshot.held_bytes for snapshot in {upload.snapshot for upload in uploads.values()}) < 66_000
        for writer in writers:
            writer.close()

    run(test)


def test_averages_that_are_sent_together_do_not_raise_the_quota(monkeypatch):
    """A peer gets 60 averages in an hour, also if twelve of them are sent at a time."""
    monkeypatch.setattr(uploads_module, "FREE_BYTES_PER_HOUR", 1.0)

    async def test():
        donor, now = Donor(), 0.0
        donor.server.uploads = uploads_module.Uploads(clock=lambda: now)

        async def take_all() -> int:
            num_averages = 0
            with contextlib.suppress(RoundFailed):  # until the quota is used up
                while True:
                    download = await fetch(donor, "anna", average_of=0)
                    (_, _, lineages), _ = MSGPackSerializer.loads(download.offer.description)
                    num_averages += len(lineages)
            return num_averages

        await fetch(donor, "anna")  # from now on averages are kept
        for step in range(12):
            await donor.server.keep_average(step, bytes([step]), bytes([step + 1]), torch.full((1000,), 1 / 3))
        assert await take_all() == 60
        now += 0.2 * 3600
        assert await take_all() == 12, "a fifth of an hour has passed"

    run(test)


def test_a_request_for_nothing_gets_no_answer():
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


def test_no_peer_can_ask_for_the_same_piece_without_end(monkeypatch):
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


def test_a_peer_that_hangs_up_in_the_middle_can_go_on_for_a_while_and_is_forgotten_then(monkeypatch):
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


class Slow(Donor):
    """Its trainer needs 5 s for a copy."""

    at_once = most_at_once = 0

    async def _export(self):
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(5.0)
            return await super()._export()
        finally:
            self.at_once -= 1


def test_a_stranger_cannot_make_the_trainer_export_without_end(monkeypatch):
    """It asks for each new state before the copy of an older one is made."""

    async def test():
        donor, shared = Slow(), []
        for _ in range(14):
            shared.append(donor.server.snapshot())
            assert donor.server.snapshot() is shared[-1], "it has not been made yet"
            await asyncio.sleep(1.0)
            donor.server.state_changed()
        await shared[-1].ready
        assert donor.exports == len(set(shared)) == 4
        assert donor.most_at_once == 1
        assert donor.server.snapshot() is not shared[-1]

    run_in_virtual_time(test, monkeypatch)


def test_a_peer_that_asks_for_each_new_state_and_takes_none_has_to_wait(monkeypatch):
    monkeypatch.setattr(uploads_module, "FREE_BYTES_PER_HOUR", 1.0)
    monkeypatch.setattr(uploads_module, "COPY_SHARE", 1.0)  # so that eight copies use up the quota, and not 44

    async def test():
        donor, writers = Slow(), []
        for _ in range(90):
            reader, writer = await donor.open_stream("a")
            writers.append(writer)
            await P2P.send_protobuf(DownloadData(metadata=Wish().to_bytes()), writer)
            await asyncio.sleep(1.0)
            donor.server.state_changed()
        offer, _ = await P2P.receive_protobuf(DownloadData, reader)
        assert Offer.from_bytes(offer.metadata, 10**9).busy_seconds > 60
        assert donor.exports <= 10, "eight, and two whose size was not known yet; there was time for 18"
        await fetch(donor, "another")
        for writer in writers:
            writer.close()

    run_in_virtual_time(test, monkeypatch, seconds=600)


def test_a_peer_that_is_too_far_behind_gets_no_average_any_more():
    """Otherwise each peer that asks and reads nothing would hold an average for good."""

    async def test():
        donor = Donor()
        await donor.server.keep_average(0, b"", b"", torch.ones(100))
        reader, writer = await donor.open_stream("a stranger")
        await P2P.send_protobuf(DownloadData(metadata=Wish(0).to_bytes()), writer)
        await P2P.receive_protobuf(DownloadData, reader)  # from now on averages are kept
        for step in range(1, MAX_AVERAGES + 1):
            assert not reader.at_eof()
            await donor.server.keep_average(step, b"", b"", torch.zeros(100))
        with pytest.raises(asyncio.IncompleteReadError):
            await asyncio.wait_for(P2P.receive_protobuf(DownloadData, reader), 5)
        assert not donor.server.uploads.of, "it is not held for that peer, either"
        writer.close()

    run(test)
