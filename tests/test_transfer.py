"""How a donor hands over its state: in slices that fit together, from one copy for all who ask at once."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from hivemind.proto.averaging_pb2 import DownloadData

from swarm import transfer
from swarm.rounds import RoundFailed
from swarm.transfer import CHUNK_BYTES, MAX_SNAPSHOTS, NUM_SLICES, TOKEN_BYTES, Download, StateTransfer


class Donor(StateTransfer):
    """Without its process: exports are numbered, as if the state changed all the time."""

    def __init__(self):
        self._uploads, self._state_version = {}, 0
        self.exports, self.handed_over = 0, []

    async def _get_current_state_from_host_process(self):
        self.exports += 1
        content = torch.full((NUM_SLICES * CHUNK_BYTES + 5,), self.exports, dtype=torch.uint8)
        await asyncio.sleep(0)
        return b"description", (content,), None

    def _handed_over_to(self, peer_id):
        self.handed_over.append(peer_id)


async def read(donor: Donor, peer: str, token: int, index: int) -> DownloadData:
    """A slice, as one message."""
    request = DownloadData(metadata=bytes([token]) * TOKEN_BYTES + bytes([index]))
    found, stream = DownloadData(), donor.rpc_download_state(request, SimpleNamespace(remote_id=peer))
    async for message in stream:
        if not message.ByteSize():
            break
        found.metadata += message.metadata
        found.tensor_part.buffer += message.tensor_part.buffer
    await asyncio.sleep(0.01)  # the other slices are read meanwhile
    await stream.aclose()
    return found


def download(donor: Donor, peer: str, token: int):
    return asyncio.gather(*(read(donor, peer, token, index) for index in range(NUM_SLICES)))


def test_slices_fit_together_and_all_who_ask_at_once_share_a_copy():
    async def run():
        donor = Donor()
        for slices in await asyncio.gather(download(donor, "a", 1), download(donor, "b", 2)):
            assert [one.metadata for one in slices] == [b"description"] + [b""] * (NUM_SLICES - 1)
            assert b"".join(one.tensor_part.buffer for one in slices) == b"\x01" * (NUM_SLICES * CHUNK_BYTES + 5)
        assert donor.exports == 1
        assert sorted(donor.handed_over) == ["a", "b"], "once each"
        assert donor._uploads == {}, "nothing is kept"

    asyncio.run(run())


def test_a_state_that_has_changed_is_copied_anew():
    async def run():
        donor = Donor()
        first = asyncio.ensure_future(download(donor, "a", 1))
        await asyncio.sleep(0.005)
        donor._state_changed()
        second = await download(donor, "b", 2)
        assert {bytes(one.tensor_part.buffer[:1]) for one in await first} == {b"\x01"}
        assert {bytes(one.tensor_part.buffer[:1]) for one in second} == {b"\x02"}

    asyncio.run(run())


def test_a_stranger_cannot_fill_a_donors_memory():
    """Who asks again and again has one download, and who comes under many names does not get a copy for each."""

    async def run():
        donor = Donor()
        streams = []
        for peer, token in [("a", token) for token in range(5)] + [(f"peer {n}", 0) for n in range(20)]:
            streams.append(asyncio.ensure_future(read_half(donor, peer, token)))
            await asyncio.sleep(0.001)
            donor._state_changed()
        assert donor.exports == 5 + MAX_SNAPSHOTS - 1
        assert sum(not stream.done() for stream in streams) == len(donor._uploads) == MAX_SNAPSHOTS
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)
        assert donor._uploads == {}

    async def read_half(donor, peer, token):
        request = DownloadData(metadata=bytes([token]) * TOKEN_BYTES + bytes([1]))
        stream = donor.rpc_download_state(request, SimpleNamespace(remote_id=peer))
        try:
            async for _ in stream:
                await asyncio.Event().wait()
        finally:
            await stream.aclose()

    asyncio.run(run())


def test_who_asks_for_no_slice_gets_nothing():
    async def run():
        donor = Donor()
        for metadata in (b"", b"x", bytes(TOKEN_BYTES) + bytes([NUM_SLICES]), bytes(1000)):
            request = DownloadData(metadata=metadata)
            stream = donor.rpc_download_state(request, SimpleNamespace(remote_id="a"))
            assert [message async for message in stream] == []
        assert donor.exports == 0

    asyncio.run(run())


class Newcomer(StateTransfer):
    """Without its process: every slice trickles in and never ends."""

    def __init__(self):
        pass

    async def _receive_slice(self, download: Download, index: int) -> None:
        while True:
            await asyncio.sleep(0.01)
            download.received_bytes += 1

    async def _until_lost(self, donor) -> None:
        await asyncio.Event().wait()


def test_a_donor_that_sends_too_slowly_is_given_up(monkeypatch):
    monkeypatch.setattr(transfer, "STREAM_SECONDS", 0.2)
    monkeypatch.setattr(transfer, "SLOWEST_BYTES_PER_SECOND", 100_000)

    async def run():
        with pytest.raises(RoundFailed, match="too slowly"):
            await Newcomer()._receive_state(Download("anna", max_bytes=10_000))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
