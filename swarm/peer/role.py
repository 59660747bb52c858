"""Whether a peer can be called or only calls: what was given counts, the rest is measured."""

from __future__ import annotations

import socket
from dataclasses import replace

from swarm.network.dht_options import NetworkOptions, own_addresses
from swarm.network.reachability import Reachability, measure_reachability


def measured(
    network: NetworkOptions, why_client: str = "--client-mode was given"
) -> tuple[Reachability, NetworkOptions]:
    """How this peer takes part, and the network options that go with it.

    Args:
        why_client: why it is in client mode, if it is

    Raises:
        InputError: the port is taken, or a running peer uses the identity
    """
    if network.client_mode:
        return Reachability("outbound-only", f"because {why_client}"), network
    if not network.initial_peers:
        return Reachability("full", "because it is the first one: nobody is there to call it"), network
    if network.host_maddrs or network.announce_maddrs:
        return Reachability("full", "because --host-maddrs or --announce-maddrs say so: it was not measured"), network
    network.check()
    port = network.port or _free_port()
    found = measure_reachability(network.initial_peers, port, network.identity_path)
    network = replace(network, port=port, check_identity=False)
    if network.public_ip is not None and found.host != network.public_ip:
        # The asked peers see another address than the one that is said to work, and dial only what they see.
        return Reachability("full", f"because --public-ip {network.public_ip} says so: it was not measured"), network
    if found.mode == "outbound-only":
        return found, replace(network, client_mode=True, public_ip=None, port=0)
    behind_router = found.host is not None and found.host not in own_addresses()
    return found, replace(network, public_ip=found.host if behind_router else network.public_ip)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return probe.getsockname()[1]
