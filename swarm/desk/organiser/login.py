"""The log-in that the organiser signs: it lets one browser give orders at one desk, and counts for nothing else."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.protocol.certificates import LATEST_SECONDS, MAX_RUN_ID_BYTES, Authority, NotSigned, Right, Signer
from swarm.protocol.wire import from_wire, to_wire

LOGIN = "swarm login 1"
"""Kind of the signed message, which is part of what is signed."""
CHALLENGE_LETTERS = 16
"""Hexadecimal digits of a challenge: 64 bits, which cannot be guessed in two minutes."""
MAX_ADDRESS_LENGTH = 256
MAX_LOGIN_BYTES = 1024
LOGIN_SECONDS = 120
"""Longest time from the page with the challenge to the signed answer, and longest age of that answer."""

_LOGIN = msgspec.msgpack.Decoder(
    tuple[
        Annotated[str, Meta(min_length=1, max_length=MAX_RUN_ID_BYTES)],
        Annotated[str, Meta(min_length=1, max_length=MAX_ADDRESS_LENGTH)],
        Annotated[str, Meta(min_length=CHALLENGE_LETTERS, max_length=CHALLENGE_LETTERS)],
        Annotated[int, Meta(ge=0, le=LATEST_SECONDS)],
    ]
)


def new_challenge() -> str:
    """A new random challenge, 16 hexadecimal digits."""
    return secrets.token_hex(CHALLENGE_LETTERS // 2)


@dataclass(frozen=True)
class Login:
    """The statement that the browser which shows this challenge may give orders.

    Args:
        run_id: of the run
        address: of the desk, without a slash at its end; at another desk the log-in counts for nothing
        challenge: that the browser shows
        time: when the log-in was signed, seconds since 1970
        key: public key with which it was signed
    """

    run_id: str
    address: str
    challenge: str
    time: int
    key: bytes = field(default=b"", compare=False)

    def signed_by(self, signer: Signer) -> bytes:
        """The signed log-in as it is sent to the desk, at most 1 KiB."""
        return signer.sign(LOGIN, to_wire(self.run_id, self.address, self.challenge, self.time))

    @classmethod
    def read(cls, data: bytes, authority: Authority, now: float | None = None) -> Login:
        """The log-in in these bytes, if the organiser, or a deputy with the right control, has just signed it.

        Args:
            data: as `signed_by` returns it
            authority: the run, with the organiser's public key
            now: seconds since 1970; None for this machine's time

        Raises:
            NotSigned: it is no such log-in, is for another run, or is too old
        """
        now = time.time() if now is None else now
        signed = authority.read(LOGIN, data, MAX_LOGIN_BYTES, Right.CONTROL)
        signed.check_time(now)
        try:
            run_id, address, challenge, at = from_wire(_LOGIN, signed.content, MAX_LOGIN_BYTES)
        except ValueError:
            raise NotSigned("cannot be read") from None
        authority.check_run(run_id)
        if abs(now - at) > LOGIN_SECONDS:
            raise NotSigned(f"was made {abs(now - at):,.0f} s ago or ahead of this time (are both clocks right?)")
        return cls(run_id, address, challenge, at, signed.key)
