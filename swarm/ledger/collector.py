"""Fetches the ledgers of a run's peers into a folder. Each fetch goes on where the last one ended."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hivemind import DHT
from hivemind.dht import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger

from recipe.errors import InputError
from swarm.ledger.calls import ANSWER_SECONDS, Call, caller_of
from swarm.ledger.ledger import LedgerFile, OtherVersion
from swarm.ledger.lines import MAX_LINE_BYTES, AnyLine, NotALine, Signature, Start, digest_of, is_signed, read_line
from swarm.ledger.messages import ANSWER_BYTES, PIECE_BYTES, LedgerOffer, LedgerWish
from swarm.network.dht_process import SwarmDHT
from swarm.runtime.async_utils import in_thread
from swarm.runtime.processes import claim

logger = get_logger(__name__)

MAX_PEERS = 1024
MAX_LEDGERS = 4
"""Ledgers that are kept of one peer. A peer begins another one if it has lost its folder."""
MAX_BYTES = 2**28
"""Bytes of one peer's ledgers together; beyond that, nothing more of it is fetched."""
MAX_FOLDER_BYTES = 2**32
"""Bytes of all peers' ledgers together; beyond that, nothing more is fetched."""
FILE_BYTES = 2**12
"""Bytes that a file takes on a disk, however short it is."""
AT_A_TIME = 8
"""Peers from which ledgers are fetched at the same time."""
RELAYS = 2
"""How many peers are asked for the ledger of a peer that cannot be called."""
MAX_CALLS = 8
"""Calls to one peer, each for 8 MiB; what is left comes next time."""
PEER_SECONDS = 30.0
"""Time for one peer, however slowly it sends; what is left comes next time."""
FETCH_SECONDS = 2 * RELAYS * PEER_SECONDS
"""Time for `AT_A_TIME` peers; after it the DHT process is taken for one that does not answer any more."""


LOCK = ".lock"
"""File in the folder, which a process claims that fetches into it."""
NO_ROOM = "has more lines than the folder may hold"
PEER_FULL = "has more lines than are kept of one peer: the rest is not fetched"
MORE_LATER = "has more lines than one fetch takes: fetch again"
ANSWERS = ("", NO_ROOM, PEER_FULL, MORE_LATER)
"""What a fetch from a peer ends with that hands over its ledger as it should."""
NO_TIME = "was not asked, because no time was left"


class Refused(ValueError):  # noqa: N818 (reads as what happened)
    """What a peer sends is not kept. The text is the end of a sentence that begins with the name of the peer."""


class NoMore(Refused):
    """No more of this ledger is asked for or kept. The peer that was asked has done nothing wrong."""


@dataclass(frozen=True)
class Collected:
    """The result of a fetch.

    Args:
        num_bytes: new bytes
        answered: peers that have handed over what is new in their ledgers, or as much of it as is kept
        silent: peers that handed over nothing, or not all, and why
        is_full: there was more than the folder may hold
        is_peer_full: there was more of a peer than is kept of one peer
    """

    num_bytes: int
    answered: tuple[str, ...]
    silent: dict[str, str]
    is_full: bool = False
    is_peer_full: bool = False


class Room:
    """How much several peers together may still add to a folder.

    Args:
        num_bytes: bytes that are left
    """

    def __init__(self, num_bytes: float = math.inf):
        self._left, self._lock = num_bytes, threading.Lock()

    @classmethod
    def in_folder(cls, folder: Path, max_bytes: int) -> int:
        """Return how many bytes are left in a folder."""
        return max_bytes - sum(max(FILE_BYTES, path.stat().st_size) for path in folder.glob("*.jsonl"))

    def take(self, num_bytes: int) -> bool:
        """Take this many bytes, if there is room for them; returns whether there is."""
        with self._lock:
            has_room = num_bytes <= self._left
            self._left -= num_bytes if has_room else 0
        return has_room


