"""Describes an emulated network: hosts with access links, and paths between regions."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path as File
from typing import Any

from recipe.errors import InputError

SHIPPED = File(__file__).parent / "topologies"
MAX_HOSTS = 250
"""Most hosts of a topology: all are in one /24 network."""


@dataclass(frozen=True)
class Host:
    """A machine and its access link. Rates count IP packets, headers included; None is unlimited."""

    name: str
    region: str = "here"
    up_mbps: float | None = None
    """Rate towards the internet, in Mbit/s."""
    down_mbps: float | None = None
    """Rate from the internet, in Mbit/s."""
    queue_ms: float = 100.0
    """Longest wait in each of the link's two queues; packets that would wait longer are dropped."""

    def __post_init__(self) -> None:
        for name in ("up_mbps", "down_mbps"):
            _check_range(f"{name} of host {self.name}", getattr(self, name), 0.01, 100_000)
        _check_range(f"queue_ms of host {self.name}", self.queue_ms, 1, 10_000)

    @property
    def number(self) -> int:
        """Number of the host: 1 for h1."""
        return int(self.name[1:])

    @property
    def address(self) -> str:
        """IPv4 address inside the lab."""
        return f"10.77.0.{self.number}"

    @property
    def mac(self) -> str:
        """MAC address; its last byte tells the router the receiving host of a packet."""
        return f"02:00:00:00:00:{self.number:02x}"


@dataclass(frozen=True)
class Path:
    """One direction of the path between two regions."""

    delay_ms: float = 0.0
    """One-way delay: half a round-trip time where both directions are alike."""
    jitter_ms: float = 0.0
    """Standard deviation of the delay, normally distributed and never below zero; packets stay in order."""
    loss: float = 0.0
    """Probability that an IP packet is lost, independently of others."""
    bandwidth_mbps: float | None = None
    """Rate of each host pair on this path; None is unlimited."""

    def __post_init__(self) -> None:
        _check_range("delay_ms of a path", self.delay_ms, 0, 10_000)
        _check_range("jitter_ms of a path", self.jitter_ms, 0, 1_000)
        _check_range("loss of a path", self.loss, 0, 0.5)
        _check_range("bandwidth_mbps of a path", self.bandwidth_mbps, 0.01, 100_000)


