"""How the organiser's commands reach the peers of her run; they need no peer of hers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from recipe.errors import InputError
from swarm.network.addresses import check_reachable

if TYPE_CHECKING:
    from swarm.membership.run_manifest import RunManifest
    from swarm.network.dht_process import SwarmDHT
    from swarm.protocol.certificates import Authority


class NotTold(Exception):  # noqa: N818 (reads as what it says)
    """The swarm was not reached. The text is a sentence that says why."""


@contextlib.contextmanager
def calling(addresses: Sequence[str], authority: Authority) -> Iterator[tuple[SwarmDHT, RunManifest]]:
    """A connection to the peers of the run, and what is trained there.

    Args:
        addresses: of peers of the run
        authority: the run

    Raises:
        NotTold: nobody answers, or nobody trains this run there
    """
    from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht

    try:
        dht = start_dht(NetworkOptions(initial_peers=tuple(check_reachable(addresses)), client_mode=True))
    except InputError as error:  # the clock may be wrong, too: that must not keep the organiser from signing
        raise NotTold(str(error)) from None
    try:
        manifest = _manifest(dht, addresses, authority)
        dht.take_part(manifest.key_prefix, authority, b"")
        yield dht, manifest
    finally:
        stop_dht(dht)


def _manifest(dht: SwarmDHT, addresses: Sequence[str], authority: Authority) -> RunManifest:
    """Raises NotTold: nobody trains this run there"""
    from swarm.membership.run_manifest import read_manifests

    run_id = authority.run_id
    try:
        found = read_manifests(dht, addresses, run_id, authority.organiser)
    except InputError as error:
        raise NotTold(str(error)) from None
    if run_id not in found:
        raise NotTold(f"The peers at {' '.join(addresses)} know nothing of your run {run_id}.")
    return found[run_id]
