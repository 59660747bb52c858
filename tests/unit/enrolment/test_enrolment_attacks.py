"""What strangers do to the enrolment server, and what a lying server says to volunteers."""

import contextlib
import os
import resource
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from recipe.errors import InputError
from swarm.enrolment.client import TryLater, enrol
from swarm.enrolment.messages import EnrolAnswer, EnrolRequest, Server, subkey_of
from swarm.enrolment.organiser_key import make_deputy
from swarm.enrolment.rpc import ENROL, RENEW, SERVICE, load_grpc
from swarm.enrolment.server import THREADS, CallLimits
from swarm.enrolment.tls import SERVER_NAME, ensure_tls
from swarm.network.signed_records import peer_of
from swarm.protocol.certificates import EVERYTHING, Certificate, Removals, Right, Signer, warrant

grpc = load_grpc()


@contextlib.contextmanager
def channel_to(organiser, line):
    """A channel of a stranger that has the join line and sends anything."""
    certificate = ensure_tls(organiser.registry.folder)[1]
    options = (("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.use_local_subchannel_pool", 1))
    credentials = grpc.ssl_channel_credentials(certificate)
    with grpc.secure_channel(f"127.0.0.1:{line.enrolment_port}", credentials, options) as channel:
        yield channel


class CountedLimits(CallLimits):
    """Call limits with a semaphore, so that a test can wait for calls that are served."""

    def __init__(self):
        super().__init__()
        self.called = threading.Semaphore(0)

    def may_call(self, caller: str) -> bool:
        self.called.release()
        return super().may_call(caller)


def code_of(channel, method: str, data: bytes):
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=30)
    return caught.value.code()


# ---- strangers at the server ----------------------------------------------------------------------------------------


def test_it_answers_after_garbage(organiser, key):
    line = organiser.invite(organiser.serve())
    with channel_to(organiser, line) as channel:
        for method in (ENROL, RENEW):
            for garbage in (b"", b"garbage", os.urandom(4000), os.urandom(5000)):
                assert code_of(channel, method, garbage) is grpc.StatusCode.INVALID_ARGUMENT
            assert code_of(channel, method, bytes(2**20)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert code_of(channel, "NoSuchMethod", b"") is grpc.StatusCode.UNIMPLEMENTED
    assert enrol(line, key, "Ana").certificate


def test_it_answers_after_what_is_no_grpc(organiser, key):
    line = organiser.invite(organiser.serve())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    address = ("127.0.0.1", line.enrolment_port)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(2**20)):
        with contextlib.suppress(OSError), socket.create_connection(address, 10) as plain:
            plain.sendall(garbage)
        with contextlib.suppress(OSError), context.wrap_socket(socket.create_connection(address, 10)) as secure:
            secure.sendall(garbage)
    silent = [socket.create_connection(address, 10) for _ in range(20)]
    try:
        assert enrol(line, key, "Ana").certificate
    finally:
        for connection in silent:
            connection.close()


def test_a_caller_that_never_sends_a_request_blocks_no_other_for_long(organiser, key, monkeypatch):
    monkeypatch.setattr("swarm.enrolment.server.REQUEST_SECONDS", 0.3)
    limits, never = CountedLimits(), threading.Event()
    line = organiser.invite(organiser.serve(limits=limits))

    def nothing():
        never.wait()
        yield from ()

    with contextlib.ExitStack() as channels:
        many = [channels.enter_context(channel_to(organiser, line)) for _ in range(2 * THREADS)]
        calls = [channel.stream_unary(f"/{SERVICE}/{ENROL}").future(nothing()) for channel in many]
        try:
            for _ in range(THREADS):  # then all threads are busy
                assert limits.called.acquire(timeout=30)
            assert enrol(line, key, "Ana", 60).certificate
        finally:
            never.set()
            for call in calls:
                call.cancel()


def test_connections_of_strangers_leave_files_for_the_books(organiser, key):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        line = organiser.invite(organiser.serve())
        with contextlib.ExitStack() as held:
            for _ in range(200):  # each has two ends in this process
                held.enter_context(socket.create_connection(("127.0.0.1", line.enrolment_port), 10))
            assert enrol(line, key, "Ana", 30).certificate
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_callers_at_once_enrol_or_hear_that_it_is_too_much(organiser, key):
    line = organiser.invite(organiser.serve())

    def ask(_) -> bool:
        try:
            return bool(enrol(line, key, "Ana", 60).certificate)
        except TryLater:
            return False

    with ThreadPoolExecutor(16) as threads:
        assert any(threads.map(ask, range(40)))
    assert len(organiser.registry.members()) == 1


