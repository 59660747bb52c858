"""The service of the averaging process: rounds, transfers of the state, and answers to other peers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.proto.averaging_pb2 import DownloadData
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey

from swarm.averaging.commands import (
    CancelDownload,
    CancelRound,
    CompareOrders,
    DownloadState,
    Expect,
    Finish,
    Followed,
    KeepAverage,
    RunRound,
    SetAdmission,
    SetStep,
    TookOver,
)
from swarm.averaging.rounds import AveragingOptions, Rounds, RoundSignals
from swarm.ledger.calls import caller_of
from swarm.ledger.server import LedgerServer
from swarm.network.peer_service import DOWNLOAD_STATE, PeerService
from swarm.network.stream_limits import limits_of
from swarm.protocol.certificates import NotSigned
from swarm.protocol.messages import Group, Ticket
from swarm.protocol.signed_lists import ORDERS, REMOVED
from swarm.runtime.worker_process import AskForState
from swarm.state_sync.state_downloader import StateDownloader, streams_of
from swarm.state_sync.state_server import StateServer
from swarm.state_sync.transfer_status import TransferStatus

logger = get_logger(__name__)


class AveragingService:
    """Carries out the trainer's commands and answers other peers; lives in the averaging process.

    Args:
        options: the trainer's options
        client_mode: whether other peers cannot dial this one
        key: this peer's private key
        signals: tell the trainer what it has to know of rounds
        status: tells the trainer how far transfers are
        p2p: this peer's connection to the network
        ask_for_state: asks the trainer for the state
    """

    def __init__(
        self,
        options: AveragingOptions,
        client_mode: bool,
        key: RSAPrivateKey,
        signals: RoundSignals,
        status: TransferStatus,
        p2p: P2P,
        ask_for_state: AskForState,
    ):
        self._options, self._client_mode, self._p2p = options, client_mode, p2p
        namespace, timeouts = options.namespace, options.timeouts
        self._rounds = Rounds(p2p, key, options, signals)
        self._server = StateServer(ask_for_state, self._rounds, status, options.line, timeouts, options.admission)
        stream_to = streams_of(p2p, PeerService.handle_name(namespace, DOWNLOAD_STATE))
        detector = self._rounds.detector
        self._downloader = StateDownloader(
            stream_to, detector.heard, self._until_lost, status, options.line, timeouts, options.admission
        )
        self._calls = PeerService(
            namespace,
            self._rounds.rpc_join_group,
            self._rounds.groups.rpc_aggregate_part,
            self._server.rpc_download_state,
            self._ledger_server().rpc_download_ledger,
            self._rounds.rpc_show_evidence,
        )

    def _ledger_server(self) -> LedgerServer:
        p2p, options = self._p2p, self._options

        def pass_on(peer_id: PeerID, request: DownloadData) -> AsyncIterator[DownloadData]:
            return caller_of(p2p, peer_id, options.namespace)(request)

        return LedgerServer(options.ledger, limits_of(p2p).knows, pass_on, options.line)

    async def start(self) -> None:
        """Begin to answer other peers."""
        await self._rounds.detector.answer()
        if self._client_mode:  # it cannot be dialled, but peers that it has dialled can call it
            await self._calls.answer_downloads(self._p2p)
        else:
            await self._calls.answer(self._p2p)

    async def stop(self) -> None:
        """Stop answering calls; a client-mode peer's few calls are answered until the process ends."""
        if not self._client_mode:
            await self._calls.hang_up(self._p2p)

    async def do(self, command: Any) -> None:
        """Carry out a command of the trainer."""
        match command:
            case RunRound():
                await self._rounds.run(command, self._keep_average_of_round)
            case CancelRound():
                self._rounds.cancel()
            case Expect(peer_ids):
                self._rounds.expect(peer_ids)
            case SetStep(step, lineage):
                self._rounds.set_step(step, lineage)
                self._server.state_changed()
            case Followed(lineage):
                self._rounds.followed(lineage)
            case SetAdmission(certificate, lists):
                self._set_admission(certificate, lists)
            case CompareOrders(peer, ticket, future):
                future.set_result(await self._rounds.compare_orders(peer, ticket))
            case KeepAverage(step, before, after, future):
                await self._server.keep_average(step, before, after, self._options.averaged_at(step))
                future.set_result(None)
            case DownloadState(donors, request, future):
                await self._downloader.download(donors, request, future)
            case TookOver():
                self._rounds.took_over()
            case CancelDownload():
                self._downloader.cancel()
            case Finish(future):
                await self._rounds.groups.until_all_read()
                future.set_result(None)
            case _:
                raise TypeError(f"there is no such command: {command!r}")

    def _set_admission(self, certificate: bytes, lists: Mapping[str, bytes]) -> None:
        admission = self._options.admission
        admission.certificate = certificate
        try:
            newer = admission.lists.take_all(lists)
        except NotSigned as error:
            logger.warning(f"This peer does not follow a list of the organiser: it {error}")
            return
        if REMOVED in newer:
            self._rounds.turn_away_removed()
            self._server.end_uploads_of_removed()
        if ORDERS in newer:
            self._rounds.orders_changed()

    async def _keep_average_of_round(self, ticket: Ticket, group: Group) -> None:
        averaged = self._options.averaged_at(ticket.step)
        await self._server.keep_average(ticket.step, group.lineage, group.group_id, averaged)

    async def _until_lost(self, peer_id: PeerID) -> None:
        await self._rounds.detector.lost(peer_id, can_be_called=True)
