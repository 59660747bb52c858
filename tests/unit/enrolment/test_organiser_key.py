"""Key files are made once and read again, and every trouble with them is told in one sentence."""

import stat
import time
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from recipe.errors import InputError
from swarm.enrolment.organiser_key import (
    VARIABLE,
    check_right,
    make_deputy,
    make_key,
    passphrase_from,
    read_key,
    warrant_path,
)
from swarm.protocol.certificates import Authority, Right, Signer, warrant


def never() -> str:
    raise AssertionError("nobody has to ask for a passphrase")


def terminal(monkeypatch, typed: str | None) -> None:
    """A terminal at which a person types this when asked, or no terminal at all."""
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: typed is not None))
    monkeypatch.setattr("getpass.getpass", lambda prompt: typed)


def test_a_key_without_a_passphrase(tmp_path):
    path = tmp_path / "new folder" / "organiser.pem"
    made = make_key(path, None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key(path, never).public_key == read_key(path).public_key == made.public_key
    assert path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")


def test_a_key_with_a_passphrase(tmp_path):
    path = tmp_path / "organiser.pem"
    made = make_key(path, "correct horse")
    assert path.read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    assert read_key(path, lambda: "correct horse").public_key == made.public_key
    for wrong in ("correct horsf", "x" * 1000):
        with pytest.raises(InputError, match=r"The passphrase of .* is wrong: try again"):
            read_key(path, lambda wrong=wrong: wrong)
    with pytest.raises(InputError, match="needs its passphrase: set SWARM_KEY_PASSPHRASE"):
        read_key(path)


@pytest.mark.parametrize("passphrase", ["", "x" * 1024])
def test_passphrases_that_cannot_be_used(tmp_path, passphrase):
    with pytest.raises(InputError, match="A passphrase has 1 to 1023 bytes"):
        make_key(tmp_path / "key.pem", passphrase)
    assert not list(tmp_path.iterdir())


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "organiser.pem"
    made = make_key(path, None)
    with pytest.raises(InputError, match="is there already: choose another name"):
        make_key(path, None)
    assert read_key(path).public_key == made.public_key


def test_a_key_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written .* name a file in a folder you may write to"):
        make_key(tmp_path / "file" / "organiser.pem", None)


def other_kind_of_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize("content", [b"hello", other_kind_of_key(), b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_files_that_hold_no_key(tmp_path, content):
    path = tmp_path / "organiser.pem"
    path.write_bytes(content)
    with pytest.raises(InputError, match="does not hold an Ed25519 private key in PEM"):
        read_key(path, never)


def test_files_that_are_not_there_or_too_long(tmp_path):
    path = tmp_path / "organiser.pem"
    with pytest.raises(InputError, match=r"There is no key .*organiser.pem: name the file, or make a key first"):
        read_key(path)
    path.write_bytes(bytes(2**20))
    with pytest.raises(InputError, match="is empty or too long"):
        read_key(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_key(tmp_path)


def test_a_deputy_may_do_what_the_warrant_says(tmp_path):
    organiser = make_key(tmp_path / "organiser.pem", None)
    path = tmp_path / "deputy.pem"
    made = make_deputy(organiser, "digits", Right.ENROL, 30, path, "secret")
    deputy = read_key(path, lambda: "secret")
    assert deputy.public_key == made.public_key != organiser.public_key
    assert deputy.warrant == made.warrant == warrant_path(path).read_bytes()
    assert stat.S_IMODE(warrant_path(path).stat().st_mode) == 0o600

    authority = Authority("digits", organiser.public_key)
    check_right(deputy, authority, Right.ENROL)
    check_right(organiser, authority, Right.REMOVE)
    for which, right, when, why in (
        (authority, Right.REMOVE, None, "was signed by a deputy who has no right to"),
        (authority, Right.ENROL, time.time() + 31 * 24 * 3600, "was signed by a deputy whose warrant has ended on"),
        (Authority("other", organiser.public_key), Right.ENROL, None, "is for run 'digits', not for 'other'"),
        (Authority("digits", deputy.public_key), Right.ENROL, None, "was not signed by the organiser of this run"),
    ):
        with pytest.raises(InputError, match=f"This key cannot be used for run .*{why}"):
            check_right(deputy, which, right, when)


def test_an_expired_warrant(tmp_path):
    organiser, key = make_key(tmp_path / "organiser.pem", None), Ed25519PrivateKey.generate()
    now = int(time.time())
    public = key.public_key().public_bytes_raw()
    deputy = Signer(key, warrant(organiser, "digits", public, Right.ENROL, now - 100, now - 10))
    with pytest.raises(InputError, match="whose warrant has ended on"):
        check_right(deputy, Authority("digits", organiser.public_key), Right.ENROL)


def test_deputies_that_cannot_be_made(tmp_path):
    organiser, path = make_key(tmp_path / "organiser.pem", None), tmp_path / "deputy.pem"
    deputy = make_deputy(organiser, "digits", Right.ENROL, 1, tmp_path / "first.pem", None)
    with pytest.raises(InputError, match="A deputy cannot make deputies"):
        make_deputy(deputy, "digits", Right.ENROL, 1, path, None)
    with pytest.raises(InputError, match="without any right"):
        make_deputy(organiser, "digits", Right(0), 1, path, None)
    for days in (0, -1, 3651, float("nan")):
        with pytest.raises(InputError, match=r"cannot be made for .* days"):
            make_deputy(organiser, "digits", Right.ENROL, days, path, None)
    warrant_path(path).write_bytes(b"of somebody else")
    with pytest.raises(InputError, match="is there already"):
        make_deputy(organiser, "digits", Right.ENROL, 1, path, None)
    assert not path.exists()


def test_a_damaged_warrant(tmp_path):
    path = tmp_path / "deputy.pem"
    make_deputy(make_key(tmp_path / "organiser.pem", None), "digits", Right.ENROL, 1, path, None)
    for content in (b"", bytes(2000)):
        warrant_path(path).write_bytes(content)
        with pytest.raises(InputError, match=r"deputy.pem.warrant is empty or too long: restore it"):
            read_key(path)


def test_the_passphrase_comes_from_the_variable_first(monkeypatch):
    terminal(monkeypatch, "typed")
    assert passphrase_from({VARIABLE: "set"}, "Passphrase: ") == "set"
    assert passphrase_from({}, "Passphrase: ") == "typed"


@pytest.mark.parametrize(("environment", "typed"), [({VARIABLE: ""}, "typed"), ({}, "")])
def test_an_empty_passphrase(monkeypatch, environment, typed):
    terminal(monkeypatch, typed)
    with pytest.raises(InputError, match="The passphrase is empty"):
        passphrase_from(environment, "Passphrase: ")


def test_no_terminal_to_ask_at(monkeypatch):
    terminal(monkeypatch, None)
    with pytest.raises(InputError, match="there is no terminal to ask at: set SWARM_KEY_PASSPHRASE"):
        passphrase_from({}, "Passphrase: ")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="there is no terminal to ask at"):
        passphrase_from({}, "Passphrase: ")
