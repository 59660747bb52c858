"""Defines experiments: a cell is one run of one system in one network, and a grid crosses settings into cells."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from analysis.wan.lab import TOPOLOGY
from analysis.wan.topology import Topology, load, uniform
from recipe.config import Recipe
from recipe.errors import InputError
from recipe.presets import preset

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
TYPES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a table",
    type(None): '"none"',
}
"""Names of the types in messages about a grid's file."""


@dataclass(frozen=True)
class Cell:
    """The settings of one run: a system, a recipe, a number of peers and a network."""

    system: str
    """Name of a system: a key of `analysis.campaigns.systems.SYSTEMS`."""
    peers: int = 2
    """Hosts, each with one training process."""
    rtt_ms: float = 0.0
    """Round-trip time between any two hosts."""
    bandwidth_mbps: float | None = 100.0
    """Rate of each host's uplink and downlink, in Mbit/s; None is unlimited."""
    jitter_ms: float = 0.0
    """Standard deviation of the one-way delay."""
    loss: float = 0.0
    """Probability that a packet is lost."""
    congestion_control: str | None = None
    """TCP's algorithm on all hosts, such as cubic; None for the machine's default, which `grid.json` names."""
    topology: str | None = None
    """Name or file of a topology, in place of delay, bandwidth, jitter and loss above."""
    recipe: str = "synthetic"
    """Name of a preset."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of the recipe that differ from the preset."""
    batch_size: int = 16
    """Micro-batch of each process, in samples."""
    steps: int = 8
    """Global updates."""
    warm_up_steps: int = 2
    """Updates at the beginning that are not measured."""
    paced_samples_per_second: float | None = None
    """Speed of each host's pretended device; None for true computing."""
    paced_all_samples: bool = False
    """Whether a pretended device computes the gradients of all samples, as accuracies need; else of a few."""
    last_times_slower: float = 1.0
    """Factor by which the last host's pretended device is slower."""
    kill_at_step: int | None = None
    """Update after which the last host is killed (swarms only)."""
    last_joins_at_step: int | None = None
    """Update of the first peer after which the last host is started (swarms only)."""
    target_accuracy: float | None = None
    """Validation accuracy to which the time is measured; the run goes on to its last step."""
    time_limit_seconds: float = 900.0
    """Longest time of the run; then it is ended, and its cell is invalid."""
    repetition: int = 1
    """Number of the repetition, from 1."""

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(type(self)).items():
            _check_type(name, getattr(self, name), annotation)
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise InputError(f"target_accuracy is {self.target_accuracy}: give a fraction up to 1, such as 0.95.")
        if self.time_limit_seconds <= 0:
            raise InputError("time_limit_seconds has to be more than 0.")
        if self.peers < 1 or self.batch_size < 1 or self.repetition < 1:
            raise InputError("peers, batch_size and repetition of a cell have to be at least 1.")
        if not 0 <= self.warm_up_steps < self.steps:
            raise InputError(f"{self.warm_up_steps} warm-up steps leave nothing of {self.steps} steps to measure.")
        if self.kill_at_step is not None and self.last_joins_at_step is not None:
            raise InputError("kill_at_step and last_joins_at_step are about the same host: give one of them.")
        if self.paced_samples_per_second is not None and self.paced_samples_per_second <= 0:
            raise InputError("paced_samples_per_second has to be more than 0.")
        if self.last_times_slower < 1 or (self.last_times_slower > 1 and self.paced_samples_per_second is None):
            raise InputError("last_times_slower is at least 1, and more only where paced_samples_per_second is given.")
        if self.kill_at_step is not None and (not 1 <= self.kill_at_step < self.steps or self.peers < 2):
            raise InputError(
                f"kill_at_step is at least 1, less than the {self.steps} steps of the cell, and needs at least 2 peers."
            )
        if self.last_joins_at_step is not None and (self.last_joins_at_step < 1 or self.peers < 2):
            raise InputError("last_joins_at_step is at least 1, and needs at least 2 peers.")
        if self.last_joins_at_step is not None and self.last_joins_at_step >= self.steps:
            raise InputError(f"last_joins_at_step has to be less than the {self.steps} steps of the cell.")
        self.full_recipe()
        if self.topology is None:  # a topology's file may be gone by now: see `network_of`
            self.network()

    def full_recipe(self) -> Recipe:
        """The preset with its changes.

        Raises:
            InputError: the result is not a valid recipe.
        """
        base = preset(self.recipe)
        if unknown := set(self.changes) - {item.name for item in fields(Recipe)}:
            raise InputError(
                f"A cell has no setting {min(unknown)}: see analysis/campaigns/cells.py and --help of swarm.peer."
            )
        return replace(base, **self.changes)

    def network(self) -> Topology:
        """The lab's topology.

        Raises:
            InputError: the topology cannot work.
        """
        if self.topology is not None:
            return load(self.topology).with_hosts(self.peers)
        return uniform(self.peers, self.rtt_ms, self.bandwidth_mbps, jitter_ms=self.jitter_ms, loss=self.loss)

    @property
    def peers_at_start(self) -> int:
        """Number of peers that wait for each other before the first update: all but one that joins later."""
        return self.peers - (self.last_joins_at_step is not None)

    @property
    def least_peers(self) -> int:
        """Fewest peers of a valid update: all, except one that is killed or joins later."""
        return self.peers - (self.kill_at_step is not None or self.last_joins_at_step is not None)

    @property
    def paced_rates(self) -> list[float] | None:
        """Samples per second of each host's pretended device; None where compute is true."""
        if self.paced_samples_per_second is None:
            return None
        last = self.paced_samples_per_second / self.last_times_slower
        return [self.paced_samples_per_second] * (self.peers - 1) + [last]

    @property
    def fingerprint(self) -> str:
        """A short hash of the settings: equal for cells that differ in nothing but the repetition."""
        values = asdict(self) | {"repetition": 0, "recipe_fingerprint": self.full_recipe().fingerprint}
        if not self.paced_all_samples:  # added later: cells that do not use it keep their names
            del values["paced_all_samples"]
        for name in ("last_joins_at_step", "congestion_control"):  # added later as well
            if values[name] is None:
                del values[name]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """Name of the cell's folder."""
        network = self.topology or f"{self.rtt_ms:g}ms-{self.bandwidth_mbps or 'inf'}mbps"
        network = Path(network).stem if self.topology else network
        return f"{self.system}-{self.peers}p-{network}-{self.fingerprint}-r{self.repetition}"

    def to_json(self) -> str:
        """The cell as JSON, which `from_json` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Cell:
        """Reads what `to_json` wrote.

        Raises:
            InputError: the text is no cell of this version.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise InputError(f"a cell of another version ({error}): run its experiment again.") from None