class Shelf:
    """The ledgers of one peer in a folder, as PEER_ID-LEDGER.jsonl; only signed lines are kept.

    A peer that passes them on can leave something out, and no more: what it invents has no signature.

    Args:
        folder: where the ledgers are
        peer: their owner
        run: start of the run's keys in the DHT
        max_bytes: of all ledgers of this peer
        room: of the folder, which the shelves of other peers use as well
    """

    def __init__(self, folder: Path, peer: PeerID, run: str, max_bytes: int = MAX_BYTES, room: Room | None = None):
        self._folder, self._peer, self._run, self._max_bytes = folder, peer, run, max_bytes
        self._room = room or Room()
        self._file: LedgerFile | None = None
        self._start: Start | None = None
        self._offered = b""
        """Digest of the first line, as it was offered; its beginning is in the name of the file."""
        self._others_bytes = 0
        self._n, self._before = 0, b""
        """Number that the next line has to have, and the hash of the line before it."""
        self._pending: list[bytes] = []
        """Lines that have come and are not signed yet."""
        self._rest = b""
        """Beginning of a line that has not come as a whole."""
        self.num_bytes = 0
        """Bytes that were added."""

    def _paths(self) -> list[Path]:
        """Return the files of this peer's ledgers, the latest first."""
        found = self._folder.glob(f"{self._peer.to_base58()}-*.jsonl")
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)

    def wish(self) -> LedgerWish:
        """Return the message that asks for what comes next in the ledger that grew last.

        Raises:
            Refused: another version of this program has fetched that ledger
        """
        for path in self._paths():
            try:
                file = LedgerFile(path)
            except OtherVersion:
                raise NoMore(f"is not asked: another version of this program wrote {path}") from None
            if first := file.first_line():
                self._open(file)
                return LedgerWish(b"", digest_of(first), file.size)
        return LedgerWish()

    def _open(self, file: LedgerFile) -> None:
        self._file, self._n, self._before = file, file.n, file.before
        start = read_line(file.first_line()) if file.size else None
        self._start = start if isinstance(start, Start) else None
        self._others_bytes = sum(path.stat().st_size for path in self._paths() if path != file.path)
        self._pending, self._rest = [], b""

    def begin(self, wish: LedgerWish, offer: LedgerOffer) -> None:
        """Prepare for what a peer offers.

        Raises:
            Refused: it offers nothing, or something that does not fit what it has shown before
        """
        if not offer.ledger:
            raise Refused("keeps no ledger, or has nothing in it yet")
        if offer.ledger == wish.ledger and offer.begin == wish.begin:
            return
        if offer.begin:
            raise Refused("no longer has lines that it has sent before")
        paths = self._paths()
        path = self._folder / f"{self._peer.to_base58()}-{offer.ledger.hex()[:16]}.jsonl"
        if path in paths:
            raise Refused("sends an older ledger again")
        if len(paths) >= MAX_LEDGERS:
            raise Refused(f"has begun {MAX_LEDGERS} ledgers already, the most that are fetched of a peer")
        self._open(LedgerFile(path))
        self._offered = offer.ledger

    def add(self, data: bytes) -> None:
        """Take more bytes, and keep the lines among them that are signed by now.

        Raises:
            Refused: they do not follow on what is here, are not signed by this peer, or are too many
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise Refused("sends a line without an end")
        for content in lines:
            try:
                self._take(content, read_line(content))
            except NotALine:
                raise Refused("sends something that is not a ledger line") from None

    def _take(self, content: bytes, line: AnyLine) -> None:
        if (line.n, line.before) != (self._n, self._before):
            raise Refused("sends lines that do not continue its earlier ones")
        if isinstance(line, Start):
            if (line.peer, line.run) != (self._peer, self._run):
                raise Refused("sends the ledger of another peer, or of another run")
            if line.n == 0 and digest_of(content) != self._offered:
                raise Refused("sends another ledger than it offers")
            self._start = self._start or line
        self._pending.append(content)
        self._n, self._before = line.n + 1, digest_of(content)
        num_bytes = sum(map(len, self._pending)) + len(self._pending) if isinstance(line, Signature) else 0
        if not num_bytes:
            return
        if not is_signed(self._start, line):
            raise Refused("sends lines that their owner has not signed")
        if self._others_bytes + self._file.size + num_bytes > self._max_bytes:
            raise NoMore(PEER_FULL)
        if not self._room.take(num_bytes if self._file.size else max(num_bytes, FILE_BYTES)):
            raise NoMore(NO_ROOM)
        self._file.extend(self._pending)
        self.num_bytes += num_bytes
        self._pending = []


async def fetch(call: Call, shelf: Shelf, of: PeerID | None = None) -> None:
    """Fetch everything that is signed up to now, in at most `MAX_CALLS` calls.

    Args:
        call: opens a stream to the peer that is asked
        shelf: where the ledger is kept
        of: owner of the ledger, if another peer passes it on

    Raises:
        Refused: the ledger was not handed over, or is not kept
        TimeoutError: no message has come for too long
    """
    for _ in range(MAX_CALLS):
        wish = await in_thread(shelf.wish)
        before, complete = shelf.num_bytes, False
        asked = replace(wish, peer=b"" if of is None else of.to_bytes())
        stream = call(averaging_pb2.DownloadData(metadata=asked.to_bytes()))
        try:
            complete = await _read(stream, wish, shelf)
        finally:
            await stream.aclose()
        if complete:
            return
        if shelf.num_bytes == before:
            raise Refused("ended the transfer before its next signature")
    raise NoMore(MORE_LATER)


async def _read(stream: AsyncGenerator[averaging_pb2.DownloadData, None], wish: LedgerWish, shelf: Shelf) -> bool:
    """Make one call; returns whether it has brought all that was there."""
    try:
        offer = LedgerOffer.from_bytes((await _next(stream)).metadata)
    except (ValueError, StopAsyncIteration):
        raise Refused("does not hand over its ledger now") from None
    await in_thread(shelf.begin, wish, offer)
    place = offer.begin
    while place < min(offer.size, offer.begin + ANSWER_BYTES):
        try:
            piece = (await _next(stream)).metadata
        except StopAsyncIteration:
            return False
        if not 0 < len(piece) <= PIECE_BYTES:
            raise Refused("sends pieces of another size")
        place += len(piece)
        await in_thread(shelf.add, piece)
    return place >= offer.size


async def _next(stream: AsyncGenerator[averaging_pb2.DownloadData, None]) -> averaging_pb2.DownloadData:
    return await asyncio.wait_for(anext(stream), ANSWER_SECONDS)


class FetchLedgers:
    """Fetches the ledgers of a few peers; runs in the DHT process (`DHT.run_coroutine`).

    Args:
        run: start of the run's keys in the DHT
        peers: for each owner of a ledger the peers to ask: the owner itself, or peers that may pass its ledger on
        folder: where the ledgers go
        max_bytes: of one peer
        room_bytes: of all of them together
    """

    def __init__(
        self,
        run: str,
        peers: Mapping[PeerID, Sequence[PeerID]],
        folder: Path,
        max_bytes: int,
        room_bytes: int = MAX_FOLDER_BYTES,
    ):
        self.run, self.peers, self.folder, self.max_bytes = run, dict(peers), folder, max_bytes
        self.room_bytes = room_bytes

    async def __call__(self, _dht: DHT, node: DHTNode) -> tuple[dict[PeerID, int], dict[PeerID, str]]:
        """Return for each peer the number of new bytes, and what was wrong, empty if nothing was."""
        room = Room(self.room_bytes)  # made in the DHT process, as the locks below
        shelves = {peer: Shelf(self.folder, peer, self.run, self.max_bytes, room) for peer in self.peers}
        # A peer answers one of our calls at a time.
        turns = {other: asyncio.Lock() for asked in self.peers.values() for other in asked}
        p2p = node.protocol.p2p
        results = await asyncio.gather(*(self._fetch(p2p, peer, shelves[peer], turns) for peer in self.peers))
        num_bytes = {peer: shelf.num_bytes for peer, shelf in shelves.items()}
        return num_bytes, dict(zip(self.peers, results, strict=True))

    async def _fetch(self, p2p: P2P, peer: PeerID, shelf: Shelf, turns: Mapping[PeerID, asyncio.Lock]) -> str:
        problem = "cannot be called, and no other peer can pass its ledger on"
        for other in self.peers[peer]:
            through = "" if other == peer else f"was asked through {other}, which "
            try:
                async with asyncio.timeout(PEER_SECONDS), turns[other]:
                    await fetch(caller_of(p2p, other, self.run), shelf, None if other == peer else peer)
                return ""
            except NoMore as error:
                problem = str(error)
            except Refused as error:
                problem = f"{through}{error}"
            except TimeoutError:
                problem = MORE_LATER if shelf.num_bytes else f"{through}takes too long"
            except Exception as error:
                is_disk = isinstance(error, OSError) and not isinstance(error, ConnectionError)
                if is_disk:
                    problem = f"cannot be kept here ({error.strerror or error})"
                else:  # of the network: the peer is gone, or has another version
                    logger.debug(f"the ledger of {peer} from {other}", exc_info=True)
                    problem = f"{through}does not answer ({type(error).__name__})"
        return problem


def collect(
    dht: SwarmDHT,
    run: str,
    is_client: Mapping[PeerID, bool],
    folder: Path,
    max_bytes: int = MAX_BYTES,
    max_folder_bytes: int = MAX_FOLDER_BYTES,
    most_seconds: float = math.inf,
) -> Collected:
    """Fetch what is new in the ledgers of these peers; call it again for what comes later.

    No other process fetches into the folder until this one ends: two would write over each other's lines.

    Args:
        dht: a running DHT, of `start_dht`
        run: start of the run's keys in the DHT (`RunManifest.key_prefix`)
        is_client: for each peer whether it is in client mode, so that another peer has to pass its ledger on
        folder: where the ledgers are kept; made if it is missing
        max_bytes: of one peer
        max_folder_bytes: of all that is in the folder
        most_seconds: after this time no further peer is asked

    Raises:
        InputError: another process fetches into the folder
        OSError: the folder cannot be made, or read
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not claim(folder / LOCK):
        raise InputError(
            f"A desk or another swarm ledger fetch keeps its ledgers in {folder}: stop it, or name another folder."
        )
    until = time.monotonic() + most_seconds
    peers = random.sample(list(is_client), min(MAX_PEERS, len(is_client)))  # by lot: the rest may get a turn next time
    asked = {peer: [peer] for peer in peers if not is_client[peer]}
    num_bytes, problems = _fetch_all(dht, run, asked, folder, max_bytes, max_folder_bytes, until)
    relays = itertools.cycle(_answered(num_bytes, problems))
    asked = {peer: list(itertools.islice(relays, RELAYS)) for peer in peers if is_client[peer]}
    of_clients = _fetch_all(dht, run, asked, folder, max_bytes, max_folder_bytes, until)
    num_bytes, problems = num_bytes | of_clients[0], problems | of_clients[1]
    return Collected(
        sum(num_bytes.values()),
        tuple(peer.to_base58() for peer in _answered(num_bytes, problems)),
        {peer.to_base58(): problem for peer, problem in problems.items() if problem},
        NO_ROOM in problems.values(),
        PEER_FULL in problems.values(),
    )


