"""Addresses of a run's peers on disk. A peer that comes back can find the swarm through any of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from recipe.errors import InputError
from recipe.run_folder import RunFolder, write_json
from swarm.network.addresses import check_reachable, parse_initial_peers

MAX_REMEMBERED = 32
"""Addresses in a file."""
MAX_ADDRESSES = 8
"""Addresses of one peer."""


def read_book(path: Path) -> list[str]:
    """The addresses in one file, newest first; none if it cannot be used."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return []
    return usable(content["addresses"]) if isinstance(content, dict) and "addresses" in content else []


def write_book(path: Path, addresses: Iterable[str]) -> None:
    """Replace the file. On a full disk the addresses are lost, but the training goes on."""
    try:
        write_json(path, {"addresses": list(addresses)[:MAX_REMEMBERED]})
    except OSError:
        pass


def one_of_each_first(addresses: Iterable[str]) -> list[str]:
    """The addresses in another order: the first one of each peer, then the second one of each, and so on."""
    of_peer: Counter[str] = Counter()
    ranked: list[tuple[int, str]] = []
    for address in dict.fromkeys(addresses):
        peer = peer_of_address(address)
        ranked.append((of_peer[peer], address))
        of_peer[peer] += 1
    return [address for _, address in sorted(ranked, key=lambda item: item[0])]


def to_remember(found: Sequence[str], earlier: Sequence[str]) -> list[str]:
    """The addresses for the next file, at most `MAX_REMEMBERED`, of as many peers as possible.

    Up to half of them are of peers that were not found now: they may be behind a division of the network.

    Args:
        found: addresses of peers that the DHT knows now
        earlier: the addresses in the last file
    """
    here = set(map(peer_of_address, found))
    # By lot: peers that come and go would otherwise push out those that were lost before them.
    gone = [address for address in random.sample(earlier, len(earlier)) if peer_of_address(address) not in here]
    missing = one_of_each_first(gone)
    present = one_of_each_first([*found, *(address for address in earlier if peer_of_address(address) in here)])
    places = max(MAX_REMEMBERED - len(missing), MAX_REMEMBERED // 2)
    return [*present[:places], *missing][:MAX_REMEMBERED]


def usable(addresses: object, peer_id: str | None = None) -> list[str]:
    """The well-formed multiaddresses in untrusted data, at most `MAX_REMEMBERED`.

    Args:
        addresses: any object, of which a list of texts is used
        peer_id: leave out addresses of other peers
    """
    found: list[str] = []
    for address in addresses[:MAX_REMEMBERED] if isinstance(addresses, list) else []:
        if not isinstance(address, str) or len(address) > 200:
            continue
        try:
            found += parse_initial_peers([address])
        except InputError:
            continue
    of_peer = [address for address in found if peer_id is None or peer_of_address(address) == peer_id]
    return list(dict.fromkeys(of_peer))[:MAX_REMEMBERED]


def met_before(output_dir: Path, run_id: str | None, given: Sequence[str] = ()) -> list[str]:
    """Addresses that peers of this machine have noted, and at which something still listens.

    Args:
        output_dir: folder of the runs
        run_id: the run; None for all runs in which the peer of one of the `given` addresses was met
        given: multiaddresses of peers
    """
    books = [read_book(path) for path in books_of(output_dir, run_id, given)]
    addresses = list(dict.fromkeys(address for book in books for address in book))
    try:
        return check_reachable(addresses[:MAX_REMEMBERED])
    except InputError:
        return []


def books_of(output_dir: Path, run_id: str | None, given: Sequence[str] = ()) -> list[Path]:
    """The files in which peers of this machine have noted addresses, newest first; see `met_before`."""
    books = output_dir.expanduser().glob(f"{run_id or '*'}/*/{RunFolder('').peers.name}")
    newest_first = sorted(books, key=lambda path: path.stat().st_mtime, reverse=True)
    if run_id is not None:
        return newest_first
    invited = {peer_of_address(address) for address in given}
    return [path for path in newest_first if invited & set(map(peer_of_address, read_book(path)))]


def peer_of_address(address: str) -> str:
    """The peer id at the end of a multiaddress."""
    return address.rpartition("/p2p/")[2]
