"""Addresses of a run's peers on disk: who comes back finds the swarm through any of them, whoever has left."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from recipe.errors import InputError
from recipe.run_folder import RunFolder, write_json
from swarm.network.addresses import check_reachable, parse_initial_peers

MAX_REMEMBERED = 32
MAX_ADDRESSES = 8
"""Of one peer."""


def read_book(path: Path) -> list[str]:
    """The addresses in one file, newest first; none if it cannot be used."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return []
    return usable(content["addresses"]) if isinstance(content, dict) and "addresses" in content else []


def write_book(path: Path, addresses: Iterable[str]) -> None:
    """Replace the file; a full disk costs the memory, never the training."""
    try:
        write_json(path, {"addresses": list(addresses)[:MAX_REMEMBERED]})
    except OSError:
        pass


def usable(addresses: object, peer_id: str | None = None) -> list[str]:
    """The well-formed multiaddresses among anything that anyone may have written, at most `MAX_REMEMBERED`.

    Args:
        peer_id: leave out those of other peers
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
    """Addresses that peers of this machine have noted, and where something still listens.

    Args:
        run_id: of which run; None for those in which one of the `given` addresses' peers has been met
    """
    books = [read_book(path) for path in books_of(output_dir, run_id, given)]
    addresses = list(dict.fromkeys(address for book in books for address in book))
    try:
        return check_reachable(addresses[:MAX_REMEMBERED])
    except InputError:
        return []


def books_of(output_dir: Path, run_id: str | None, given: Sequence[str] = ()) -> list[Path]:
    """The files in which peers of this machine have noted others, newest first; see `met_before`."""
    books = output_dir.expanduser().glob(f"{run_id or '*'}/*/{RunFolder('').peers.name}")
    newest_first = sorted(books, key=lambda path: path.stat().st_mtime, reverse=True)
    if run_id is not None:
        return newest_first
    invited = {peer_of_address(address) for address in given}
    return [path for path in newest_first if invited & set(map(peer_of_address, read_book(path)))]


def peer_of_address(address: str) -> str:
    """The peer id at its end."""
    return address.rpartition("/p2p/")[2]
