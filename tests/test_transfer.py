"""How a donor hands over its state: in slices that fit together, from one copy for all who ask at once."""

import asyncio
import contextlib
import gc
import multiprocessing as mp
import pickle
import random
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.proto.runtime_pb2 import Tensor
from test_rounds import mutated

from swarm import download as download_module
from swarm import transfer
from swarm.download import NUM_SLICES, TOKEN_BYTES, Download, TooSlow
from swarm.packing import unpack
from swarm.rounds import RoundFailed
from swarm.squeeze import CHUNK_BYTES, squeeze, unsqueeze
from swarm.trail import Trail
from swarm.transfer import StateTransfer
from swarm.uploads import MAX_SNAPSHOTS


class Donor(StateTransfer):
    """Without its process: exports are numbered, as if the state changed all the time."""

    step, _parent_pid = 0, None

    def __init__(self):
        self._uploads, self._state_version, self._export = {}, 0, None
        self._trail, self._took_state, self._followed_until = Trail(), OrderedDict(), SimpleNamespace(value=0.0)
        self.exports, self.handed_over = 0, []

    def _current_step(self) -> int:
        return self.step

    async def _get_current_state_from_host_process(self):
        self.exports += 1
        content = torch.full((NUM_SLICES * CHUNK_BYTES + 5,), self.exports, dtype=torch.uint8)
        await asyncio.sleep(0)
        return b"description", (content,), None

    def _handed_over_to(self, peer_id):
        self.handed_over.append(peer_id)


async def read(donor: Donor, peer: str, token: int, index: int, average_of: int | None) -> DownloadData:
    """A slice, as one message."""
    asked = Download("the donor", 0, average_of=average_of)
    asked.token = bytes([token]) * TOKEN_BYTES
    request = asked.request(index)
    found, stream = DownloadData(), donor.rpc_download_state(request, SimpleNamespace(remote_id=peer))
    async for message in stream:
        if not message.HasField("tensor_part") and (index or found.metadata):
            break
        found.metadata += message.metadata
        found.tensor_part.buffer += unsqueeze(message.tensor_part)
    await asyncio.sleep(0.01)  # the other slices are read meanwhile
    await stream.aclose()
    return found


def download(donor: Donor, peer: str, token: int, average_of: int | None = None):
    return asyncio.gather(*(read(donor, peer, token, index, average_of) for index in range(NUM_SLICES)))


def test_slices_fit_together_and_all_who_ask_at_once_share_a_copy():
    async def run():
        donor = Donor()
        for slices in await asyncio.gather(download(donor, "a", 1), download(donor, "b", 2)):
            assert [one.metadata for one in slices] == [b"description"] + [b""] * (NUM_SLICES - 1)
            assert b"".join(one.tensor_part.buffer for one in slices) == b"\x01" * (NUM_SLICES * CHUNK_BYTES + 5)
        assert donor.exports == 1
        assert donor._uploads == {}, "nothing is kept"

    asyncio.run(run())


def test_who_has_taken_the_state_gets_the_averages_of_the_updates_since():
    async def run():
        donor, average = Donor(), torch.arange(1000.0) / 3
        await download(donor, "anna", 1)
        donor._trail.add(0, b"before", b"after", average)
        donor.step = 1
        slices = await download(donor, "anna", 2, average_of=0)
        assert donor.handed_over == [], "it has yet to ask for more"
        description, layout = donor.serializer.loads(slices[0].metadata)
        assert list(description) == [0, b"before", b"after"]
        content = torch.frombuffer(bytearray(b"".join(one.tensor_part.buffer for one in slices)), dtype=torch.uint8)
        assert torch.equal(*unpack(layout, content), average)
        for peer in ("anna", "a stranger"):
            assert await download(donor, peer, 3, average_of=1) == [DownloadData()] * NUM_SLICES
        assert donor.handed_over == ["anna"], "it is there, and waited for"
        copies = [donor._kept_average(0).content.result()[1][0].data_ptr() for _ in range(3)]
        assert len(set(copies)) == 1, "who comes under many names fills no memory"

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


def test_who_hangs_up_in_the_middle_leaves_nothing_behind():
    """Its stream is cancelled while it writes: the generator, which waits meanwhile, ends in another task."""

    async def run():
        donor, begun = Donor(), asyncio.Event()

        async def serve():
            request = DownloadData(metadata=bytes(TOKEN_BYTES) + bytes([1]))
            async for _ in donor.rpc_download_state(request, SimpleNamespace(remote_id="a")):
                begun.set()
                await asyncio.Event().wait()  # the line is full

        serving = asyncio.ensure_future(serve())
        await begun.wait()
        serving.cancel()
        await asyncio.wait([serving])
        del serving
        gc.collect()
        for _ in range(100):
            await asyncio.sleep(0.01)
            if not donor._uploads:
                return
        raise AssertionError("the upload stays for good")

    asyncio.run(run())


