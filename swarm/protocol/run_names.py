"""Names of runs, the DHT keys of their records, and the organiser's signature on the description of a run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from swarm.protocol.certificates import KEY_BYTES, LATEST_SECONDS, MANIFEST, Authority, NotSigned, Signer

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_SIGNATURE_BYTES = 256
_FINGERPRINT = re.compile(r"[0-9a-f]{8,64}")
PREFIX_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9_-]*-[0-9a-f]{8,64}(~[0-9a-f]{32}(-[1-9][0-9]{0,9})?)?\Z"
"""Pattern of the prefixes that `key_prefix` returns. It is checked before a prefix from a stranger is printed."""


def is_run_id(name: object) -> bool:
    """Whether this is a valid run id: a plain name, since it becomes a folder on every volunteer's disk."""
    return isinstance(name, str) and _RUN_ID.fullmatch(name) is not None


def key_prefix(run_id: str, fingerprint: str, organiser: bytes = b"", begun: int = 0) -> str:
    """The prefix of all DHT keys of a run. It differs for each recipe. It has no dots, which Hivemind gives a meaning.

    Args:
        run_id: name of the run
        fingerprint: fingerprint of its recipe
        organiser: the organiser's public key, which tells the run from others' runs of the same name; empty if the run
            is open
        begun: when she began it, seconds since 1970, which tells the run from her earlier ones of the same name; 0 if
            it is not known

    Raises:
        ValueError: an argument is malformed
    """
    if not is_run_id(run_id) or not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise ValueError("no run id and fingerprint")
    if type(begun) is not int or not 0 <= begun <= LATEST_SECONDS:
        raise ValueError("no time")
    name = run_id
    if "." in name:  # "a.b" must not meet "a-b"
        name = f"{name.replace('.', '-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    # A run id has no tilde, so no open run can have a name that gives it the keys of a run with an organiser.
    if not organiser:
        return f"{name}-{fingerprint}"
    return f"{name}-{fingerprint}~{_digest_of(organiser)}" + (f"-{begun}" if begun else "")


def is_prefix_of(prefix: str, run_id: str, organiser: bytes) -> bool:
    """Whether this prefix is of this organiser's run of this name, with any recipe and beginning."""
    name, _, owner = prefix.partition("~")
    begun = owner.partition("-")[2]
    try:
        return key_prefix(run_id, name.rpartition("-")[2], organiser, int(begun or 0)) == prefix
    except ValueError:
        return False


def has_organiser(prefix: str, organiser: bytes) -> bool:
    """Whether this prefix is of a run with this organiser, or, if `organiser` is empty, of an open run."""
    return prefix.partition("~")[2].partition("-")[0] == (_digest_of(organiser) if organiser else "")


def _digest_of(organiser: bytes) -> str:
    """The digest of the organiser's public key in DHT keys."""
    return hashlib.sha256(organiser).hexdigest()[:32]


def signed_content(content: Mapping[str, Any], signer: Signer) -> dict[str, Any]:
    """The description of a run with its organiser's key and signature added. `authority_in` checks them."""
    with_key = {**content, "organiser": signer.public_key.hex()}
    return {**with_key, "signature": base64.b64encode(signer.sign(MANIFEST, _digest(with_key))).decode()}


def authority_in(content: Mapping[str, Any]) -> Authority | None:
    """The organiser of the run that is described; None if it is open to everybody.

    Args:
        content: the description, as `signed_content` returns it

    Raises:
        NotSigned: it names an organiser who has not signed it
    """
    if "organiser" not in content:
        return None
    try:
        organiser = bytes.fromhex(content["organiser"])
        signature = base64.b64decode(content["signature"], validate=True)
    except (KeyError, TypeError, ValueError):
        raise NotSigned("names an organiser who has not signed it") from None
    if len(organiser) != KEY_BYTES or not is_run_id(content.get("run_id")):
        raise NotSigned("names no organiser, or no run")
    authority = Authority(content["run_id"], organiser)
    signed = authority.read(MANIFEST, signature, MAX_SIGNATURE_BYTES)
    if signed.content != _digest({name: value for name, value in content.items() if name != "signature"}):
        raise NotSigned("is not what its organiser has signed")
    return authority


def _digest(content: Mapping[str, Any]) -> bytes:
    """A digest of the content that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).digest()
