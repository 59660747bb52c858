"""Draws the rooms of swarm/ and who imports whom into docs/pictures/import-graph.svg, and counts floors.

    python docs/make_import_graph.py            # draw, and print the floors
    python docs/make_import_graph.py --check    # exit with 1 if the picture is stale

The picture is plain SVG, so that the same code always makes the same file. Imports under `if TYPE_CHECKING` are for
type checkers alone and do not count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PICTURE = HERE / "pictures" / "import-graph.svg"

RECIPE = "recipe"
ROOMS = {
    "cli": "the commands for people",
    "desk": "the web page of a run: history, health, alerts",
    "peer": "one volunteer's process, from options to summary",
    "training": "one peer's step loop: accumulate, average, apply, catch up",
    "averaging": "forms a group and averages one vector",
    "membership": "which peers are in the run, how far, and alive",
    "enrolment": "makes invited volunteers members of a run",
    "state_sync": "hands the training state to joiners",
    "ledger": "what each member gave: signed lines, and their sums",
    "network": "this peer's DHT process: addresses, identity, reachability",
    "protocol": "messages, errors and reports of a round",
    "runtime": "processes, async helpers, log throttling",
    RECIPE: "what is trained: config, data, model, optimizer, run folder",
}
"""Each room of swarm/ with its one line, and the package that all of them build on."""

WIDTH, BOX_WIDTH, BOX_HEIGHT, FLOOR = 1144, 500, 60, 104
INK, QUIET, PAPER, FILL = "#1f2937", "#64748b", "#ffffff", "#e8eefc"


def modules(*packages: str) -> dict[str, Path]:
    """The modules of these packages by name."""
    found = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path) -> Iterator[tuple[str, ...]]:
    """What a module imports anywhere: names from the longest, such as ("a.b.c", "a.b")."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.module
        elif isinstance(node, ast.ImportFrom):
            raise ValueError(f"{path} has a relative import: write the whole name.")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.name,)
        pending += ast.iter_child_nodes(node)


def module_graph(*packages: str) -> dict[str, set[str]]:
    """Of each module of these packages, the modules of them that it imports."""
    known = modules(*packages)
    graph: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for names in imports_of(path):
            target = next((one for one in names if one in known), None)
            if target is not None and target != name:
                graph[name].add(target)
    return graph


def room_of(module: str) -> str | None:
    """The room of a module; None for those that stand in swarm/ itself."""
    parts = module.split(".")
    if parts[0] == RECIPE:
        return RECIPE
    return parts[1] if parts[0] == "swarm" and len(parts) > 1 and parts[1] in ROOMS else None


def room_graph() -> dict[str, dict[str, int]]:
    """Of each room, the rooms that it imports, and by how many of its modules."""
    importers: dict[str, dict[str, set[str]]] = {room: {} for room in ROOMS}
    for name, path in modules("swarm").items():
        room = room_of(name)
        if room is None:
            continue
        for names in imports_of(path):
            target = room_of(names[0])
            if target is not None and target != room:
                importers[room].setdefault(target, set()).add(name)
    return {room: {target: len(names) for target, names in found.items()} for room, found in importers.items()}


def floors(graph: Mapping[str, object]) -> dict[str, int]:
    """How high each room stands: above all that it imports, and right below the lowest room that imports it.

    Raises:
        graphlib.CycleError: rooms import each other.
    """
    order = TopologicalSorter({room: set(targets) for room, targets in graph.items()}).static_order()
    height: dict[str, int] = {}
    for room in order:
        height[room] = 1 + max((height[target] for target in graph[room]), default=0)
    for room in sorted(height, key=height.__getitem__, reverse=True):  # right below the lowest that imports it
        importers = [height[other] for other in graph if room in graph[other]]
        height[room] = min(importers, default=height[room] + 1) - 1
    return height


def reduced(graph: Mapping[str, Mapping[str, int]]) -> set[tuple[str, str]]:
    """The arrows that no longer way replaces."""
    below: dict[str, set[str]] = {}
    for room in sorted(graph, key=floors(graph).__getitem__):
        below[room] = set(graph[room]).union(*(below[target] for target in graph[room]))
    return {
        (room, target)
        for room, targets in graph.items()
        for target in targets
        if not any(target in below[other] for other in targets if other != target)
    }


