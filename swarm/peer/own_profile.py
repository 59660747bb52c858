"""What a peer tells other peers about its machine: short texts for people to read."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Collection, Sequence

import torch

from swarm.membership.run_manifest import PROTOCOL
from swarm.network.addresses import classify
from swarm.protocol.notes import FORWARDED, LOCAL, PUBLIC


def device_name(device: torch.device) -> str:
    """Name of the device on which a process of this peer computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads != 1)}"


def together(devices: Sequence[str]) -> str:
    """One text for the devices of all processes of a peer, such as "4 × NVIDIA H100"."""
    times = Counter(devices)
    return " + ".join(f"{times[name]} × {name}" if len(devices) > 1 else name for name in times)


def software_version() -> str:
    """Version of this program and of its wire protocol."""
    try:
        version = importlib.metadata.version("swarm-vit")
    except importlib.metadata.PackageNotFoundError:  # it runs from a folder that was never installed
        version = "unknown"
    return f"{version}, protocol {PROTOCOL}"


def how_reached(addresses: Collection[str], own: Collection[str]) -> str:
    """How other peers call a peer, one of `REACHED`; empty if it has no address.

    Args:
        addresses: multiaddresses at which it can be called
        own: IPv4 addresses of this machine's network interfaces
    """
    found = [(*address.split("/")[1:3], classify(address)) for address in addresses if "p2p-circuit" not in address]
    if any(kind == "public" and (family != "ip4" or host in own) for family, host, kind in found):
        return PUBLIC
    if any(kind != "loopback" and family == "ip4" and host not in own for family, host, kind in found):
        return FORWARDED  # the address belongs to a router, or to the host of this container
    return LOCAL if found else ""