@dataclass(frozen=True)
class Topology:
    """Hosts h1, h2, … and the paths between their regions; a pair of regions without a path has no delay."""

    hosts: tuple[Host, ...]
    paths: dict[tuple[str, str], Path] = field(default_factory=dict)
    """Path by (from region, to region); (A, A) is between hosts of the same region."""
    name: str = "uniform"

    def __post_init__(self) -> None:
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            raise InputError(f"The topology has {len(self.hosts)} hosts: give 1 to {MAX_HOSTS}.")

    def path(self, source: Host, target: Host) -> Path:
        """The path from one host to another."""
        return self.paths.get((source.region, target.region), Path())

    def with_hosts(self, count: int) -> Topology:
        """The topology with `count` hosts: the first ones of these, or these repeated."""
        if count < 1:
            raise InputError(f"{count} hosts make no network: give at least 1.")
        hosts = (replace(self.hosts[i % len(self.hosts)], name=f"h{i + 1}") for i in range(count))
        return replace(self, hosts=tuple(hosts))

    def to_json(self) -> str:
        """The topology as JSON, which `from_json` reads."""
        paths = [{"from": source, "to": target, **asdict(path)} for (source, target), path in self.paths.items()]
        return json.dumps({"name": self.name, "hosts": [asdict(host) for host in self.hosts], "paths": paths})

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Reads what `to_json` wrote."""
        data = json.loads(text)
        paths = {(path.pop("from"), path.pop("to")): Path(**path) for path in data["paths"]}
        return cls(tuple(Host(**host) for host in data["hosts"]), paths, data["name"])


def uniform(
    hosts: int,
    rtt_ms: float = 0.0,
    bandwidth_mbps: float | None = None,
    *,
    jitter_ms: float = 0.0,
    loss: float = 0.0,
    queue_ms: float = 100.0,
) -> Topology:
    """Equal hosts with symmetric links at equal distances.

    Args:
        hosts: number of hosts.
        rtt_ms: round-trip time between any two hosts.
        bandwidth_mbps: rate of each uplink and downlink; None for unlimited.
        jitter_ms: standard deviation of the one-way delay.
        loss: probability per IP packet and direction.
        queue_ms: longest wait in a link's queue.

    Raises:
        InputError: a value is out of range.
    """
    host = Host("h1", up_mbps=bandwidth_mbps, down_mbps=bandwidth_mbps, queue_ms=queue_ms)
    path = Path(rtt_ms / 2, jitter_ms, loss)
    return Topology((host,), {(host.region, host.region): path}).with_hosts(hosts)


def shipped_names() -> list[str]:
    """Names of the topologies that come with the lab."""
    return sorted(file.stem for file in SHIPPED.glob("*.toml"))


def load(name: str) -> Topology:
    """A shipped topology by its name, or a TOML file by its path; `topologies/home.toml` explains the format.

    Raises:
        InputError: the topology does not exist, or cannot work.
    """
    file = File(name) if name.endswith(".toml") else SHIPPED / f"{name}.toml"
    if not file.exists():
        raise InputError(f"There is no topology {name}: give {', '.join(shipped_names())} or a .toml file.")
    try:
        data = tomllib.loads(file.read_text())
        return _parse(data, file.stem)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file} is no TOML ({error}): see {SHIPPED / 'home.toml'}.") from None
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{file} is not understood ({error}): see {SHIPPED / 'home.toml'}.") from None


def _parse(data: dict[str, Any], name: str) -> Topology:
    _check_keys("the file", data, ("hosts", "paths"))
    paths: dict[tuple[str, str], Path] = {}
    for entry in data.get("paths", []):
        paths |= _parse_path(dict(entry))
    hosts = []
    for entry in data.get("hosts", []):
        entry = dict(entry)
        count = entry.pop("count", 1)
        _check_keys("a host", entry, [item.name for item in fields(Host) if item.name != "name"])
        hosts += [Host(f"h{len(hosts) + i + 1}", **entry) for i in range(count)]
    known = {host.region for host in hosts}
    if unknown := {region for pair in paths for region in pair} - known:
        raise InputError(f"no host is in region {min(unknown)}: add one under [[hosts]], or leave the path out.")
    return Topology(tuple(hosts), paths, name)


def _parse_path(entry: dict[str, Any]) -> dict[tuple[str, str], Path]:
    """Paths of one entry: `between` and `rtt_ms` give both directions, `from`, `to` and `delay_ms` one."""
    between = entry.pop("between", None)
    one_way = (entry.pop("from", None), entry.pop("to", None))
    if (between is None) == (None in one_way):
        raise InputError('a path needs between = ["A", "B"] for both directions, or from = "A" and to = "B".')
    if between is not None and (not isinstance(between, list) or len(between) != 2):
        raise InputError(f'a path has between = {between!r}: give two regions, such as ["A", "B"].')
    if "rtt_ms" in entry:
        entry["delay_ms"] = entry.pop("rtt_ms") / 2
    _check_keys("a path", entry, [item.name for item in fields(Path)])
    pairs = [one_way] if between is None else [tuple(between), tuple(reversed(between))]
    return {pair: Path(**entry) for pair in pairs}


def _check_keys(what: str, entry: dict[str, Any], known: Iterable[str]) -> None:
    if unknown := set(entry) - set(known):
        raise InputError(f"{what} has an unknown entry {min(unknown)}: known are {', '.join(known)}.")


def _check_range(what: str, value: Any, low: float, high: float) -> None:
    if value is None and low > 0:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InputError(f"The {what} is {value!r}: give a number from {low:g} to {high:g}.")
