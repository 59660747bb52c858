"""What a peer tells the others of its machine: short, and for people to read."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Collection, Sequence

import torch

from swarm.membership.run_manifest import PROTOCOL
from swarm.network.addresses import classify
from swarm.protocol.notes import FORWARDED, LOCAL, PUBLIC


def device_name(device: torch.device) -> str:
    """Of the one on which a process of this peer computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads != 1)}"


def together(devices: Sequence[str]) -> str:
    """Those of all processes of a peer, such as "4 × NVIDIA H100"."""
    times = Counter(devices)
    return " + ".join(f"{times[name]} × {name}" if len(devices) > 1 else name for name in times)


def software_version() -> str:
    """Of this program and its wire protocol."""
    try:
        version = importlib.metadata.version("swarm-vit")
    except importlib.metadata.PackageNotFoundError:  # it runs from a folder that was never installed
        version = "unknown"
    return f"{version}, protocol {PROTOCOL}"


def how_reached(addresses: Collection[str], own: Collection[str]) -> str:
    """How others call a peer, one of `REACHED`; empty for one that has no address.

    Args:
        addresses: at which it can be called, as multiaddresses
        own: IPv4 addresses of this machine's network interfaces
    """
    found = [(*address.split("/")[1:3], classify(address)) for address in addresses if "p2p-circuit" not in address]
    if any(kind == "public" and (family != "ip4" or host in own) for family, host, kind in found):
        return PUBLIC
    if any(kind != "loopback" and family == "ip4" and host not in own for family, host, kind in found):
        return FORWARDED  # a router has it, or a host outside of this container
    return LOCAL if found else ""
