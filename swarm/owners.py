"""Records that only their owner can write: the subkey is the owner's public key, and the value is signed with its key.

A peer's id is the hash of that public key (libp2p's definition), so every record says which peer wrote it, and nobody
can speak for another one. What is not signed, too large, unreadable or meant to stay for ever is not stored, not passed
on and not read: of a key with one value that cannot be decoded, Hivemind's readers would wait for ever.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack
from cryptography.hazmat.primitives import serialization
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from recipe.errors import InputError

_OWNER = re.compile(rb"\[owner:(ssh-rsa [A-Za-z0-9+/]{100,1400}={0,2})\]")
_SHA2_256 = b"\x12\x20"  # multihash: its code, and 32 bytes
MAX_SUBKEY_BYTES = 2000
MAX_VALUE_BYTES = 2**16 + 2**11
"""A run card, and its signature."""
MAX_LIFE_SECONDS = 3600.0
"""What nobody renews is gone after so long."""


class OwnedRecords(RSASignatureValidator):
    """Signs what this peer stores, and refuses what somebody else has stored in the name of a third.

    :param key: this peer's own
    """

    def __init__(self, key: RSAPrivateKey):
        super().__init__(key)

    def validate(self, record: DHTRecord) -> bool:
        if record.subkey is None or len(record.subkey) > MAX_SUBKEY_BYTES or len(record.value) > MAX_VALUE_BYTES:
            return False
        if not record.expiration_time <= get_dht_time() + MAX_LIFE_SECONDS:  # nor NaN
            return False
        return _is_sound(self, record)


@lru_cache(maxsize=256)
def _is_sound(validator: OwnedRecords, record: DHTRecord) -> bool:
    """The same record comes from several nodes, and is read again and again: it is checked once."""
    try:
        subkey = plain(record.subkey)
        if not isinstance(subkey, bytes) or _OWNER.fullmatch(subkey) is None:
            return False
        if MSGPackSerializer.dumps(subkey) != record.subkey:  # it would be passed on in other bytes than were signed
            return False
        plain(validator.strip_value(record))
        return RSASignatureValidator.validate(validator, record)
    except Exception:  # a stranger's bytes: no key, no text, no signature
        return False


def plain(data: bytes) -> Any:
    """As Hivemind decodes it, but without the types that it adds.

    :raises ValueError: there is nothing that can be decoded, or more
    """
    return msgpack.unpackb(data, raw=False, ext_hook=_refuse)


def _refuse(code: int, data: bytes) -> Any:
    raise ValueError(f"type {code} of {len(data)} bytes")


def read_key(path: Path) -> RSAPrivateKey:
    """The private key in an identity file of libp2p."""
    content = crypto_pb2.PrivateKey.FromString(path.read_bytes())
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key.__setstate__({"_private_key": content.data})  # it has no other way in: the constructor makes a new key
    return key


def owned_entries(found: Any, most: int) -> Iterator[tuple[PeerID, Any]]:
    """The owners and the values of what has been found under a key of the DHT, at most so many."""
    entries = getattr(found, "value", None)
    for subkey, entry in islice(entries.items() if isinstance(entries, Mapping) else (), most):
        owner = peer_of(subkey) if isinstance(subkey, bytes) else None
        if owner is not None and getattr(entry, "value", None) is not None:
            yield owner, entry.value


@lru_cache(maxsize=4096)
def peer_of(subkey: bytes) -> PeerID | None:
    """The peer that owns records with this subkey; None if it names no key."""
    match = _OWNER.fullmatch(subkey[:MAX_SUBKEY_BYTES])
    if match is None:
        return None
    try:
        key = serialization.load_ssh_public_key(match[1])
        der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    except Exception:  # a stranger's bytes
        return None
    public_key = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    return PeerID(_SHA2_256 + hashlib.sha256(public_key).digest())


def prepare_identity(path: Path) -> PeerID:
    """The peer id of a private key file, made (RSA, mode 0600) if there is none.

    :raises InputError: it cannot be made, read or understood.
    """
    try:
        if not path.exists():
            _write_identity(path)
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"--identity-path {path} cannot be used ({error.strerror}): name a file in a folder you may write to."
        ) from None
    try:
        return PeerID.from_identity(content)
    except Exception:  # protobuf, cryptography and hivemind each have their own
        raise InputError(
            f"--identity-path {path} does not hold a peer's private key: restore it, or delete it for a new identity."
        ) from None


def _write_identity(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    key = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=RSAPrivateKey().to_bytes())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.SerializeToString())