def _answered(num_bytes: Mapping[PeerID, int], problems: Mapping[PeerID, str]) -> list[PeerID]:
    """Return the peers that have handed over what is new, or as much of it as is kept."""
    return [peer for peer, problem in problems.items() if problem in ANSWERS or num_bytes.get(peer)]


def _fetch_all(
    dht: SwarmDHT,
    run: str,
    asked: Mapping[PeerID, Sequence[PeerID]],
    folder: Path,
    max_bytes: int,
    max_folder_bytes: int,
    until: float,
) -> tuple[dict[PeerID, int], dict[PeerID, str]]:
    """Fetch from a few peers at a time; returns for each peer the number of new bytes, and what was wrong."""
    num_bytes, problems = {}, dict.fromkeys(asked, NO_TIME)
    for begin in range(0, len(asked), AT_A_TIME):
        if time.monotonic() >= until:
            break
        some = dict(list(asked.items())[begin : begin + AT_A_TIME])
        room = Room.in_folder(folder, max_folder_bytes)  # anew: peers that took too long may still have added something
        running = dht.run_coroutine(FetchLedgers(run, some, folder, max_bytes, room), return_future=True)
        try:
            new, found = running.result(FETCH_SECONDS)
        except TimeoutError:
            new, found = {}, dict.fromkeys(some, "takes too long")
        num_bytes |= new
        problems |= found
    return num_bytes, problems
