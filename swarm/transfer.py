"""The state of a swarm on its way from a peer that has it to one that joins or fell behind."""

from __future__ import annotations

import asyncio
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import CompressionInfo, deserialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_logger
from hivemind.utils.asyncio import aiter_with_timeout
from hivemind.utils.streaming import combine_from_streaming

from swarm import faults
from swarm.exchange import until_caller_hangs_up
from swarm.rounds import RoundFailed

logger = get_logger(__name__)

STREAM_SECONDS = 10.0  # longest silence within a stream before the other side counts as gone


class StateTransfer(DecentralizedAverager):
    """The part of an averager that hands over the state, and takes over that of others.

    A subclass has ``_get_state``, which is called in the trainer process and returns (small metadata, tensors).
    """

    # ---- in the trainer process -----------------------------------------------------------------------------------

    def download_state(self, peer_id: PeerID, max_bytes: int):
        """Download a peer's state in the background.

        :param max_bytes: refuse to take more than this
        :returns: a future of (metadata, tensors); raises RoundFailed with a reason
        """
        future = MPFuture()
        self._outer_pipe.send(("_download_state", [peer_id, max_bytes, future], {}))
        return future

    def get_current_state(self):
        metadata, tensors = self._get_state()
        return metadata, tensors, [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]

    # ---- in the averager process ----------------------------------------------------------------------------------

    def _handed_over_to(self, peer_id: PeerID) -> None:
        """It has our state now."""

    def _took_over(self) -> None:
        """This peer's own state is gone."""

    def _current_step(self) -> int:
        """The step of the state."""
        return 0

    async def _declare_for_download_periodically(self) -> None:
        """Hivemind announces donors in the DHT; here every member of the swarm is one, found by its progress record."""

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Another peer takes over our state, and will come to the next round."""
        async for message in super().rpc_download_state(request, context):
            yield message
            faults.at("giving state", self._current_step())
        self._handed_over_to(context.remote_id)
        yield averaging_pb2.DownloadData()  # nothing in it: that was all
        await until_caller_hangs_up()

    async def _download_state(self, peer_id: PeerID, max_bytes: int, future: MPFuture) -> None:
        try:
            future.set_result(await self._receive_state(peer_id, max_bytes))
            self._took_over()
        except asyncio.TimeoutError:
            future.set_exception(RoundFailed(f"{peer_id} sent nothing for {STREAM_SECONDS:.0f} s"))
        except RoundFailed as error:
            future.set_exception(error)
        except Exception as error:
            logger.debug("state download failed", exc_info=True)
            future.set_exception(RoundFailed(f"{peer_id} could not send its state: {type(error).__name__}: {error}"))

    async def _receive_state(self, peer_id: PeerID, max_bytes: int) -> tuple[Any, list[torch.Tensor]]:
        stub = self.get_stub(self._p2p, peer_id, namespace=self.prefix)
        stream = await asyncio.wait_for(stub.rpc_download_state(averaging_pb2.DownloadRequest()), STREAM_SECONDS)
        metadata, tensors, parts, received_bytes = None, [], [], 0
        async for message in aiter_with_timeout(stream, STREAM_SECONDS):
            if not message.ByteSize():
                break
            received_bytes += message.ByteSize()
            faults.at("taking state")
            if received_bytes > max_bytes:
                raise RoundFailed(f"{peer_id} sent more than the {max_bytes} bytes that this model can need")
            if message.metadata:
                metadata = self.serializer.loads(message.metadata)
            if message.tensor_part.dtype and parts:  # a part that names its dtype begins the next tensor
                tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
                parts = []
            parts.append(message.tensor_part)
        if parts:
            tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
        await stream.aclose()
        if metadata is None:
            raise RoundFailed(f"{peer_id} did not send its state")
        return metadata, tensors
