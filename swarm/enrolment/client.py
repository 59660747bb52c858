"""Asks the enrolment server that a join line names: to make a peer a member, or for a member's new certificate."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cryptography import x509
from hivemind.utils import get_logger
from hivemind.utils.crypto import RSAPrivateKey

from recipe.errors import InputError
from swarm.enrolment.join_line import JoinLine
from swarm.enrolment.messages import MAX_ANSWER_BYTES, EnrolAnswer, EnrolRequest, Server, printable, subkey_of
from swarm.enrolment.removed import SAID, Removed
from swarm.enrolment.rpc import ENROL, RENEW, SERVICE, load_grpc
from swarm.enrolment.tls import SERVER_NAME, fingerprint_of
from swarm.network.addresses import host_and_port
from swarm.network.signed_records import peer_of
from swarm.protocol.certificates import Authority, Certificate, NotSigned, Removals, printed

if TYPE_CHECKING:
    import grpc

logger = get_logger(__name__)

LOOK_SECONDS = 6.0
"""How long a connection may take. With the imports before it, a person learns within ten seconds that no server is
there."""
MAX_SENTENCE_LENGTH = 400
"""How many characters of a server's message are shown."""
_OPTIONS = (
    ("grpc.ssl_target_name_override", SERVER_NAME),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.enable_http_proxy", 0),  # the server's certificate was fetched without a proxy, too
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # no connection of another call: its certificate was not checked now
)


class TryLater(InputError):  # noqa: N818
    """No server answers, or it gets too many calls. That may pass."""


class Refused(InputError):  # noqa: N818
    """The organiser's server refuses, and would do so again."""


def enrol(line: JoinLine, key: RSAPrivateKey, name: str, timeout_seconds: float = 10.0) -> EnrolAnswer:
    """Make this peer a member with an invitation. A peer that is a member already gets a new certificate.

    Args:
        key: private key of the peer
        name: under which the organiser may know it; may be empty
        timeout_seconds: for everything

    Raises:
        TryLater: no server answers, or it gets too many calls
        Removed: the organiser has removed this peer
        Refused: the server refuses for another reason
        InputError: the line has no invitation, or another server answers, or a clock is wrong
    """
    if not line.enrolment_endpoints:
        raise InputError("This join line carries no invitation: ask the organiser for one that does.")
    return _Enrolment(line, key, timeout_seconds).ask(ENROL, line.token, printable(name), b"")


def renew(
    line: JoinLine, key: RSAPrivateKey, name: str, certificate: bytes, timeout_seconds: float = 10.0
) -> EnrolAnswer:
    """Get a new certificate for one that is about to end; the line needs no invitation. The rest as `enrol`.

    Args:
        certificate: the present one
    """
    if not line.server_endpoints:
        raise InputError("This join line names no enrolment server: ask the organiser for one that does.")
    return _Enrolment(line, key, timeout_seconds).ask(RENEW, b"", printable(name), certificate)


@dataclass(frozen=True)
class _Found:
    """What was found at an endpoint.

    Args:
        endpoint: as people know it
        address: IP address and port, as gRPC writes them
        certificate: of the server that answers, as DER
        failure: why no server answers; the end of a sentence
    """

    endpoint: str
    address: str = ""
    certificate: bytes = b""
    failure: str = ""


