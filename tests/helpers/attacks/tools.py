"""What all attackers need: a check of addresses, a node of their own, keys that cost nothing, and an honest state.

For tests of our own peers on this machine. An attacker refuses every address that is neither loopback nor in the lab's
network, and checks its connections again before it begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import os
import resource
import time
from collections.abc import AsyncIterator as Iterating
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind does not recognise the one of collections.abc)

import torch
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.servicer import ServicerBase
from hivemind.proto import averaging_pb2, dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from recipe.errors import InputError
from swarm.averaging.rounds import schema_hash
from swarm.membership.progress_record import TRAINING, PeerProgress
from swarm.membership.progress_store import read_record
from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht
from swarm.network.home.interfaces import own_addresses
from swarm.network.signed_records import OwnedRecords, owned_entries
from swarm.protocol.admission import OPEN, Admission
from swarm.state_sync.download_messages import Offer, Wish, ask_for, asked_for, digests_of, name_of_snapshot, piece_of
from swarm.state_sync.serialization import pack, unpack
from swarm.state_sync.squeeze import squeeze, unsqueeze

LAB = ipaddress.ip_network("10.77.0.0/16")
"""Network of the lab's namespaces (`analysis.wan.topology`)."""
MOST_BYTES = 2**30
NAME = "mallory"
"""The beginning of every name that attackers use."""
own_name = NAME
"""Public name of this attacker: it includes the attack, so that messages about one attacker do not suit another."""
RECORD_SECONDS = 15.0
STORE_BYTES = 2**19
"""Size of the records in one call; p2pd takes 2 MiB."""

Report = Callable[[str], None]
Messages = Iterating[averaging_pb2.DownloadData]
HandOver = Callable[[Messages], Messages]
"""Answers the requests for pieces that follow a `Wish`."""


# ---- where an attacker may attack ------------------------------------------------------------------------------------


def in_lab() -> bool:
    """Whether this network namespace has addresses of loopback and the lab only, so nothing else can be reached."""
    found = [ipaddress.ip_address(address) for address in own_addresses()]
    elsewhere = [address for address in found if not address.is_loopback]
    return bool(elsewhere) and all(address in LAB for address in elsewhere)


def listening_host() -> str:
    """The address that an attacker listens on."""
    return next(address for address in reversed(own_addresses()) if in_lab() or address.startswith("127."))


def check_address(address: str) -> None:
    """Raise an InputError for a multiaddress that no attacker may call."""
    parts = address.split("/")
    try:
        host = ipaddress.ip_address(parts[2])
    except (IndexError, ValueError):
        raise InputError(f"{address} is not refused only if it begins with /ip4/127.0.0.1 or the lab's.") from None
    if not (host.is_loopback or (in_lab() and host in LAB)):
        raise InputError(f"{address} is neither loopback nor in the lab: attackers call nobody else.")


async def check_connections(p2p: P2P) -> None:
    """Raise an InputError if this node is connected to a host outside this machine and outside the lab."""
    own = set(own_addresses())
    for peer in await p2p.list_peers():
        for address in peer.addrs:
            if str(address).split("/")[2] not in own:
                check_address(str(address))


# ---- a node ----------------------------------------------------------------------------------------------------------


