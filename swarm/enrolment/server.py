"""The enrolment server, a small gRPC server beside the organiser's key: makes members and renews their certificates."""

from __future__ import annotations

import ipaddress
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from recipe.errors import InputError
from swarm.enrolment.messages import MAX_REQUEST_BYTES, EnrolAnswer, EnrolRequest, Server
from swarm.enrolment.organiser_key import check_right
from swarm.enrolment.registry import Member, NotInvited, Registry, removed_sentence
from swarm.enrolment.rpc import ENROL, RENEW, SERVICE, load_grpc
from swarm.enrolment.tls import ensure_tls, fingerprint_in
from swarm.network.addresses import host_and_port, household
from swarm.protocol.certificates import Authority, Certificate, NotSigned, Right, Signer
from swarm.runtime.once import Once
from swarm.runtime.processes import allow_many_files
from swarm.runtime.token_bucket import TokenBucket, TokenBuckets

if TYPE_CHECKING:
    import grpc

logger = get_logger(__name__)

THREADS = 4
MAX_CALLS = 32
"""Calls at a time; further ones are refused."""
MAX_CONNECTIONS = 4096
CALLS_PER_MINUTE = 60
"""Calls of all hosts together."""
CALLS_OF_A_HOST, CALLS_OF_A_HOST_PER_MINUTE = 10, 5
"""Calls of one IP address: at once, and then in a minute. A whole laboratory may be behind one address."""
REQUEST_SECONDS = 5.0
"""Time in which a request has to be complete: it is a few hundred bytes."""
STOP_SECONDS = 2.0
MAX_DAYS = 365.0
LATEST_RENEWAL_SECONDS = 30 * 24 * 3600
"""How long after its end a certificate can still be renewed."""
MAX_COMPLAINTS = 16
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # otherwise two servers could share a port without an error
    ("grpc.max_receive_message_length", 2 * MAX_REQUEST_BYTES),
    ("grpc.max_metadata_size", 2**13),
    ("grpc.absolute_max_metadata_size", 2**14),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 5_000),
    # A volunteer needs a connection for a second, so one that stays longer can be closed.
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.max_connection_age_ms", 30_000),
    ("grpc.max_connection_age_grace_ms", 5_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)
_PEER = re.compile(r"ipv[46]:\[?([^\]]+?)\]?:\d+")


class TooManyCalls(ValueError):  # noqa: N818 (reads as what it says)
    """There are too many calls; the caller may try again later. The text is the end of a sentence for the volunteer."""


class CallLimits:
    """Limits how often the server is called, by one IP address and by all together.

    Args:
        per_minute: calls of all together; as many may come at once
    """

    def __init__(self, per_minute: float = CALLS_PER_MINUTE):
        self._lock = threading.Lock()  # several threads serve
        self._all = TokenBucket(per_minute, per_minute / 60)
        self._of_hosts = TokenBuckets(CALLS_OF_A_HOST, CALLS_OF_A_HOST_PER_MINUTE / 60)

    def may_call(self, caller: str) -> bool:
        """Whether this caller may call once more; if so, the call is counted.

        Args:
            caller: as gRPC writes it, such as `ipv4:203.0.113.5:40000`
        """
        with self._lock:
            host = _host_of(caller)
            is_here = host is not None and host.is_loopback  # a whole swarm may start on this machine
            if not is_here and not self._of_hosts.take(household(str(host))):  # callers without an address share one
                return False
            return self._all.take()


