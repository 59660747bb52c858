"""The TLS certificate of the enrolment server: made once, by whichever process comes first."""

import ssl
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography import x509

from recipe.errors import InputError
from swarm.enrolment.tls import SERVER_NAME, TLS_FILE, ensure_tls, fingerprint_in, fingerprint_of


def test_it_is_made_once(tmp_path):
    folder = tmp_path / "organiser" / "run"
    key, certificate = ensure_tls(folder)
    assert ensure_tls(folder) == (key, certificate)
    assert stat.S_IMODE((folder / TLS_FILE).stat().st_mode) == 0o600
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    assert fingerprint_in(folder) == fingerprint_of(der)
    assert len(fingerprint_of(der)) == 16
    names = x509.load_der_x509_certificate(der).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME]


def test_all_processes_that_come_first_get_the_same_certificate(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(ensure_tls, [tmp_path] * 8))) == 1
    assert {path.name for path in tmp_path.iterdir()} <= {TLS_FILE, f"{TLS_FILE}.lock"}


@pytest.mark.parametrize("content", [b"", b"hello", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_damaged_file(tmp_path, content):
    (tmp_path / TLS_FILE).write_bytes(content)
    with pytest.raises(InputError, match="does not hold a key and a certificate: restore it"):
        ensure_tls(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="see that this user may read and write there"):
        ensure_tls(tmp_path / "file")
