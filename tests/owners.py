"""Owners of records, for tests that need many of them: public keys that nobody has the private part of."""

import hashlib
from functools import cache

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat


@cache
def subkey_of(name: str) -> bytes:
    """The subkey of the records of a peer that is called so."""
    modulus = 2**1023 + int.from_bytes(hashlib.sha512(name.encode()).digest(), "big") * 2 + 1
    key = RSAPublicNumbers(65537, modulus).public_key()
    return b"[owner:" + key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"]"
