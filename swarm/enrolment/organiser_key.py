"""The files of the keys that sign for a run: the organiser's own key, and those of deputies.

A key is a PKCS8 PEM file, with a passphrase or without. A deputy's key has a second file beside it, with the same name
and `.warrant` at its end. In it the organiser has signed what the deputy may do.
"""

from __future__ import annotations

import getpass
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from recipe.errors import InputError
from recipe.run_folder import write_private
from swarm.protocol.certificates import (
    CERTIFICATE,
    MAX_CERTIFICATE_BYTES,
    MAX_REMOVALS_BYTES,
    MAX_WARRANT_BYTES,
    ORDER,
    REMOVALS,
    Authority,
    NotSigned,
    Right,
    Signer,
    warrant,
)
from swarm.protocol.order_book import MAX_SIGNED_BYTES

VARIABLE = "SWARM_KEY_PASSPHRASE"
"""Environment variable: the passphrase, for use without a terminal."""
HANDED_OVER = "SWARM_TYPED"
"""Environment variable: process id, and file number of the pipe with the passphrases that were typed before this
program replaced another one."""
_TYPED: dict[str, str] = {}
"""Passphrases that were typed in this program, by prompt."""
MAX_PASSPHRASE_BYTES = 1023  # of `cryptography`
MAX_KEY_FILE_BYTES = 2**14
MAX_DEPUTY_DAYS = 3650
CLOCK_SECONDS = 600
"""What is signed counts from this long before its signing on, since a reader's clock may be behind the signer's."""
_PROBES = {
    Right.ENROL: (CERTIFICATE, MAX_CERTIFICATE_BYTES),
    Right.REMOVE: (REMOVALS, MAX_REMOVALS_BYTES),
    Right.CONTROL: (ORDER, MAX_SIGNED_BYTES),
}
"""By right: the kind of what is signed with it, and the most bytes that it may have."""


