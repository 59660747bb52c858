"""Decides between server mode and client mode: by what a person gave, or else by measuring."""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import replace

from swarm.network.dht_options import NetworkOptions
from swarm.network.home.interfaces import free_port, own_addresses
from swarm.network.home.open_ports import open_port
from swarm.network.home.router import RouterRefuses
from swarm.network.reachability import Reachability, measure_reachability


def measured(
    network: NetworkOptions, why_client: str = "--client-mode was given", ask_router: bool = False
) -> tuple[Reachability, NetworkOptions]:
    """Return whether other peers can call this one, and the network options that follow from that.

    Args:
        why_client: why it is in client mode, if it is
        ask_router: have the router of this home open a port, if that could help

    Raises:
        InputError: the port is taken, or a running peer uses the identity
    """
    if network.client_mode:
        return Reachability("client-mode", f"because {why_client}"), network
    says_where = bool(network.host_maddrs or network.announce_maddrs)
    ask_router = ask_router and not says_where and network.public_ip is None
    if not network.initial_peers:
        found = Reachability("server-mode", "because it is the first peer: no other peer is there to test it")
        return _believed(found, network) if ask_router else (found, network)
    if says_where:
        reason = "because --host-maddrs or --announce-maddrs say so: it was not measured"
        return Reachability("server-mode", reason), network
    network.check()
    port = network.port or free_port()
    found = measure_reachability(network.initial_peers, port, network.identity_path, ask_router)
    network = replace(network, port=port, check_identity=False, opened=found.opened)
    if network.public_ip is not None and found.host != str(ipaddress.ip_address(network.public_ip)):
        # The asked peers dial only the address that they see, and that is not the one that a person gave.
        reason = f"because --public-ip {network.public_ip} says so: it was not measured"
        return Reachability("server-mode", reason), network
    if found.mode == "client-mode":
        return found, replace(network, client_mode=True, public_ip=None, port=0)
    if found.host is not None and found.host not in own_addresses():
        return found, replace(network, public_ip=found.host)
    if found.opened is not None and ipaddress.ip_address(found.opened.host).is_global:
        # Only peers of the same home were asked. Peers outside call the address that the router names.
        router = f"{found.router} Whether others can call it at {found.opened.host} was not measured."
        return replace(found, router=router), replace(network, public_ip=found.opened.host)
    return found, network


def _believed(found: Reachability, network: NetworkOptions) -> tuple[Reachability, NetworkOptions]:
    """Have the router open a port for the first peer, which no other peer can test.

    The port of a router without a public address does not help: that router is behind another one.
    """
    network.check()
    port = network.port or free_port()
    try:
        opened = asyncio.run(open_port(port))
    except RouterRefuses as why:
        return replace(found, router=f"Your router was asked to open a port, but {why}."), network
    if opened is None:
        return found, network
    if not ipaddress.ip_address(opened.host).is_global:
        opened.close()
        return replace(found, router="Your router has no public address, so a port of it does not help."), network
    said = (
        f"Your router says that it opened port {opened.ports[port]} of {opened.host} for this peer until it ends; "
        "no other peer is there to test it."
    )
    return replace(found, router=said), replace(network, port=port, public_ip=opened.host, opened=opened)