def svg() -> str:
    """The picture."""
    graph = room_graph()
    height = floors(graph)
    top = max(height.values())
    places = _places(height, top)
    files = [name for name, path in modules("swarm").items() if path.name != "__init__.py"]
    sizes = {room: sum(room_of(name) == room for name in files) for room in ROOMS}
    total = 20 + top * FLOOR
    short = reduced(graph)
    arrows = sorted((a, b) for a, targets in graph.items() for b in targets)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" font-family="system-ui, sans-serif">',
        f"<title>The rooms of swarm/ on {top} floors, and which imports which</title>",
        f'<rect width="{WIDTH}" height="{total}" fill="{PAPER}"/>',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 10 5 0 10z" fill="{INK}"/></marker></defs>',
    ]
    for floor in range(1, top + 1):
        y = _y(floor, top) + BOX_HEIGHT / 2 + 5
        lines.append(f'<text x="20" y="{y:g}" font-size="15" fill="{QUIET}">floor {floor}</text>')
    lines += [_arrow(places[a], places[b]) for a, b in arrows if (a, b) in short]
    lines += [_box(room, places[room], sizes[room], graph[room], short) for room in ROOMS]
    lines.append(
        f'<text x="{WIDTH / 2:g}" y="{total - 14}" font-size="14" fill="{QUIET}" text-anchor="middle">'
        "An arrow means: imports. Further imports, which skip floors, are listed in the boxes.</text>"
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _places(height: Mapping[str, int], top: int) -> dict[str, tuple[float, float, float]]:
    """The upper left corner of each room's box, and its width: where many are on a floor, they are narrower."""
    places = {}
    for floor in range(1, top + 1):
        here = [room for room in ROOMS if height[room] == floor]
        step = min(BOX_WIDTH + 24, (WIDTH - 110 + 24) / max(1, len(here)))
        begin = 90 + (WIDTH - 110 - step * len(here) + 24) / 2
        for position, room in enumerate(here):
            places[room] = (begin + position * step, _y(floor, top), step - 24)
    return places


def _y(floor: int, top: int) -> float:
    return 16 + (top - floor) * FLOOR


def _box(room: str, place: tuple[float, float, float], size: int, targets: Mapping[str, int], short: set) -> str:
    x, y, width = place
    name = f"{room}/" if room == RECIPE else f"swarm/{room}/"
    far = sorted(target for target in targets if (room, target) not in short)
    count = "" if room == RECIPE else f"{size} modules"
    more = f"also {', '.join(far)}" if far else ""
    right = x + width - 14
    small = min(12.0, round((width - 28) / (0.54 * max(1, len(more))), 1))  # a letter is about half as wide as high
    return "\n".join(
        [
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX_HEIGHT}" rx="8" fill="{FILL}" stroke="{INK}"/>',
            f'<text x="{x + 14:g}" y="{y + 20:g}" font-size="16" font-weight="600" fill="{INK}">{name}</text>',
            f'<text x="{right:g}" y="{y + 20:g}" font-size="13" fill="{QUIET}" text-anchor="end">{count}</text>',
            f'<text x="{x + 14:g}" y="{y + 36:g}" font-size="13" fill="{INK}">{escape(ROOMS[room])}</text>',
            f'<text x="{x + 14:g}" y="{y + 51:g}" font-size="{small:g}" fill="{QUIET}">{more}</text>',
        ]
    )


def _arrow(above: tuple[float, float, float], below: tuple[float, float, float]) -> str:
    x1, x2 = above[0] + above[2] / 2, below[0] + below[2] / 2
    return (
        f'<path d="M{x1:g} {above[1] + BOX_HEIGHT:g} L{x2:g} {below[1] - 1:g}" fill="none" stroke="{INK}" '
        'stroke-width="1.6" marker-end="url(#head)"/>'
    )


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    picture = svg()
    if arguments == ["--check"]:
        is_stale = not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture
        if is_stale:
            print(f"{PICTURE.relative_to(ROOT)} is stale: run `make docs`.", file=sys.stderr)
        return int(is_stale)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture, encoding="utf-8")
    height = floors(room_graph())
    for floor in sorted(set(height.values()), reverse=True):
        print(f"{floor}  {', '.join(room for room in ROOMS if height[room] == floor)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
