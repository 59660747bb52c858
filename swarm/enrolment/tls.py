"""The TLS certificate of the enrolment server. It is self-signed: join lines carry its fingerprint."""

from __future__ import annotations

import hashlib
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID
from filelock import FileLock

from recipe.errors import InputError
from recipe.run_folder import write_private
from swarm.enrolment.join_line import FINGERPRINT_BYTES

SERVER_NAME = "swarm-enrolment"
"""Host name in the certificate, whatever the address of the server is."""
TLS_FILE = "tls.pem"
MAX_FILE_BYTES = 2**14
VALID_FOR = timedelta(days=3650)
LOCK_SECONDS = 10.0


def ensure_tls(folder: Path) -> tuple[bytes, bytes]:
    """Return the server's private key and its certificate, both PEM; they are made if there are none yet.

    Args:
        folder: the organiser's folder of this run

    Raises:
        InputError: the file cannot be written, read or understood
    """
    path = folder / TLS_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(folder / f"{TLS_FILE}.lock", timeout=LOCK_SECONDS, mode=0o600):
            if not path.exists():
                write_private(path, _make(), overwrite=True)
            with open(path, "rb") as file:
                content = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise InputError(
            f"{path} cannot be used ({error.strerror or error}): see that this user may read and write there."
        ) from None
    try:
        key, certificate = load_pem_private_key(content, None), x509.load_pem_x509_certificate(content)
    except (ValueError, TypeError):
        raise InputError(
            f"{path} does not hold a key and a certificate: restore it from a copy, or delete it and make new join "
            "lines."
        ) from None
    return (
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        certificate.public_bytes(Encoding.PEM),
    )


def fingerprint_of(certificate_der: bytes) -> bytes:
    """Return 16 bytes that identify the certificate: the beginning of its SHA-256."""
    return hashlib.sha256(certificate_der).digest()[:FINGERPRINT_BYTES]


def fingerprint_in(folder: Path) -> bytes:
    """Return the fingerprint of the server that uses this folder; see `ensure_tls`."""
    return fingerprint_of(ssl.PEM_cert_to_DER_cert(ensure_tls(folder)[1].decode()))


def _make() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    begin = datetime.now(UTC) - timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + VALID_FOR)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + certificate.public_bytes(Encoding.PEM)
