"""Owners of records, for tests: public keys that nobody has the private part of, and somebody who signs anything."""

import hashlib
from functools import cache

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord


@cache
def subkey_of(name: str) -> bytes:
    """The subkey of the records of a peer that is called so."""
    modulus = 2**2047 + int.from_bytes(hashlib.sha512(name.encode()).digest(), "big") * 2 + 1
    key = RSAPublicNumbers(65537, modulus).public_key()
    return b"[owner:" + key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"]"


class Sign:
    """Signs any bytes as this node's record and asks all others to store it; runs in the DHT process.

    Args:
        subkey: before it is encoded
        value: so many times, since Hivemind's pipe to the DHT process is not made for much at once

    Returns:
        for each other node, whether it did
    """

    def __init__(self, key: str, subkey: object, value: tuple[int, bytes], expiration_time: float):
        self.key, self.subkey, self.value, self.expiration_time = key, subkey, value, expiration_time

    async def __call__(self, _dht, node) -> list[bool]:
        protocol, key = node.protocol, DHTID.generate(self.key)
        subkey, value = protocol.serializer.dumps(self.subkey), self.value[0] * self.value[1]
        signed = protocol.record_validator.sign_value(DHTRecord(key.to_bytes(), subkey, value, self.expiration_time))
        found = []
        for peer in list(protocol.routing_table.peer_id_to_uid):
            stored = await protocol.call_store(peer, [key], [signed], [self.expiration_time], subkeys=[self.subkey])
            found += stored or [False]
        return found
