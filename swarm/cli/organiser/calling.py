"""How the organiser's commands reach the peers of her run. They need no peer of her own.

All addresses are tried side by side while the libraries are still being imported. If no peer answers, the command says
so as soon as the imports are done, without having started p2pd.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from recipe.errors import InputError
from swarm.network.addresses import check_reachable, parse_initial_peers

if TYPE_CHECKING:
    from swarm.cli.organiser.organiser_options import OrganiserOptions
    from swarm.membership.run_manifest import RunManifest
    from swarm.network.dht_process import SwarmDHT
    from swarm.protocol.certificates import Authority

LOOK_SECONDS = 3.0
"""Time for a connection and a greeting, enough for the other side of the world or for a busy machine."""
PATIENCE_SECONDS = 5.0
"""How long peers that are there, but too busy to answer in time, are asked again."""
WRONG_CLOCK_SECONDS = 3600.0
"""A clock that is further off than this keeps the organiser from signing a list of removed members."""
MANIFEST_SECONDS = 4.0
"""Time in which peers that are there have to say what is trained."""


class NotTold(Exception):  # noqa: N818 (reads as what it says)
    """The swarm was not reached. The text is a sentence that says why."""


class WrongClock(NotTold):
    """The clocks of this machine and of a peer are more than an hour apart.

    A list that this machine signs now could have a date that keeps later lists from counting.
    """


class Lookout:
    """Finds out in a thread of its own, from its creation on, at which addresses a peer answers.

    Args:
        addresses: multiaddresses of peers of the run
    """

    def __init__(self, addresses: Sequence[str]):
        self.addresses = tuple(addresses)
        self._found: list[str] = []
        self._why = ""
        self._looking = threading.Thread(target=self._look, name="lookout", daemon=True)
        self._looking.start()

    @classmethod
    def of(cls, initial_peers: Sequence[str] | None, organiser: OrganiserOptions) -> Lookout:
        """A look-out for the peers that a person has named.

        Args:
            initial_peers: their addresses; None: where the organiser's own peer was last

        Raises:
            InputError: an address is malformed, or no peer of the organiser has started the run yet
        """
        return cls(organiser.addresses if initial_peers is None else parse_initial_peers(initial_peers))

    def _look(self) -> None:
        try:
            self._found = check_reachable(self.addresses, LOOK_SECONDS, is_greeted=True)
        except InputError as error:
            self._why = str(error)

    def found(self) -> list[str]:
        """The addresses at which a peer answers.

        Raises:
            NotTold: no peer answers
        """
        self._looking.join()
        if self._why:
            raise NotTold(self._why)
        return self._found


class Deadline:
    """One time limit for several calls in a row.

    Args:
        seconds: for all of these calls together, from now on
    """

    def __init__(self, seconds: float):
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left. They are at least 0.1, so that a late call still gets a moment for its answer."""
        return max(0.1, self._at - time.monotonic())


@contextlib.contextmanager
def calling(lookout: Lookout, authority: Authority) -> Iterator[tuple[SwarmDHT, RunManifest]]:
    """A connection to the peers of the run, and what is trained there. Their clocks and this one agree within 3 s.

    Args:
        lookout: for peers of the run
        authority: the run

    Raises:
        NotTold: no peer answers, or the peers there do not know this run
        WrongClock: the clocks are more than an hour apart
    """
    addresses = lookout.found()
    from swarm.network.dht_options import NetworkOptions, start_dht, stop_dht
    from swarm.network.startup_errors import ClockIsOff

    try:
        options = NetworkOptions(initial_peers=tuple(addresses), client_mode=True, patience_seconds=PATIENCE_SECONDS)
        dht = start_dht(options)
    except ClockIsOff as error:  # a little: that must not keep the organiser from signing
        raise (WrongClock if abs(error.ahead_seconds) > WRONG_CLOCK_SECONDS else NotTold)(str(error)) from None
    except InputError as error:
        raise NotTold(str(error)) from None
    try:
        manifest = _manifest(dht, addresses, authority)
        dht.take_part(manifest.key_prefix, manifest.authority, b"")
        yield dht, manifest
    finally:
        stop_dht(dht)


@contextlib.contextmanager
def reaching(lookout: Lookout, authority: Authority) -> Iterator[tuple[SwarmDHT, RunManifest]]:
    """As `calling`, for commands that can do nothing without the peers.

    Raises:
        InputError: the peers cannot be reached
    """
    try:
        with calling(lookout, authority) as found:
            yield found
    except NotTold as error:
        raise InputError(f"The run cannot be reached: {error}") from None


def handed_to(num_peers: int) -> str:
    """The end of a sentence whose subject is a list: how many peers it was handed to."""
    return f"was handed to {'1 peer' if num_peers == 1 else f'{num_peers} peers'}, and the peers pass it on."


def _manifest(dht: SwarmDHT, addresses: Sequence[str], authority: Authority) -> RunManifest:
    """Raises NotTold: the peers there do not know this run, or do not answer"""
    from swarm.membership.run_manifest import read_manifests

    run_id = authority.run_id
    try:
        found = read_manifests(dht, addresses, run_id, authority.organiser, MANIFEST_SECONDS)
    except InputError as error:
        raise NotTold(str(error)) from None
    if run_id not in found:
        raise NotTold(
            f"The peers at {' '.join(addresses)} do not know your run {run_id}: give --initial-peers of a peer that "
            "trains in it."
        )
    return found[run_id]
