"""Organisers and members for tests."""

from __future__ import annotations

import time

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.p2p import PeerID

from swarm.network.admission import Admission
from swarm.protocol.certificates import EVERYTHING, Authority, Certificate, Removals, Role, Signer

DAY_SECONDS = 24 * 3600


class Organiser:
    """Somebody who decides who takes part in a run."""

    def __init__(self, run_id: str = "run"):
        self.signer = Signer(Ed25519PrivateKey.generate())
        self.authority = Authority(run_id, self.signer.public_key)
        self._serial = int(1000 * time.time())
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
        """For a new member.

        Args:
            begin, end: seconds from now
        """
        self._serial += 1
        now = time.time()
        made = Certificate(self.authority.run_id, peer_id, self._serial, roles, int(now + begin), int(now + end), name)
        return made.signed_by(signer or self.signer)

    def admission(self, peer_id: PeerID, **changes) -> Admission:
        """What one of a new member's processes knows."""
        return Admission(self.authority, self.certificate(peer_id, **changes))

    def remove(self, *admissions: Admission, why: str = "it sent nonsense") -> bytes:
        """These members may not take part any more; the new list, signed."""
        self.removals = self.removals.with_removed([admission.own.serial for admission in admissions], why)
        return self.removals.signed_by(self.signer)
