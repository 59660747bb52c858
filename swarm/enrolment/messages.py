"""The messages between a volunteer and the enrolment server. Neither side trusts the other's message."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from msgspec import Meta

from swarm.enrolment.join_line import TOKEN_BYTES
from swarm.network.signed_records import MAX_SUBKEY_BYTES, peer_of
from swarm.protocol.certificates import MAX_CERTIFICATE_BYTES, MAX_NAME_LENGTH, MAX_REMOVALS_BYTES, printed
from swarm.protocol.wire import from_wire, to_wire

KIND = "swarm enrolment 1"
MAX_REQUEST_BYTES = 4096
MAX_SIGNATURE_BYTES = 700
"""Enough for the longest key, 4,096 bits, in base64."""
MAX_ANSWER_BYTES = MAX_CERTIFICATE_BYTES + MAX_REMOVALS_BYTES + 16

_Certificate = Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]
_REQUEST = msgspec.msgpack.Decoder(
    tuple[
        Annotated[bytes, Meta(max_length=TOKEN_BYTES)],
        Annotated[bytes, Meta(max_length=MAX_SUBKEY_BYTES)],
        Annotated[str, Meta(max_length=MAX_NAME_LENGTH)],
        _Certificate,
        Annotated[bytes, Meta(max_length=MAX_SIGNATURE_BYTES)],
    ]
)
_ANSWER = msgspec.msgpack.Decoder(tuple[_Certificate, Annotated[bytes, Meta(max_length=MAX_REMOVALS_BYTES)]])


@dataclass(frozen=True)
class Server:
    """The enrolment server that a request is for; no other server can use the request.

    Args:
        organiser: public key of the run's organiser
        fingerprint: of the server's TLS certificate
    """

    organiser: bytes
    fingerprint: bytes


@dataclass(frozen=True)
class EnrolRequest:
    """The request of a peer that wants to become a member, or to stay one.

    Args:
        token: the invitation; empty for a renewal
        subkey: the peer's public key, as the DHT writes it
        name: under which the volunteer wants to be known; may be empty
        certificate: the one to be renewed; empty without one
        signature: by the peer's private key
    """

    token: bytes
    subkey: bytes
    name: str
    certificate: bytes
    signature: bytes

    @classmethod
    def signed(
        cls, key: RSAPrivateKey, server: Server, token: bytes, name: str, certificate: bytes = b""
    ) -> EnrolRequest:
        """Make a request of the peer with this key."""
        text = _signed_text(server, token, name, certificate)
        return cls(token, subkey_of(key), name, certificate, key.sign(text))

    def to_bytes(self) -> bytes:
        """Return at most 4 KiB."""
        return to_wire(self.token, self.subkey, self.name, self.certificate, self.signature)

    @classmethod
    def from_bytes(cls, data: bytes) -> EnrolRequest:
        """Raises ValueError: something is wrong with the message; its sender is not trusted"""
        token, *rest = from_wire(_REQUEST, data, MAX_REQUEST_BYTES)
        if len(token) not in (0, TOKEN_BYTES):
            raise ValueError("its invitation has the wrong length")
        return cls(token, *rest)

    def check(self, server: Server) -> PeerID:
        """Return the peer that has signed this request.

        Raises:
            ValueError: no peer has signed it, or it is for another server
        """
        peer = peer_of(self.subkey)
        if peer is None:
            raise ValueError("it names no peer")
        try:
            key = RSAPublicKey.from_bytes(self.subkey.removeprefix(b"[owner:").removesuffix(b"]"))
        except (ValueError, UnsupportedAlgorithm):
            raise ValueError("it names no peer") from None
        if not key.verify(_signed_text(server, self.token, self.name, self.certificate), self.signature):
            raise ValueError("it was not signed by that peer for this run")
        return peer


@dataclass(frozen=True)
class EnrolAnswer:
    """The answer that makes the peer a member.

    Args:
        certificate: of the membership, signed
        removals: the newest list of removed members, signed; empty as long as there is none
    """

    certificate: bytes
    removals: bytes

    def to_bytes(self) -> bytes:
        """Return at most 65 KiB."""
        return to_wire(self.certificate, self.removals)

    @classmethod
    def from_bytes(cls, data: bytes) -> EnrolAnswer:
        """Raises ValueError: something is wrong with the message; its sender is not trusted"""
        return cls(*from_wire(_ANSWER, data, MAX_ANSWER_BYTES))


def printable(name: str) -> str:
    """Return a name as a member may have it: at most 64 characters that can be shown; empty if nothing is left."""
    return printed(name).strip()[:MAX_NAME_LENGTH].strip()


def subkey_of(key: RSAPrivateKey) -> bytes:
    """The peer's public key, as the DHT writes it."""
    return RSASignatureValidator(key).local_public_key


def _signed_text(server: Server, token: bytes, name: str, certificate: bytes) -> bytes:
    digest = hashlib.sha256(token).digest()
    return to_wire(KIND, server.organiser, server.fingerprint, digest, certificate, name)