def test_a_stranger_cannot_make_the_trainer_export_without_end():
    async def run():
        donor = Donor()
        donor._get_current_state_from_host_process = lambda: asyncio.sleep(0.05, (b"", (torch.zeros(8),), None))
        shared = [donor._snapshot() for _ in range(3)]
        assert shared[0] is shared[1] is shared[2], "it has not been made yet"
        donor._state_changed()
        newer = donor._snapshot()
        assert newer is not shared[0]
        await asyncio.wait([shared[0].content, newer.content])
        assert donor._snapshot() is not newer

    asyncio.run(run())


class Newcomer(StateTransfer):
    """Without its process: every slice trickles in and never ends."""

    _parent_pid = None

    def __init__(self):
        self._looks = mp.Value("q", 0)

    async def _receive_slice(self, download: Download, index: int) -> None:
        while True:
            await asyncio.sleep(0.01)
            download.take(index, DownloadData(tensor_part=Tensor(buffer=b"x")))

    async def _until_lost(self, donor) -> None:
        await asyncio.Event().wait()


class Damaged(Newcomer):
    """One bit of what the donor sends is another one when it arrives."""

    def __init__(self, donor: Donor, bit: int):
        super().__init__()
        self.donor, self.bit, self.streams = donor, bit, []

    async def _receive_slice(self, download: Download, index: int) -> None:
        stream = self.donor.rpc_download_state(download.request(index), SimpleNamespace(remote_id="me"))
        self.streams.append(stream)
        async for message in stream:
            if index == 3 and (sent := message.tensor_part.buffer):
                message.tensor_part.buffer = bytes([sent[0] ^ self.bit]) + sent[1:]
            if download.take(index, message):
                break
        await download.complete.wait()


@pytest.mark.parametrize("bit", [0, 16])
def test_what_arrives_is_what_was_sent(bit):
    async def run():
        donor, average = Donor(), torch.arange(1000.0) / 3
        donor._trail.add(0, b"before", b"after", average)
        newcomer = Damaged(donor, bit)
        received = newcomer._receive_state(Download("anna", max_bytes=10**9, average_of=0))
        if bit:
            with pytest.raises(RoundFailed, match="the digests differ"):
                await received
        else:
            _, layout, content = await received
            assert torch.equal(*unpack(layout, content), average)
        for stream in newcomer.streams:
            await stream.aclose()
        assert donor._uploads == {}

    asyncio.run(run())


def test_who_is_too_far_behind_gets_no_average_any_more():
    """Else everybody who asks and reads nothing would hold one for good."""

    async def run():
        donor = Donor()
        donor.get_tensors = lambda: contextlib.nullcontext((torch.zeros(100),))
        donor._trail.add(0, b"", b"", torch.zeros(100))
        request, begun = Download("anna", 0, average_of=0).request(1), asyncio.Event()

        async def stay():
            stream = donor.rpc_download_state(request, SimpleNamespace(remote_id="a stranger"))
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    await anext(stream)  # the last time it waits until it hangs up
                    begun.set()

        stays = asyncio.ensure_future(stay())
        await begun.wait()  # from now on the trail is kept
        for step in range(1, 17):
            assert not stays.done()
            await donor._keep_average(step, b"", b"")
        await asyncio.wait([stays], timeout=5)
        assert stays.cancelled()
        assert donor._uploads == {}

    asyncio.run(run())


def test_a_description_has_bounds():
    download = Download("anna", max_bytes=10**9)
    with pytest.raises(RoundFailed, match="longer than that of any model"):
        download.take(0, DownloadData(metadata=bytes(2_000_000)))


def test_a_donor_that_sends_too_slowly_is_given_up(monkeypatch):
    monkeypatch.setattr(download_module, "JUDGE_SECONDS", 0.2)
    monkeypatch.setattr(transfer, "LOOK_SECONDS", 0.05)

    async def run():
        newcomer = Newcomer()
        with pytest.raises(TooSlow, match=r"it sends \d+ kB/s") as caught:
            await newcomer._receive_state(Download("anna", max_bytes=10**9, min_bytes_per_second=1e6))
        assert 0 < caught.value.bytes_per_second < 1e6
        assert pickle.loads(pickle.dumps(caught.value)).bytes_per_second == caught.value.bytes_per_second
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert newcomer.looks > 1, "the trainer would take it for one that stands still"

    asyncio.run(run())


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
