"""What runs are called, and where in the DHT their records are."""

from __future__ import annotations

import hashlib
import re

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FINGERPRINT = re.compile(r"[0-9a-f]{8,64}")


def is_run_id(name: object) -> bool:
    """Whether this is a plain name: it becomes a folder on every volunteer's disk."""
    return isinstance(name, str) and _RUN_ID.fullmatch(name) is not None


def key_prefix(run_id: str, fingerprint: str) -> str:
    """Start of all DHT keys of a run. Other recipes get others; no dots, they have a meaning to hivemind.

    Raises:
        ValueError: one of them is no such thing
    """
    if not is_run_id(run_id) or not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise ValueError("no run id and fingerprint")
    name = run_id
    if "." in name:  # "a.b" must not meet "a-b"
        name = f"{name.replace('.', '-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"{name}-{fingerprint}"