def _check_type(name: str, value: Any, annotation: Any) -> None:
    """Raises InputError if the value has another type. A whole number also counts as a number, but true does not."""
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    types = [get_origin(member) or member for member in members]
    if type(value) not in types and not (type(value) is int and float in types):
        raise InputError(f"{name} is {value!r}: give {' or '.join(TYPES[kind] for kind in types)}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} is {value}: give a finite number.")


def network_of(cell: Cell, folder: Path) -> Topology:
    """The topology of a cell; if it ran in this folder before, the one that it had then.

    A topology's file may have changed since, or be gone.

    Raises:
        InputError: the cell has no topology that can work.
    """
    try:
        return Topology.from_json((folder / TOPOLOGY).read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return cell.network()


@dataclass(frozen=True)
class Grid:
    """An experiment: a question, and the settings that are crossed to answer it."""

    name: str
    question: str
    common: dict[str, Any]
    """Settings of every cell."""
    axes: dict[str, list[Any]]
    """Settings that vary, each with its values."""

    def cells(self, repeat: int = 1, **changes: Any) -> Iterator[Cell]:
        """All cells, repetition by repetition, so that slow changes of the machine affect all settings alike.

        The last axis, in most experiments the systems, runs forwards and backwards in turn. The direction changes from
        repetition to repetition, and along each other axis, such as the seeds. So a steady drift favours neither of two
        systems, if the number of repetitions is even, or the number of seeds where seeds are the repetitions.
        """
        if not self.axes:
            for repetition in range(1, repeat + 1):
                yield _cell(self.common | changes | {"repetition": repetition})
            return
        *outer, last = self.axes
        for repetition, *places in itertools.product(range(repeat), *(range(len(self.axes[name])) for name in outer)):
            settings = self.common | {name: self.axes[name][at] for name, at in zip(outer, places, strict=True)}
            is_backwards = (repetition + sum(places)) % 2 == 1
            for value in self.axes[last][:: -1 if is_backwards else 1]:
                yield _cell(settings | {last: value} | changes | {"repetition": repetition + 1})


def _cell(settings: dict[str, Any]) -> Cell:
    """A cell from one flat table; names that are no settings of a cell are fields of the recipe."""
    own = {item.name for item in fields(Cell)}
    settings = {name: None if value == "none" else value for name, value in settings.items()}
    changes = settings.get("changes", {})
    if isinstance(changes, dict):  # the cell refuses another type
        changes = changes | {name: value for name, value in settings.items() if name not in own}
    cell = Cell(**{name: value for name, value in settings.items() if name in own} | {"changes": changes})
    cell.network()
    return cell


def shipped_grids() -> dict[str, Path]:
    """The experiments that come with the project, by name."""
    return {file.stem: file for file in sorted(EXPERIMENTS.rglob("*.toml"), key=lambda file: file.stem)}


def load_grid(name: str) -> Grid:
    """A shipped experiment by its name, or a TOML file by its path.

    `experiments/distance/delay.toml` explains the format.

    Raises:
        InputError: the experiment does not exist, or one of its cells cannot work.
    """
    file = Path(name) if name.endswith(".toml") else shipped_grids().get(name, EXPERIMENTS / f"{name}.toml")
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"There is no experiment {name}: give {', '.join(shipped_grids())} or a .toml file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is no TOML ({error}): see {shipped_grids()['delay']}.") from None
    if unknown := set(data) - {"question", "cell", "grid"}:
        raise InputError(f"{file} has an unknown entry {min(unknown)}: known are question, [cell] and [grid].")
    for name in ("cell", "grid"):
        if not isinstance(data.get(name, {}), dict):
            raise InputError(f"{file}: {name} is no table: write [{name}], and settings below it.")
    if not isinstance(data.get("question", ""), str):
        raise InputError(f"{file}: question is no text: put it in quotes.")
    if empty := [name for name, values in data.get("grid", {}).items() if values == []]:
        raise InputError(f"{file}: {empty[0]} has no values, so there is no cell: give some, or leave it out.")
    axes = {name: values if isinstance(values, list) else [values] for name, values in data.get("grid", {}).items()}
    grid = Grid(file.stem, data.get("question", ""), data.get("cell", {}), axes)
    try:
        list(grid.cells())
    except (InputError, TypeError) as error:
        raise InputError(f"{file}: {error}") from None
    return grid
