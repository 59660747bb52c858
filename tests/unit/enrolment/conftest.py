"""An organiser with a real enrolment server on this machine, and volunteers who want to take part."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.utils.crypto import RSAPrivateKey

from swarm.enrolment.join_line import JoinLine
from swarm.enrolment.registry import Registry
from swarm.enrolment.server import EnrolmentServer
from swarm.protocol.certificates import EVERYTHING, Authority, Role, Signer

RUN = "digits"
ADDRESS = "/ip4/127.0.0.1/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


class Clock:
    """The organiser's clock, which a test may set ahead."""

    def __init__(self):
        self.ahead_days = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_days * 24 * 3600


class Organiser:
    """An organiser with a run: her key, her books and her server."""

    def __init__(self, folder: Path):
        self.signer = Signer(Ed25519PrivateKey.generate())
        self.authority = Authority(RUN, self.signer.public_key)
        self.clock = Clock()
        self.registry = Registry(folder / "organiser" / RUN, self.clock)
        self.servers: list[EnrolmentServer] = []

    def serve(self, signer: Signer | None = None, **options) -> JoinLine:
        """Start a server. Return a line that leads there and holds no invitation yet."""
        server = EnrolmentServer(
            self.registry, signer or self.signer, self.authority, "127.0.0.1", 0, clock=self.clock, **options
        )
        port = server.start()
        self.servers.append(server)
        return JoinLine(RUN, self.signer.public_key, (ADDRESS,), b"", port, server.fingerprint)

    def invite(self, line: JoinLine, name: str = "", uses: int = 1, roles: Role = EVERYTHING) -> JoinLine:
        """The same line with an invitation for a day."""
        return replace(line, token=self.registry.invite(name, 1.0, uses, roles))

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


@pytest.fixture
def organiser(tmp_path):
    somebody = Organiser(tmp_path)
    yield somebody
    somebody.stop()


@pytest.fixture
def another_organiser(tmp_path):
    somebody = Organiser(tmp_path / "another")
    yield somebody
    somebody.stop()


@pytest.fixture(scope="module")
def keys() -> tuple[RSAPrivateKey, RSAPrivateKey]:
    """The keys of two volunteers. Making one takes up to a second."""
    return RSAPrivateKey(), RSAPrivateKey()


@pytest.fixture
def key(keys) -> RSAPrivateKey:
    return keys[0]


@pytest.fixture
def other_key(keys) -> RSAPrivateKey:
    return keys[1]