class _Enrolment:
    """Makes one call, at the first endpoint where the right server answers."""

    def __init__(self, line: JoinLine, key: RSAPrivateKey, timeout_seconds: float):
        self._line, self._key = line, key
        self._deadline = time.monotonic() + timeout_seconds
        self._authority = Authority(line.run_id, line.organiser)
        self._peer_id = peer_of(subkey_of(key))

    def ask(self, method: str, token: bytes, name: str, certificate: bytes) -> EnrolAnswer:
        server = Server(self._line.organiser, self._line.fingerprint)
        request = EnrolRequest.signed(self._key, server, token, name, certificate).to_bytes()
        names = [host_and_port(*endpoint) for endpoint in self._line.server_endpoints]
        failures: dict[str, str] = dict.fromkeys(names, "no answer in time")
        strangers: list[str] = []
        for found in self._look_at_all():
            if found.failure:
                failures[found.endpoint] = found.failure
            elif fingerprint_of(found.certificate) != self._line.fingerprint:
                strangers.append(found.endpoint)
            else:
                _check_clock(found.certificate)
                try:
                    return self._checked(self._call(found, method, request))
                except _NoAnswer as error:
                    failures[found.endpoint] = str(error)
        if strangers:
            raise InputError(
                f"The enrolment server at {', '.join(strangers)} is not the one of this join line: the line is of "
                "another run, or the connection is intercepted; ask the organiser for a new join line."
            )
        tried = ", ".join(f"{name} ({failures[name]})" for name in names)
        raise TryLater(
            f"The enrolment server does not answer: {tried}; ask the organiser whether `swarm start` or `swarm enrol` "
            "runs there, and whether that port is open."
        )

    def _look_at_all(self):
        """Look at all endpoints at the same time, and yield what was found as it comes."""
        found: queue.Queue[_Found] = queue.Queue()
        endpoints, until = self._line.server_endpoints, time.monotonic() + LOOK_SECONDS
        seconds = min(LOOK_SECONDS, self._left())
        for host, port in endpoints:
            # A name look-up has no timeout, so it runs in a daemon thread, which can be left behind.
            looker = threading.Thread(
                target=lambda h=host, p=port: found.put(_look(h, p, seconds)), name="enrolment", daemon=True
            )
            looker.start()
        for _ in endpoints:
            try:
                yield found.get(timeout=max(0.001, min(until - time.monotonic(), self._left())))
            except queue.Empty:
                return

    def _left(self) -> float:
        """Seconds that are left; never 0, which would mean no limit."""
        return max(0.001, self._deadline - time.monotonic())

    def _call(self, found: _Found, method: str, request: bytes) -> bytes:
        """Send the request to the server and return its answer.

        Raises:
            _NoAnswer: the server does not answer any more
            InputError: it refuses or fails, as `_explained` says
        """
        grpc = load_grpc()
        pem = ssl.DER_cert_to_PEM_cert(found.certificate).encode()
        credentials = grpc.ssl_channel_credentials(root_certificates=pem)
        with grpc.secure_channel(found.address, credentials, options=_OPTIONS) as channel:
            try:
                return channel.unary_unary(f"/{SERVICE}/{method}")(request, timeout=self._left())
            except grpc.RpcError as error:
                raise _explained(grpc, error) from None

    def _checked(self, data: bytes) -> EnrolAnswer:
        """Check the answer: even the organiser's server may send something wrong."""
        try:
            answer = EnrolAnswer.from_bytes(data)
            certificate = Certificate.read(answer.certificate, self._authority)
        except NotSigned as error:
            raise InputError(f"The new certificate {error}: ask the organiser to look at the server.") from None
        except ValueError as error:
            raise InputError(f"The enrolment server's answer cannot be read ({error}): update this program.") from None
        if certificate.peer_id != self._peer_id:
            raise InputError("The new certificate is of another peer: ask the organiser to look at the server.")
        try:
            certificate.check_time()
        except NotSigned as error:
            raise InputError(
                f"The new certificate {error}; this machine's clock and the organiser's differ: switch on NTP on both, "
                "and try again."
            ) from None
        return EnrolAnswer(answer.certificate, self._sound(answer.removals))

    def _sound(self, removals: bytes) -> bytes:
        """Return the list of removed members; empty if it does not count: other peers may have one that does."""
        try:
            if removals:
                Removals.read(removals, self._authority)
        except NotSigned as error:
            logger.warning(f"The enrolment server's list of removed members {error}")
            return b""
        return removals


class _NoAnswer(Exception):  # noqa: N818
    """The server at an endpoint does not answer any more. The text is the end of a sentence."""


def _look(host: str, port: int, timeout_seconds: float) -> _Found:
    """Fetch the certificate of the server that answers there, whichever it is: its fingerprint is compared later."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # gRPC closes a connection without it
    endpoint = host_and_port(host, port)
    try:
        with (
            socket.create_connection((host, port), timeout_seconds) as plain,
            context.wrap_socket(plain, server_hostname=SERVER_NAME) as secure,
        ):
            family = "ipv6" if plain.family == socket.AF_INET6 else "ipv4"
            address = f"{family}:{host_and_port(secure.getpeername()[0], port)}"
            return _Found(endpoint, address, secure.getpeercert(binary_form=True) or b"")
    except socket.gaierror:
        return _Found(endpoint, failure="name not found")
    except TimeoutError:
        return _Found(endpoint, failure="no answer in time")
    except ssl.SSLError:
        return _Found(endpoint, failure="no enrolment server")
    except (OSError, ValueError) as error:
        return _Found(endpoint, failure=(getattr(error, "strerror", None) or str(error)).lower())


def _check_clock(certificate: bytes) -> None:
    """Raises InputError: TLS would refuse this certificate, which is the right one, because a clock is wrong"""
    known, now = x509.load_der_x509_certificate(certificate), datetime.now(UTC)
    if not known.not_valid_before_utc <= now <= known.not_valid_after_utc:
        begin, end = known.not_valid_before_utc, known.not_valid_after_utc
        raise InputError(
            f"It is {now:%Y-%m-%d} on this machine, and the enrolment server's certificate counts from "
            f"{begin:%Y-%m-%d} to {end:%Y-%m-%d}: set this clock right (NTP). If it is right, the organiser's clock "
            "was wrong: ask the organiser to set that clock, delete tls.pem, start the organiser's peer again and send "
            "a new join line."
        )


def _explained(grpc: Any, error: grpc.RpcError) -> Exception:
    """Return the exception for a failed call."""
    code, said = error.code(), _sentence(error.details() or "")
    if code is grpc.StatusCode.PERMISSION_DENIED and said.startswith(SAID):
        return Removed(f"The organiser's server refuses: {said}.")
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT):
        return Refused(f"The organiser's server refuses: {said}.")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return TryLater(f"The organiser's server is busy: {said or 'try again in a few minutes'}.")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return InputError("The enrolment server is of another version of this program: update both.")
    if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
        return TryLater(f"The organiser's server has failed ({said}): tell the organiser, and try again later.")
    return _NoAnswer(said or "no answer in time")


def _sentence(text: str) -> str:
    """Return a server's message in a form that can be shown to a person."""
    return printed(text)[:MAX_SENTENCE_LENGTH]