class EnrolmentServer:
    """Makes members of people with an invitation. It runs in threads of this process, between `start` and `stop`.

    Start it after the last fork: a forked process would keep the port open when this one is killed.

    Args:
        registry: the organiser's books of this run
        signer: the organiser's key, or that of a deputy with the right to enrol
        authority: the run, and the organiser's public key
        host: IP address to listen on, such as `0.0.0.0`
        port: 0 for any free one
        certificate_days: how long a certificate counts
        clock: returns seconds since 1970
        limits: of calls

    Raises:
        InputError: this key cannot sign certificates of this run; or the organiser's folder cannot be used
    """

    def __init__(
        self,
        registry: Registry,
        signer: Signer,
        authority: Authority,
        host: str,
        port: int,
        certificate_days: float = 7.0,
        clock: Callable[[], float] = time.time,
        limits: CallLimits | None = None,
    ):
        if not 0 < certificate_days <= MAX_DAYS:
            raise InputError(
                f"Certificates for {certificate_days:g} days cannot be made: give more than 0 and at most {MAX_DAYS:g}."
            )
        check_right(signer, authority, Right.ENROL, clock())
        self._registry, self._signer, self._authority = registry, signer, authority
        self._host, self._port, self._certificate_days, self._clock = host, port, certificate_days, clock
        self._limits = limits or CallLimits()
        self._identity = Server(authority.organiser, fingerprint_in(registry.folder))
        self._grpc = load_grpc()
        self._server: grpc.Server | None = None
        self._complaints = Once(MAX_COMPLAINTS)

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the TLS certificate, as join lines carry it."""
        return self._identity.fingerprint

    def start(self) -> int:
        """Listen from now on.

        Returns:
            the port

        Raises:
            InputError: the port cannot be listened on
        """
        allow_many_files()  # otherwise strangers' connections could leave no file for the books
        grpc = self._grpc
        server = grpc.server(
            ThreadPoolExecutor(THREADS, "enrolment"), options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS
        )
        methods = {ENROL: self._enrol, RENEW: self._renew}
        handlers = {name: grpc.stream_unary_rpc_method_handler(self._answers(grant)) for name, grant in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            credentials = grpc.ssl_server_credentials([ensure_tls(self._registry.folder)])
            port = server.add_secure_port(host_and_port(self._host, self._port), credentials)
        except RuntimeError:
            server.stop(0)
            raise InputError(
                f"No peer could enrol, because this machine cannot listen on {self._host} at port {self._port}: choose "
                "another port for enrolment, 0 for any, or stop what listens there."
            ) from None
        server.start()
        self._server = server
        return port

    def stop(self) -> None:
        """Finish the calls that have begun, and close the port."""
        if self._server is not None:
            self._server.stop(STOP_SECONDS).wait()
            self._server = None

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _answers(self, grant: Callable[[EnrolRequest, PeerID], EnrolAnswer]) -> Callable[[Iterator[bytes], Any], bytes]:
        """Return a handler for gRPC. It takes a stream of messages, so that it sees the caller before it reads any."""

        def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            code = self._grpc.StatusCode
            try:
                if not self._limits.may_call(context.peer()):
                    raise TooManyCalls("too many peers are enrolling at this moment: try again in a few minutes")
                request = EnrolRequest.from_bytes(_first(messages, context))
                return grant(request, request.check(self._identity)).to_bytes()
            except TooManyCalls as error:
                status, why = code.RESOURCE_EXHAUSTED, str(error)
            except NotInvited as error:
                status, why = code.PERMISSION_DENIED, str(error)
            except InputError as error:  # the organiser's own files cannot be used
                self._complain_once(str(error))
                return context.abort(code.INTERNAL, "its own files or its key cannot be used")
            except ValueError as error:
                self._complain_once("A caller has sent a message that is not an enrolment request for this run.")
                return context.abort(code.INVALID_ARGUMENT, f"the request cannot be used: {error}")
            self._complain_once(f"An enrolment was refused: {why}.")
            return context.abort(status, why)

        return answer

    def _enrol(self, request: EnrolRequest, peer_id: PeerID) -> EnrolAnswer:
        if not request.token:
            raise NotInvited("the request has no invitation: ask the organiser for a join line with one")
        member = self._registry.use_invitation(request.token, peer_id, request.name)
        answer = self._certified(member)
        logger.info(f"{member.name} has enrolled: {peer_id}")
        return answer

    def _renew(self, request: EnrolRequest, peer_id: PeerID) -> EnrolAnswer:
        try:
            shown = Certificate.read(request.certificate, self._authority)
        except NotSigned as error:
            raise NotInvited(f"the certificate {error}") from None
        if shown.peer_id != peer_id:
            raise NotInvited("the certificate is of another peer")
        member = self._registry.member_of(peer_id)
        if member is None:
            raise NotInvited("this server does not know the peer: ask the organiser for a new join line")
        if member.why_removed is not None:
            raise NotInvited(removed_sentence(member))
        if self._clock() > shown.end + LATEST_RENEWAL_SECONDS:
            raise NotInvited("the certificate ended too long ago: ask the organiser for a new join line")
        return self._certified(member)

    def _certified(self, member: Member) -> EnrolAnswer:
        """Make a certificate of what is in the books, whatever the member says of itself."""
        certificate = self._registry.certify(member, self._signer, self._authority, self._certificate_days)
        by_now = self._registry.member_of(member.peer_id)
        if by_now.why_removed is not None:  # since the caller of this method has looked
            raise NotInvited(removed_sentence(by_now))
        return EnrolAnswer(certificate, self._registry.removals())

    def _complain_once(self, about: str) -> None:
        if self._complaints.first(about):
            logger.warning(about)


def _first(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    """Return the request; empty if none comes. A slow caller loses its call, since a thread waits for the request."""
    timer = threading.Timer(REQUEST_SECONDS, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        return next(messages, b"")
    finally:
        timer.cancel()


def _host_of(caller: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address of a caller; None if it cannot be told."""
    found = _PEER.fullmatch(unquote(caller))
    try:
        address = ipaddress.ip_address(found[1]) if found else None
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
