"""Turns the errors of Hivemind and p2pd when a DHT cannot start into sentences that say what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recipe.errors import InputError
from swarm.network.addresses import OthersAnswer

if TYPE_CHECKING:
    from swarm.network.dht_options import NetworkOptions


class ClockIsOff(InputError):  # noqa: N818
    """This machine's clock and the swarm's differ.

    Args:
        ahead_seconds: how far this machine's clock is ahead; negative if it is behind
    """

    def __init__(self, ahead_seconds: float):
        direction = "ahead of" if ahead_seconds > 0 else "behind"
        super().__init__(
            f"This machine's clock is {abs(ahead_seconds):.0f} s {direction} the swarm's, 3 s are allowed: switch on "
            "NTP (`timedatectl set-ntp true`; on a virtual machine or WSL, on its host), look at `timedatectl`, and "
            "try again."
        )
        self.ahead_seconds = ahead_seconds


def was_too_slow(error: Exception, seconds: float) -> bool:
    """Whether p2pd or a handshake (libp2p gives it 5 s) timed out, as they do now and then on a busy machine."""
    symptoms = ("failed to start in", "did not answer in time")
    return any(symptom in str(error) for symptom in symptoms) or ("bootstrap peers" in str(error) and seconds > 4)


def is_busy(error: Exception) -> bool:
    """Whether a peer is there and did not answer in time. Another peer may, or the same peer a little later."""
    return "responded to a ping" in str(error)


def explained(error: Exception, options: NetworkOptions, peers: Sequence[str]) -> Exception:
    """The error as a sentence for a person; the error itself where no sentence is known for it.

    Args:
        error: what Hivemind or this program has raised
        options: what the person has given
        peers: the addresses that were tried
    """
    text = str(error)
    if clocks := re.search(r"local: ([\d.]+), peer: ([\d.]+)", text):
        return ClockIsOff(float(clocks[1]) - float(clocks[2]))
    sentences = {
        "bootstrap peers": f"No peer with the expected id answers at {' '.join(peers)}: it may have restarted under a "
        "new one, so ask for its present address (a fixed --identity-path keeps the id).",
        "responded to a ping": f"{' '.join(peers)} is no peer of a Hivemind swarm, or it is too busy to answer within "
        "3 s: check the address, or try again.",
        "can't access this node": "The swarm cannot call this machine back, probably because of a firewall: start with "
        "--client-mode.",
        "already taken": f"A running peer uses the identity {options.identity_path} already: stop that peer, or give "
        "this one another --identity-path.",
        "address already in use": "The port is in use on this machine: choose another --port, or 0 for any free one.",
        "failed to listen": f"This machine cannot listen on {' '.join(options.listen_addresses())}: give one of its "
        "own addresses in --host-maddrs, or leave it out.",
        "failed to start in": "Hivemind's p2pd did not start in time, twice "
        f"({options.startup_timeout_seconds:.0f} s): the machine is too busy, so end other programs and try again.",
        "while it started": f"{text[:1].upper()}{text[1:]}: the machine is too busy or out of memory, so end other "
        "programs and try again.",
        "p2pd binary": "Hivemind's p2pd program is missing or made for another kind of computer: reinstall hivemind.",
    }
    found = next((symptom for symptom in sentences if symptom in text), None)
    if found is None:
        return error
    kind = OthersAnswer if found in ("bootstrap peers", "responded to a ping") else InputError
    return kind(sentences[found])
