"""Where the organiser's peer was last, in a file of the organiser's folder. Imports nothing slow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from recipe.errors import InputError

FOLDER = "organiser"
"""Name of the folder, inside the folder of runs, that has the organiser's folders of all runs."""
CONTACT_FILE, BOOKS_FILE = "contact.json", "members.db"


@dataclass(frozen=True)
class Contact:
    """What a join line needs, beside an invitation.

    Args:
        organiser: public key
        addresses: of a peer that newcomers can call
        enrolment_port: TCP port of the enrolment server on the host of that peer
        public_ip: host that others can call whatever its range, as the organiser gave it; None if none was given
        fingerprint: of the enrolment server's TLS certificate; empty in a file of an earlier version
    """

    organiser: bytes
    addresses: tuple[str, ...]
    enrolment_port: int
    public_ip: str | None = None
    fingerprint: bytes = b""

    @classmethod
    def read(cls, folder: Path) -> Contact:
        """Read what the organiser's peer has noted.

        Args:
            folder: of the run, named after it

        Raises:
            InputError: no peer of this folder has started the run yet
        """
        path = folder / CONTACT_FILE
        try:
            noted = json.loads(path.read_text())
            organiser, addresses = bytes.fromhex(noted["organiser"]), tuple(map(str, noted["addresses"]))
            if len(organiser) == 32 and addresses and (port := int(noted["enrolment_port"])):
                fingerprint = bytes.fromhex(noted.get("fingerprint", ""))
                return cls(organiser, addresses, port, noted.get("public_ip"), fingerprint)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass
        raise InputError(
            f"{path} does not say where run {folder.name} can be joined: give the --output-dir and the --run-id with "
            "which it was started here, or start it first (swarm start)."
        )
