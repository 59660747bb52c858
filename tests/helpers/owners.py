"""Owners of records and organisers, for tests: public keys without a private part, and signers of anything."""

from __future__ import annotations

import hashlib
import time
from functools import cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID

from swarm.protocol.admission import Admission
from swarm.protocol.certificates import EVERYTHING, Authority, Certificate, Removals, Role, Signer

DAY_SECONDS = 24 * 3600


@cache
def subkey_of(name: str) -> bytes:
    """Return the subkey of the records of a peer of this name."""
    modulus = 2**2047 + int.from_bytes(hashlib.sha512(name.encode()).digest(), "big") * 2 + 1
    key = RSAPublicNumbers(65537, modulus).public_key()
    return b"[owner:" + key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"]"


class Sign:
    """Signs any bytes as this node's record and asks all other nodes to store it; runs in the DHT process.

    Args:
        subkey: not yet encoded
        value: (times, bytes) to repeat, since Hivemind's pipe to the DHT process is not made for large messages

    Returns:
        for each other node, whether it stored the record
    """

    def __init__(self, key: str, subkey: object, value: tuple[int, bytes], expiration_time: float):
        self.key, self.subkey, self.value, self.expiration_time = key, subkey, value, expiration_time

    async def __call__(self, _dht, node) -> list[bool]:
        protocol, key = node.protocol, DHTID.generate(self.key)
        subkey, value = protocol.serializer.dumps(self.subkey), self.value[0] * self.value[1]
        signed = protocol.record_validator.sign_value(DHTRecord(key.to_bytes(), subkey, value, self.expiration_time))
        found = []
        for peer in list(protocol.routing_table.peer_id_to_uid):
            stored = await protocol.call_store(peer, [key], [signed], [self.expiration_time], subkeys=[self.subkey])
            found += stored or [False]
        return found


def signer_of(key: bytes) -> Signer:
    """Return the signer of the organiser with this key, the same in every process."""
    return Signer(Ed25519PrivateKey.from_private_bytes(key))


def admission_of(key: bytes, peer_id: PeerID, serial: int, name: str = "ada", **lists: bytes) -> Admission:
    """Return the admission of a member that the organiser with this key has enrolled in the run "run"."""
    signer, now = signer_of(key), int(time.time())
    made = Certificate("run", peer_id, serial, EVERYTHING, now - DAY_SECONDS, now + DAY_SECONDS, name)
    return Admission(Authority("run", signer.public_key, "run"), made.signed_by(signer), lists)


class Organiser:
    """An organiser that decides which peers take part in a run.

    Args:
        began: how many seconds ago the first peer became a member
    """

    def __init__(self, run_id: str = "run", began: float = 0.0):
        self.signer = Signer(Ed25519PrivateKey.generate())
        self.authority = Authority(run_id, self.signer.public_key, run_id)
        self._serial = int(1000 * (time.time() - began))
        self.removals = Removals(run_id, 0, {})

    def certificate(
        self,
        peer_id: PeerID,
        roles: Role = EVERYTHING,
        begin: float = -DAY_SECONDS,
        end: float = DAY_SECONDS,
        name: str = "ada",
        signer: Signer | None = None,
    ) -> bytes:
        """Return a certificate for a new member.

        Args:
            begin, end: seconds from now
        """
        self._serial += 1
        now = time.time()
        made = Certificate(self.authority.run_id, peer_id, self._serial, roles, int(now + begin), int(now + end), name)
        return made.signed_by(signer or self.signer)

    def admission(self, peer_id: PeerID, **changes) -> Admission:
        """Return the admission that a process of a new member holds."""
        return Admission(self.authority, self.certificate(peer_id, **changes))

    def remove(self, *admissions: Admission, why: str = "it sent nonsense") -> bytes:
        """Remove these members; returns the new removal list, signed."""
        self.removals = self.removals.with_removed([admission.own.serial for admission in admissions], why)
        return self.removals.signed_by(self.signer)