def test_a_recorded_request_of_another_peer_is_of_no_use(organiser, another_organiser, key):
    """A server that a volunteer has asked cannot enrol in her name at another."""
    line = organiser.invite(organiser.serve())
    for server in (
        Server(another_organiser.signer.public_key, line.fingerprint),
        Server(line.organiser, bytes(16)),
    ):
        recorded = EnrolRequest.signed(key, server, line.token, "Ana").to_bytes()
        with channel_to(organiser, line) as channel:
            assert code_of(channel, ENROL, recorded) is grpc.StatusCode.INVALID_ARGUMENT
    assert organiser.registry.members() == []


# ---- a server that lies ---------------------------------------------------------------------------------------------


@pytest.fixture
def lying(organiser):
    """A server with the right TLS certificate that gives any answer, as if its machine had been taken over."""
    servers = []

    def start(answer: bytes):
        server = grpc.server(ThreadPoolExecutor(1))
        methods = {ENROL: grpc.unary_unary_rpc_method_handler(lambda request, context: answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        credentials = grpc.ssl_server_credentials([ensure_tls(organiser.registry.folder)])
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        servers.append(server)
        return replace(organiser.invite(organiser.serve()), enrolment_port=port)

    yield start
    for server in servers:
        server.stop(0).wait()


def certificate_of(key, run_id="digits", begin=-600, end=3600) -> Certificate:
    now = int(time.time())
    peer = peer_of(subkey_of(key))
    return Certificate(run_id, peer, 1000 * now, EVERYTHING, now + begin, now + end, "Ana")


def refusal(lying, key, answer: bytes) -> str:
    with pytest.raises(InputError) as caught:
        enrol(lying(answer), key, "Ana")
    return str(caught.value)


@pytest.mark.parametrize(
    "answer", [b"", b"garbage", EnrolAnswer(b"", b"").to_bytes(), EnrolAnswer(b"x", b"").to_bytes()]
)
def test_answers_that_cannot_be_read(lying, key, answer):
    assert "cannot be read" in refusal(lying, key, answer)


def test_an_answer_that_is_too_long(lying, key):
    assert "The organiser's server is busy" in refusal(lying, key, bytes(2**20))


def test_certificates_that_are_of_no_use(lying, organiser, key, other_key):
    for certificate, why in (
        (certificate_of(other_key), "is of another peer"),
        (certificate_of(key, run_id="other"), "is for run 'other', not for 'digits'"),
        (certificate_of(key, begin=1000), "clock and the organiser's differ: switch on NTP on both"),
        (certificate_of(key, end=-100), "clock and the organiser's differ"),
    ):
        answer = EnrolAnswer(certificate.signed_by(organiser.signer), b"").to_bytes()
        assert why in refusal(lying, key, answer)


def test_certificates_without_a_valid_signature_are_refused(lying, organiser, key, tmp_path):
    without_right = make_deputy(organiser.signer, "digits", Right.REMOVE, 1, tmp_path / "deputy.pem", None)
    expired, now = Ed25519PrivateKey.generate(), int(time.time())
    public = expired.public_key().public_bytes_raw()
    for signer, why in (
        (Signer(Ed25519PrivateKey.generate()), "was not signed by the organiser of this run"),
        (without_right, "was signed by a deputy who has no right to"),
        (
            Signer(expired, warrant(organiser.signer, "digits", public, Right.ENROL, now - 100, now - 10)),
            "has ended on",
        ),
    ):
        answer = EnrolAnswer(certificate_of(key).signed_by(signer), b"").to_bytes()
        assert why in refusal(lying, key, answer)


def test_an_unusable_list_of_removals_is_left_out(lying, organiser, key):
    certificate = certificate_of(key).signed_by(organiser.signer)
    foreign = Removals("digits", 5, {1: ""}).signed_by(Signer(Ed25519PrivateKey.generate()))
    for removals in (b"garbage", foreign):
        assert enrol(lying(EnrolAnswer(certificate, removals).to_bytes()), key, "Ana").removals == b""
