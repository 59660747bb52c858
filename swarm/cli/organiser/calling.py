"""How the organiser's commands reach the peers of her run; they need no peer of hers.

Who is there is found out at all addresses side by side, while the libraries are still being imported: if nobody is, a
person hears of it as soon as those are there, and no p2pd has been started.
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
"""For a connection and a greeting, from the other side of the world or from a busy machine."""
PATIENCE_SECONDS = 5.0
"""With peers that are there and too busy to answer in time: they are asked once more."""
WRONG_CLOCK_SECONDS = 3600.0
MANIFEST_SECONDS = 4.0
"""In which peers that are there say what is trained."""


class NotTold(Exception):  # noqa: N818 (reads as what it says)
    """The swarm was not reached. The text is a sentence that says why."""


class WrongClock(NotTold):
    """Its clock is off by more than an hour: what this machine would sign now could keep later lists from counting."""


class Lookout:
    """Looks who is there, from now on, while this program does something else.

    Args:
        addresses: of peers of the run
    """

    def __init__(self, addresses: Sequence[str]):
        self.addresses = tuple(addresses)
        self._found: list[str] = []
        self._why = ""
        self._looking = threading.Thread(target=self._look, name="lookout", daemon=True)
        self._looking.start()

    @classmethod
    def of(cls, initial_peers: Sequence[str] | None, organiser: OrganiserOptions) -> Lookout:
        """For the peers that a person has named; None: for the organiser's own, where it was last.

        Raises:
            InputError: an address is malformed, or no peer of hers has started the run yet
        """
        return cls(organiser.addresses if initial_peers is None else parse_initial_peers(initial_peers))

    def _look(self) -> None:
        try:
            self._found = check_reachable(self.addresses, LOOK_SECONDS, is_greeted=True)
        except InputError as error:
            self._why = str(error)

    def found(self) -> list[str]:
        """The addresses where a peer is.

        Raises:
            NotTold: there is none
        """
        self._looking.join()
        if self._why:
            raise NotTold(self._why)
        return self._found


class Deadline:
    """Of several things in a row.

    Args:
        seconds: from now on, for all of them
    """

    def __init__(self, seconds: float):
        self._at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; never none, which would mean for ever."""
        return max(0.1, self._at - time.monotonic())


@contextlib.contextmanager
def calling(lookout: Lookout, authority: Authority) -> Iterator[tuple[SwarmDHT, RunManifest]]:
    """A connection to the peers of the run, and what is trained there. Their clocks and this one agree within 3 s.

    Args:
        lookout: for peers of the run
        authority: the run

    Raises:
        NotTold: nobody answers, or nobody trains this run there
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
    """As `calling`, where nothing can be done without the peers.

    Raises:
        InputError: they cannot be reached
    """
    try:
        with calling(lookout, authority) as found:
            yield found
    except NotTold as error:
        raise InputError(f"The run cannot be reached: {error}") from None


def handed_to(num_peers: int) -> str:
    """What has happened to a list, as the end of a sentence."""
    return f"was handed to {'1 peer' if num_peers == 1 else f'{num_peers} peers'}, and the peers pass it on."


def _manifest(dht: SwarmDHT, addresses: Sequence[str], authority: Authority) -> RunManifest:
    """Raises NotTold: nobody trains this run there"""
    from swarm.membership.run_manifest import read_manifests

    run_id = authority.run_id
    try:
        found = read_manifests(dht, addresses, run_id, authority.organiser, MANIFEST_SECONDS)
    except InputError as error:
        raise NotTold(str(error)) from None
    if run_id not in found:
        raise NotTold(f"The peers at {' '.join(addresses)} know nothing of your run {run_id}.")
    return found[run_id]
