"""Encrypts a few bytes with a passphrase: scrypt makes a key of it, with which AES-256-GCM encrypts.

The result is text, so that it can be mailed or printed: a title, and lines of base64.
"""

from __future__ import annotations

import base64
import hashlib
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

TITLE = "swarm-vit identity 1"
SALT_BYTES, NONCE_BYTES, DIGEST_BYTES = 16, 12, 8
MAX_SEALED_BYTES = 2**25
_SCRYPT = {"length": 32, "n": 2**17, "r": 8, "p": 1}
"""What OWASP recommends: 128 MiB of memory, and a fraction of a second for each guess. These numbers are not read from
the file, which could demand far more."""
_COLUMNS = 76


class NotSealed(ValueError):  # noqa: N818 (reads as what it says)
    """The text is not sealed, or is damaged. The message is the end of a sentence that begins with the file."""


class WrongPassphrase(ValueError):  # noqa: N818
    """The passphrase does not open this content."""


def seal(content: bytes, passphrase: str) -> str:
    """Return the content as text that only this passphrase opens."""
    salt, nonce = os.urandom(SALT_BYTES), os.urandom(NONCE_BYTES)
    body = salt + nonce + AESGCM(_key(passphrase, salt)).encrypt(nonce, content, TITLE.encode())
    encoded = base64.b64encode(body + _digest(body)).decode()
    lines = [encoded[place : place + _COLUMNS] for place in range(0, len(encoded), _COLUMNS)]
    return "\n".join([TITLE, *lines]) + "\n"


def check_sealed(text: str) -> bytes:
    """Decode a sealed text to its encrypted bytes. No passphrase is needed to see whether it is complete.

    Raises:
        NotSealed: it is something else, or not complete
    """
    title, _, encoded = text.strip().partition("\n")
    if title.strip() != TITLE:
        raise NotSealed("is no backup of an identity")
    try:
        data = base64.b64decode("".join(encoded.split()), validate=True)
    except ValueError:
        data = b""
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if len(body) <= SALT_BYTES + NONCE_BYTES or _digest(body) != digest:
        raise NotSealed("was cut or changed on its way")
    return body


def unseal(body: bytes, passphrase: str) -> bytes:
    """Decrypt the content.

    Args:
        body: as `check_sealed` returned it

    Raises:
        WrongPassphrase: the passphrase does not open it
    """
    salt, nonce, hidden = body[:SALT_BYTES], body[SALT_BYTES:][:NONCE_BYTES], body[SALT_BYTES + NONCE_BYTES :]
    try:
        return AESGCM(_key(passphrase, salt)).decrypt(nonce, hidden, TITLE.encode())
    except InvalidTag:
        raise WrongPassphrase("the passphrase is wrong") from None


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, **_SCRYPT).derive(passphrase.encode(errors="surrogateescape"))


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:DIGEST_BYTES]