def make_key(path: Path, passphrase: str | None) -> Signer:
    """Make a new key in a new file, which only this user can read.

    Args:
        passphrase: asked for wherever the key is used; None for a file that needs none

    Raises:
        InputError: the file is there already, or cannot be written; or the passphrase cannot be used
    """
    key = Ed25519PrivateKey.generate()
    encryption = NoEncryption() if passphrase is None else BestAvailableEncryption(_checked(passphrase))
    _write_new(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    return Signer(key)


def make_deputy(
    organiser: Signer, run_id: str, rights: Right, days: float, path: Path, passphrase: str | None
) -> Signer:
    """Make the key with which a deputy signs in the organiser's place, and the warrant beside it.

    Args:
        rights: what the deputy may sign
        days: how long the warrant counts, from now on

    Raises:
        InputError: as `make_key`; or the key is not the organiser's own, or there are no rights or days
    """
    if organiser.warrant:
        raise InputError("A deputy cannot make deputies: use the organiser's own key.")
    if not rights:
        raise InputError("A deputy without any right can do nothing: give at least one.")
    if not 0 < days <= MAX_DEPUTY_DAYS:
        raise InputError(f"A deputy cannot be made for {days:g} days: give more than 0 and at most {MAX_DEPUTY_DAYS}.")
    if warrant_path(path).exists():
        raise InputError(f"{warrant_path(path)} is there already: choose another name, or move that file away.")
    deputy = make_key(path, passphrase)
    now = time.time()
    signed = warrant(
        organiser, run_id, deputy.public_key, rights, int(now - CLOCK_SECONDS), int(now + days * 24 * 3600)
    )
    try:
        _write_new(warrant_path(path), signed)
    except InputError:
        path.unlink(missing_ok=True)
        raise
    return Signer(deputy.key, signed)


def read_key(path: Path, passphrase: Callable[[], str] | None = None) -> Signer:
    """Read the key in a file; a deputy's key with its warrant.

    Args:
        passphrase: asked only if the file needs one

    Raises:
        InputError: the file is not there or holds no such key, or the passphrase is missing or wrong
    """
    key = _decoded(path, _read(path, MAX_KEY_FILE_BYTES), passphrase)
    beside = warrant_path(path)
    return Signer(key, _read(beside, MAX_WARRANT_BYTES) if beside.exists() else b"")


def warrant_path(path: Path) -> Path:
    """Where the warrant of a deputy's key file is."""
    return path.with_name(f"{path.name}.warrant")


def check_right(signer: Signer, authority: Authority, right: Right, now: float | None = None) -> None:
    """Check that what this key signs counts in a run.

    Args:
        right: the right that a deputy's key needs for it
        now: seconds since 1970; None for this machine's time

    Raises:
        InputError: it does not count
    """
    kind, most_bytes = _PROBES[right]
    try:
        authority.read(kind, signer.sign(kind, b""), most_bytes, right).check_time(now)
    except NotSigned as error:
        raise InputError(
            f"This key cannot be used for run {authority.run_id}: what it signs {error}. Use the organiser's key, or "
            "a deputy's key with that right, whose warrant has not ended."
        ) from None


def passphrase_from(environment: Mapping[str, str], prompt: str) -> str:
    """Return the passphrase: from the variable SWARM_KEY_PASSPHRASE, or else typed at the terminal.

    Raises:
        InputError: there is neither, or it is empty
    """
    if VARIABLE in environment:
        passphrase = environment[VARIABLE]
    elif prompt in _handed_over():
        return _handed_over()[prompt]
    elif sys.stdin is not None and sys.stdin.isatty():
        try:
            passphrase = _TYPED[prompt] = getpass.getpass(prompt)
        except EOFError:
            passphrase = ""
    else:
        raise InputError(f"The key needs a passphrase, and there is no terminal to ask at: set {VARIABLE}.")
    if not passphrase:
        raise InputError(f"The passphrase is empty: type one, or set {VARIABLE}.")
    return passphrase


@cache
def _handed_over() -> dict[str, str]:
    """Return by prompt the passphrases that were typed before this program replaced another one."""
    process, _, number = os.environ.pop(HANDED_OVER, "").partition(" ")
    if process != str(os.getpid()):  # nothing was handed over, or it was for the parent of this process
        return {}
    with open(int(number)) as pipe:
        return json.load(pipe)


def hand_over_typed() -> None:
    """Hand the typed passphrases to the program that replaces this one. Call it just before `os.execv`.

    That program could not ask for them again: the organiser may be asleep. They go through a pipe, which no other
    process can read; an environment variable could be read.
    """
    if not (typed := _handed_over() | _TYPED):
        return
    reading, writing = os.pipe()
    os.write(writing, json.dumps(typed).encode())  # far less than a pipe holds
    os.close(writing)
    os.set_inheritable(reading, True)
    os.environ[HANDED_OVER] = f"{os.getpid()} {reading}"  # the program that follows is the same process


def _checked(passphrase: str) -> bytes:
    encoded = passphrase.encode(errors="surrogateescape")
    if not 1 <= len(encoded) <= MAX_PASSPHRASE_BYTES:
        raise InputError(f"A passphrase has 1 to {MAX_PASSPHRASE_BYTES} bytes, and this has {len(encoded)}: change it.")
    return encoded


def _decoded(path: Path, content: bytes, passphrase: Callable[[], str] | None) -> Ed25519PrivateKey:
    try:
        try:
            key = load_pem_private_key(content, password=None)
        except TypeError:  # it needs a passphrase
            if passphrase is None:
                raise InputError(f"The key in {path} needs its passphrase: set {VARIABLE}.") from None
            key = _unlocked(path, content, _checked(passphrase()))
    except InputError:
        raise
    except (ValueError, UnsupportedAlgorithm):
        raise _not_a_key(path) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _not_a_key(path)
    return key


def _unlocked(path: Path, content: bytes, passphrase: bytes):
    try:
        return load_pem_private_key(content, password=passphrase)
    except ValueError:
        raise InputError(f"The passphrase of {path} is wrong: try again with the one it was made with.") from None


def _not_a_key(path: Path) -> InputError:
    return InputError(
        f"{path} does not hold an Ed25519 private key in PEM: name the organiser's key file, or restore it from a copy."
    )


def _read(path: Path, most_bytes: int) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise InputError(f"There is no key {path}: name the file, or make a key first.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): give this user the right to.") from None
    if not 1 <= len(content) <= most_bytes:
        raise InputError(f"{path} is empty or too long: restore it from a copy.")
    return content


def _write_new(path: Path, content: bytes) -> None:
    """Write a new file. An existing file is never replaced, and a failed write leaves nothing."""
    try:
        write_private(path, content)
    except OSError as error:
        if os.path.lexists(path):  # says False where the folder may not be entered
            raise InputError(f"{path} is there already: choose another name, or move that file away.") from None
        raise InputError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder you may write to."
        ) from None
