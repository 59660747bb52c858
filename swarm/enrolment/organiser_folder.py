"""The organiser's folder of a run: the organiser's key, the books, and where the organiser's peer can be found."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from recipe.errors import InputError
from recipe.run_folder import check_name, write_json, write_private
from swarm.enrolment.contact import CONTACT_FILE, FOLDER, Contact
from swarm.enrolment.join_line import MAX_ADDRESSES, JoinLine
from swarm.enrolment.organiser_key import VARIABLE, make_key, passphrase_from, read_key, warrant_path
from swarm.enrolment.registry import Registry
from swarm.enrolment.tls import TLS_FILE, fingerprint_in
from swarm.network.addresses import check_reachable, is_loopback, is_public
from swarm.network.home.interfaces import own_addresses
from swarm.network.known_peers import MAX_REMEMBERED, books_of, peer_of_address, read_book
from swarm.protocol.certificates import MAX_WARRANT_BYTES, Authority, Signer

LOOK_SECONDS = 3.0
MAX_OTHERS = 2
"""Number of members that a join line names beside the organiser's peer: its QR code still fits a terminal."""
KEY_FILE, DEPUTIES_FOLDER, FIRST_LINE_FILE = "organiser.key", "deputies", "first_line.json"


class OrganiserFolder:
    """The folder `OUTPUT_DIR/organiser/RUN_ID`. The key may lie somewhere else, for instance on a stick.

    Args:
        output_dir: where the folders of runs are
        run_id: of the run
        key: file of the key; None if it is in the folder

    Raises:
        InputError: the run id is no plain name
    """

    def __init__(self, output_dir: Path, run_id: str, key: Path | None = None):
        self.run_id = check_name(run_id, "--run-id")
        self.path = output_dir.expanduser() / FOLDER / self.run_id
        self.key = self.path / KEY_FILE if key is None else key.expanduser()
        self._contact, self._deputies = self.path / CONTACT_FILE, self.path / DEPUTIES_FOLDER
        self._first_line = self.path / FIRST_LINE_FILE

    @property
    def registry(self) -> Registry:
        """The organiser's books.

        Raises:
            InputError: they cannot be used
        """
        return Registry(self.path)

    @property
    def is_started(self) -> bool:
        """Whether the run has been started from this folder."""
        return self._contact.exists()

    def make_signer(self) -> Signer:
        """Return the key. For a new run it is made, with the passphrase in SWARM_KEY_PASSPHRASE if that is set.

        Raises:
            InputError: the key cannot be made or read; or the run was started before, and its key is not there
        """
        if self.key.exists() or self.is_started:
            return self.signer()
        try:
            self.key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.key.parent} cannot be made ({error.strerror}): name another folder.") from None
        given = os.environ.get(VARIABLE)
        return make_key(self.key, given or None)

    def signer(self) -> Signer:
        """Return the key that is there already. If its file needs a passphrase, `passphrase_from` gets it.

        Raises:
            InputError: the key is not there, or cannot be read
        """
        if not self.key.exists():
            raise InputError(
                f"The organiser's key {self.key} is not there: give --organiser-key FILE, or the --output-dir and the "
                "--run-id with which the run was started; if it is lost, restore it from a copy, or start another run "
                "with --start-from CHECKPOINT and send new join lines."
            )
        return read_key(self.key, lambda: passphrase_from(os.environ, f"Passphrase of {self.key}: "))

    def keep_warrant(self, name: str, signer: Signer) -> None:
        """Keep the warrant of a deputy, so that it can be revoked by the name of the deputy's key file.

        Raises:
            InputError: it cannot be written
        """
        path = self._deputies / f"{name}.{signer.public_key.hex()[:16]}"
        try:
            self._deputies.mkdir(mode=0o700, exist_ok=True)
            path.write_bytes(signer.warrant)
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error.strerror}): make room.") from None

    def warrants(self) -> dict[str, list[bytes]]:
        """Return the warrants of the deputies that were made here, by the names of their key files."""
        found: dict[str, list[bytes]] = {}
        for path in sorted(self._deputies.glob("*.*")):
            found.setdefault(path.stem, []).append(path.read_bytes()[: MAX_WARRANT_BYTES + 1])
        return found

    def note_contact(
        self, organiser: bytes, addresses: Sequence[str], enrolment_port: int, public_ip: str | None = None
    ) -> None:
        """Keep what a join line needs, for `swarm invite`.

        Args:
            organiser: public key
            addresses: of a peer that newcomers can call
            enrolment_port: TCP port of the enrolment server on the host of that peer
            public_ip: as `Contact` has it

        Raises:
            InputError: it cannot be written
        """
        kept = {
            "organiser": organiser.hex(),
            "addresses": list(addresses),
            "enrolment_port": enrolment_port,
            "public_ip": public_ip,
            "fingerprint": fingerprint_in(self.path).hex(),
        }
        try:
            write_json(self._contact, kept)
        except OSError as error:
            raise InputError(f"{self._contact} cannot be written ({error.strerror}): make room.") from None

    def note_enrolment_port(self, port: int) -> None:
        """Change the port that new join lines name.

        The file keeps its time of modification: that says when the run was started last (`swarm.cli.organiser`).

        Args:
            port: where newcomers enrol from now on

        Raises:
            InputError: as `authority`, or it cannot be written
        """
        contact, before = Contact.read(self.path), self._contact.stat()
        self.note_contact(contact.organiser, contact.addresses, port, contact.public_ip)
        os.utime(self._contact, ns=(before.st_atime_ns, before.st_mtime_ns))

    def note_fingerprint(self) -> None:
        """Note the fingerprint of the TLS certificate in this folder, if there is one, for join lines made from a copy.

        An earlier version did not note it when the run was started.

        Raises:
            InputError: as `authority`, or it cannot be written
        """
        if self.is_started and (self.path / TLS_FILE).exists():
            self.note_enrolment_port(self.enrolment_port)

    def first_token(self, uses: int, days: float) -> bytes:
        """Return the invitation in the line that the organiser's peer prints; empty if none is kept for these numbers.

        A peer that starts again prints the same line again. So this invitation is kept, unlike those of `swarm invite`.

        Args:
            uses: how many may enrol with it
            days: for which it can be used
        """
        try:
            kept = json.loads(self._first_line.read_text())
            if (kept["uses"], kept["days"]) == (uses, days):
                return bytes.fromhex(kept["token"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass
        return b""

    def keep_first_token(self, token: bytes, uses: int, days: float) -> None:
        """Keep an invitation for `first_token`.

        Raises:
            InputError: it cannot be written
        """
        try:
            kept = json.dumps({"token": token.hex(), "uses": uses, "days": days})
            write_private(self._first_line, kept.encode(), overwrite=True)
        except OSError as error:
            raise InputError(f"{self._first_line} cannot be written ({error.strerror}): make room.") from None

    @property
    def authority(self) -> Authority:
        """The run, and the organiser's public key.

        Raises:
            InputError: no peer of this folder has started the run yet
        """
        return Authority(self.run_id, Contact.read(self.path).organiser)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses where the organiser's peer was last.

        Raises:
            InputError: as `authority`
        """
        return Contact.read(self.path).addresses

    @property
    def enrolment_port(self) -> int:
        """TCP port where newcomers enrol.

        Raises:
            InputError: as `authority`
        """
        return Contact.read(self.path).enrolment_port

    @property
    def public_ip(self) -> str | None:
        """Host that others can call whatever its range, as the organiser gave it; None if none was given.

        Raises:
            InputError: as `authority`
        """
        return Contact.read(self.path).public_ip

    @property
    def may_be_a_copy(self) -> bool:
        """Whether this folder may be a copy, so that newcomers enrol with the books of another machine.

        It is no copy if the organiser's own key is here, or if the join line has an address of this machine. Two
        machines may have the same private address, such as that of a bridge of containers: then a copy is missed.

        Raises:
            InputError: as `authority`
        """
        if not self.is_started or (self.key.exists() and not warrant_path(self.key).exists()):
            return False
        elsewhere = [address for address in self.addresses if not is_loopback(address)]
        return bool(elsewhere) and not {address.split("/")[2] for address in elsewhere} & set(own_addresses())

    def others_there(self) -> list[str]:
        """Return an address for each of up to two other members that peers of this machine have met and that answer.

        Raises:
            InputError: as `authority`
        """
        hers = self.addresses
        own, stay_here = set(map(peer_of_address, hers)), all(map(is_loopback, hers))
        removed = {str(member.peer_id) for member in self.registry.members() if member.why_removed is not None}
        met = [address for book in books_of(self.path.parent.parent, self.run_id) for address in read_book(book)]
        others = [
            address
            for address in dict.fromkeys(met)
            if peer_of_address(address) not in own | removed and is_loopback(address) == stay_here
        ]
        try:
            answering = check_reachable(others[:MAX_REMEMBERED], LOOK_SECONDS, is_greeted=True)
        except InputError:
            return []
        found = {peer_of_address(address): address for address in sorted(answering, key=is_public)}
        return [found[peer] for peer in dict.fromkeys(map(peer_of_address, answering))][:MAX_OTHERS]

    def join_line(self, token: bytes = b"", others: Sequence[str] = ()) -> JoinLine:
        """Return the line with which other people join.

        Args:
            token: of an invitation
            others: addresses of further peers, through which people join while the organiser's own peer does not run

        Raises:
            InputError: as `authority`
        """
        contact = Contact.read(self.path)
        # A deputy's copy of this folder is without the TLS key. A key that is made there would be another server's.
        is_noted = contact.fingerprint and not (self.path / TLS_FILE).exists()
        return JoinLine(
            self.run_id,
            contact.organiser,
            (*contact.addresses[: MAX_ADDRESSES - len(others)], *others),
            token,
            contact.enrolment_port,
            contact.fingerprint if is_noted else fingerprint_in(self.path),
        )