class PeerService(ServicerBase):
    """Stands for an averaging process: its class name is that of the wire protocol.

    Args:
        hand_over: sends the state to a peer that asks for it
    """

    def __init__(self, hand_over: HandOver):
        self.hand_over = hand_over
        self.asked = 0
        """Streams that peers have opened to download its state."""

    async def rpc_download_state(
        self, requests: AsyncIterator[averaging_pb2.DownloadData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        self.asked += 1
        await anext(requests)  # the wish, which is always for the same state
        async for message in self.hand_over(requests):
            yield message

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)


@dataclass
class State:
    """A training state in the form in which it is sent."""

    description: dict
    tensors: list[torch.Tensor]

    @property
    def num_model_tensors(self) -> int:
        return len(self.tensors) - len(self.description["statistics"])

    @property
    def vector(self) -> torch.Tensor:
        """Zeros of the shape of the vector that a round averages: all parameters and float buffers."""
        model = self.tensors[: self.num_model_tensors]
        return torch.zeros(sum(tensor.numel() for tensor in model if tensor.is_floating_point()))


class Outsider:
    """A node without an invitation, which knows one address.

    Args:
        target: the peer behind that address
        namespace: of the run, which begins all its keys
        admission: what it knows of the members of the run, and the certificate that it shows, if it has one
    """

    def __init__(
        self,
        dht: Any,
        p2p: P2P,
        target: PeerID,
        namespace: str,
        report: Report,
        seconds: float,
        admission: Admission = OPEN,
    ):
        self.dht, self.p2p, self.target, self.namespace, self.report = dht, p2p, target, namespace, report
        self.admission = admission
        self._end = time.monotonic() + seconds
        self.stolen: State | None = None

    @property
    def progress_key(self) -> str:
        return f"{self.namespace}.progress"

    @property
    def remaining_seconds(self) -> float:
        return max(0.0, self._end - time.monotonic())

    async def turns(self, pause_seconds: float, most: int = 10_000) -> AsyncIterator[int]:
        """Yield numbers from 0, so many seconds apart, until the attack's time is over."""
        for turn in range(most):
            if not self.remaining_seconds:
                return
            yield turn
            await asyncio.sleep(min(pause_seconds, self.remaining_seconds))

    async def members(self) -> dict[PeerID, PeerProgress]:
        """The first training peers, by their own records, without those of attackers."""
        found = await self.dht.get(self.progress_key, latest=True, return_future=True)
        records = {}
        for peer, value in owned_entries(found, 1000):
            with contextlib.suppress(ValueError):
                if (said := read_record(value, peer, self.admission, get_dht_time())) is not None:
                    records[peer] = said
        return {peer: record for peer, record in records.items() if not record.name.startswith(NAME)}

    async def say(self, record: PeerProgress) -> None:
        """Store a record in this node's own name."""
        expiration = get_dht_time() + RECORD_SECONDS
        key, subkey, value = self.progress_key, self.dht.owner, self.admission.show(record.to_bytes())
        await self.dht.store(key, subkey=subkey, value=value, expiration_time=expiration, return_future=True)

    def averager(self, peer: PeerID) -> Any:
        """Stub of a peer's averaging process."""
        return PeerService.get_stub(self.p2p, peer, namespace=self.namespace)

    async def open_stream(self, method: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to the target's averaging process, without sending anything."""
        name = PeerService._get_handle_name(self.namespace, method)
        _, reader, writer = await self.p2p.call_binary_stream_handler(self.target, name)
        return reader, writer

    async def steal_state(self) -> State:
        """Download the target's state, which it hands to every peer."""
        num_pieces = asyncio.get_running_loop().create_future()

        async def requests() -> Messages:
            yield averaging_pb2.DownloadData(metadata=self.admission.show(Wish().to_bytes()))
            for index in range(await num_pieces):
                yield averaging_pb2.DownloadData(metadata=ask_for(index))
            await asyncio.sleep(60)  # until all pieces have arrived and the stream is closed

        async def answers() -> tuple[Offer, bytes]:
            stream = await self.averager(self.target).rpc_download_state(requests())
            offer = Offer.from_bytes((await anext(stream)).metadata, MOST_BYTES)
            num_pieces.set_result(offer.num_pieces)
            pieces = [unsqueeze((await anext(stream)).tensor_part) for _ in range(offer.num_pieces)]
            await stream.aclose()
            return offer, b"".join(pieces)

        offer, content = await asyncio.wait_for(answers(), 30)
        description, layout = MSGPackSerializer.loads(offer.description)
        return State(description, unpack(layout, torch.frombuffer(bytearray(content), dtype=torch.uint8)))

    async def schema_hash(self) -> bytes:
        return schema_hash((await self.steal_state()).vector)

    async def store(
        self, peers: Iterable[PeerID], key: str, records: Sequence[tuple[bytes, bytes]], expiration: float
    ) -> int:
        """Ask peers to store signed records, (subkey, signed value). Returns how many the target stored."""
        taken = 0
        for call in _calls(key, records, expiration):
            for peer in {self.target, *peers}:
                try:
                    response = await dht_stub(self.p2p, peer).rpc_store(call, timeout=20)
                except Exception as error:  # a refusal and a lost peer count the same
                    self.report(f"{peer} did not answer a store: {error!r}")
                    continue
                taken += sum(response.store_ok) if peer == self.target else 0
        return taken


@contextlib.asynccontextmanager
async def outsider(
    dht: Any,
    initial_peers: Sequence[str],
    namespace: str,
    report: Report,
    seconds: float,
    admission: Admission = OPEN,
) -> Iterating[Outsider]:
    p2p = await dht.replicate_p2p()
    await check_connections(p2p)
    target = PeerID.from_base58(initial_peers[0].rsplit("/", 1)[1])
    yield Outsider(dht, p2p, target, namespace, report, seconds, admission)


@contextlib.contextmanager
def attackers_dht(initial_peers: Sequence[str], identity: Path | None = None) -> Iterator[Any]:
    """A DHT node with an identity of its own and as many open files as there may be.

    Args:
        identity: private key of a former member

    Raises:
        InputError: an address that no attacker may call
    """
    for address in initial_peers:
        check_address(address)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host_maddrs = (f"/ip4/{listening_host()}/tcp/0",)
    dht = start_dht(NetworkOptions(initial_peers=tuple(initial_peers), host_maddrs=host_maddrs, identity_path=identity))
    try:
        yield dht
    finally:
        stop_dht(dht)


def record(step: int, **changes: Any) -> PeerProgress:
    """Return a record of now with the largest values that a reader accepts, unless others are given."""
    now = get_dht_time()
    fields = {"samples": 2**31, "rate": 1e7, "joined": now, "client_mode": False, "phase": TRAINING}
    return PeerProgress(own_name, step, time=now, **{**fields, **changes})


def offer_of(state: State, num_bytes: int | None = None) -> tuple[Offer, bytes]:
    """Return the offer of a state with right digests, and its bytes.

    Args:
        num_bytes: if given, offer so many zeros in place of the state
    """
    layout, packed = pack(state.tensors)
    content = packed.numpy() if num_bytes is None else torch.zeros(num_bytes, dtype=torch.uint8).numpy()
    description, digests = MSGPackSerializer.dumps((state.description, layout)), digests_of(content)
    return Offer(0.0, name_of_snapshot(description, digests), len(content), digests, description), content.tobytes()


async def hand_over(state: State, requests: Messages) -> Messages:
    """Send a state as an honest donor does."""
    offer, content = offer_of(state)
    yield averaging_pb2.DownloadData(metadata=offer.to_bytes())
    async for request in requests:
        index = asked_for(request.metadata)
        if index < offer.num_pieces:
            piece = torch.frombuffer(bytearray(content[piece_of(index)]), dtype=torch.uint8)
            yield averaging_pb2.DownloadData(tensor_part=squeeze(piece.numpy()))


# ---- keys that cost nothing ------------------------------------------------------------------------------------------


def keys_of_one_modulus(count: int) -> Iterator[OwnedRecords]:
    """Keys of one RSA modulus and many exponents: different subkeys and peer ids, at no cost."""
    numbers = rsa.generate_private_key(65537, 2048).private_numbers()
    exponent = 65537
    for _ in range(count):
        exponent += 2
        while math.gcd(exponent, (numbers.p - 1) * (numbers.q - 1)) != 1:
            exponent += 2
        yield _signer(numbers.p, numbers.q, exponent)


def sound_keys(count: int) -> Iterator[OwnedRecords]:
    """Keys that look like those of real peers, each a pair of some primes: very many for little computing."""
    primes: list[int] = []
    while len(primes) * (len(primes) - 1) // 2 < count:
        numbers = rsa.generate_private_key(65537, 2048).private_numbers()
        primes += [numbers.p, numbers.q]
    for (p, q), _ in zip(combinations(primes, 2), range(count), strict=False):
        yield _signer(p, q, 65537)


def _signer(p: int, q: int, exponent: int) -> OwnedRecords:
    private = pow(exponent, -1, (p - 1) * (q - 1))
    public = rsa.RSAPublicNumbers(exponent, p * q)
    numbers = rsa.RSAPrivateNumbers(p, q, private, private % (p - 1), private % (q - 1), pow(q, -1, p), public)
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key._private_key = numbers.private_key(unsafe_skip_rsa_key_validation=True)
    return OwnedRecords(key)


def signed(signer: OwnedRecords, key: str, value: bytes, expiration: float) -> tuple[bytes, bytes]:
    """Return (subkey, signed value) of a record under a key of the DHT."""
    subkey, content = MSGPackSerializer.dumps(signer.local_public_key), MSGPackSerializer.dumps(value)
    return subkey, signer.sign_value(DHTRecord(DHTID.generate(source=key).to_bytes(), subkey, content, expiration))


def dht_stub(p2p: P2P, peer: PeerID) -> Any:
    return ServicerBase.get_stub.__func__(DHTProtocol, p2p, peer)  # DHTProtocol's own `get_stub` needs a node


def _calls(key: str, records: Sequence[tuple[bytes, bytes]], expiration: float) -> Iterator[dht_pb2.StoreRequest]:
    size = max(1, STORE_BYTES // max((len(subkey) + len(value) for subkey, value in records), default=1))
    for begin in range(0, len(records), size):
        some = records[begin : begin + size]
        yield dht_pb2.StoreRequest(
            keys=[DHTID.generate(source=key).to_bytes()] * len(some),
            subkeys=[subkey for subkey, _ in some],
            values=[value for _, value in some],
            expiration_time=[expiration] * len(some),
            in_cache=[False] * len(some),
        )


def random_lineage() -> bytes:
    return os.urandom(16)
