"""The calls that peers of a run answer, and their names.

Hivemind derives the names of handlers from class names. So the names of this class and of its methods are part of the
wire protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import AsyncIterator  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

from hivemind.p2p import P2P, P2PContext
from hivemind.p2p.servicer import ServicerBase
from hivemind.proto import averaging_pb2

from swarm.network import hivemind_internals

DOWNLOAD_STATE, DOWNLOAD_LEDGER, SHOW_EVIDENCE = "rpc_download_state", "rpc_download_ledger", "rpc_show_evidence"


class PeerService(ServicerBase):
    """Passes each call to the handler that answers it.

    Args:
        namespace: run and recipe; peers with another namespace cannot reach these handlers
        join_group: answers join requests of peers that want to finish a step with this peer as their leader
        aggregate_part: answers peers that send parts in a round
        download_state: answers peers that want the state, or an average
        download_ledger: answers requests for this peer's ledger
        show_evidence: answers peers that check an average or a proof
    """

    def __init__(
        self,
        namespace: str,
        join_group: Callable,
        aggregate_part: Callable,
        download_state: Callable,
        download_ledger: Callable,
        show_evidence: Callable,
    ):
        self._namespace = namespace
        self._join_group, self._aggregate_part, self._download_state = join_group, aggregate_part, download_state
        self._download_ledger, self._show_evidence = download_ledger, show_evidence

    def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        return self._join_group(request, context)

    def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        return self._aggregate_part(stream, context)

    def rpc_download_state(
        self, requests: AsyncIterator[averaging_pb2.DownloadData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        return self._download_state(requests, context)

    def rpc_download_ledger(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        return self._download_ledger(request, context)

    def rpc_show_evidence(
        self, requests: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        return self._show_evidence(requests, context)

    async def answer(self, p2p: P2P) -> None:
        """Answer all calls from now on."""
        await self.add_p2p_handlers(p2p, namespace=self._namespace)

    async def answer_downloads(self, p2p: P2P) -> None:
        """Answer downloads only, from now on: for a client-mode peer, over the connections that it has made itself."""
        for handler in hivemind_internals.handlers_of(type(self)):
            if handler.method_name in (DOWNLOAD_STATE, DOWNLOAD_LEDGER, SHOW_EVIDENCE):
                await p2p.add_protobuf_handler(
                    self.handle_name(self._namespace, handler.method_name),
                    getattr(self, handler.method_name),
                    handler.request_type,
                    stream_input=handler.stream_input,
                    stream_output=handler.stream_output,
                )

    async def hang_up(self, p2p: P2P) -> None:
        """Answer no calls any more."""
        await self.remove_p2p_handlers(p2p, namespace=self._namespace)

    @classmethod
    def handle_name(cls, namespace: str, method: str) -> str:
        """The name under which peers of this run answer calls of this method."""
        return hivemind_internals.handle_name(cls, namespace, method)
