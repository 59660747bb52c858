"""Prints what `analysis.campaigns.home` finds."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(name: str, found: dict[str, Any], console: Console) -> None:
    """Prints the result of `home_numbers`: a table of the updates, and sentences."""
    table = Table(title=name, title_justify="left")
    for column in ("update", "members (missed it)", "alone", "seconds", "computing", "sending", "over the greater"):
        table.add_column(column, justify="left" if column in ("members (missed it)", "alone") else "right")
    for update in found["updates"]:
        missed = update["missed"]
        groups = " | ".join(
            " ".join(f"({name})" if name in missed else name for name in group) for group in update["groups"]
        )
        limits = update["limits"] or {}
        numbers = (update["seconds"], limits.get("computing"), limits.get("sending"))
        shown = [_shown(number, ".1f") for number in numbers]
        ratio = _shown(update["over_limit"], ".2f")
        table.add_row(str(update["step"]), groups, " ".join(update["alone"]), *shown, ratio)
    console.print(table)
    for line in lines_about(found):
        console.print(line, markup=False, highlight=False)


def lines_about(found: dict[str, Any]) -> list[str]:
    """Sentences about what the table of updates does not show."""
    start, late = found["start"], found["late"]
    lines = [
        f"{found['whole_updates']} of {len(found['updates'])} updates were made by all peers that were there from the "
        f"start, together; an update took {_shown(found['median_over_limit'], '.2f')} (median) and "
        f"{_shown(found['worst_over_limit'], '.2f')} (worst) times the greater of computing and sending.",
        f"First round with all of them: update {_shown(start['first_whole_step'], 'd')}, begun "
        f"{_shown(start['first_whole_round_begins_after'], '.1f')} s after the last one had begun to train.",
    ]
    for name, parts in start["parts"].items():
        lines.append(f"Start of {name}: {_parts(parts)}.")
    lines.append(f"Failed rounds: {len(found['failed'])}.")
    lines += [f"    {item['host']}, update {item['step']}: {item['reason']}" for item in found["failed"]]
    if late is not None and "problem" in late:
        lines.append(f"The late host: {late['problem']}.")
    elif late is not None:
        before, meanwhile = late["others_before"], late["others_meanwhile"]
        lines += [
            f"The late host: in its first round {_shown(late['first_round_begins_after'], '.1f')} s after its command, "
            f"update {_shown(late['first_step'], 'd')}; its state of {late['state_megabytes']:.0f} MB takes "
            f"{late['line_seconds']:.1f} s on the free line: from asking for it to taking part "
            f"{_shown(late['joining_over_line'], '.2f')} times that.",
            f"Rounds of the others: before {_shown(before['median'], '.1f')} s (median) and "
            f"{_shown(before['worst'], '.1f')} s (worst), meanwhile {_shown(meanwhile['median'], '.1f')} s and "
            f"{_shown(meanwhile['worst'], '.1f')} s: {_shown(meanwhile['worst_over_usual'], '.2f')} times the median.",
        ]
    lines.append(f"Memory of all peers and the router: at most {_shown(found['memory_gib'], '.1f')} GiB.")
    return lines


def _parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items()) or "it never trained"


def _shown(number: float | None, spec: str) -> str:
    return "–" if number is None else format(number, spec)
