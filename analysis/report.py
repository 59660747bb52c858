"""Writes what experiments found: `index.html` (self-contained), `report.md` and PNG figures."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import pandas as pd

from analysis import figures, published
from analysis.archive import Records, read
from analysis.endurance import SOAKS, memory_section, side_by_side, soak_section
from analysis.results import Experiment, experiments_in
from analysis.scaling import TRUST, home_table, predict, transfers
from analysis.systems import SYSTEMS
from analysis.tables import (
    AGREEMENT_PERCENT,
    agreement_table,
    communication_table,
    kept_table,
    quality_table,
    ratio_table,
    throughput_table,
)
from analysis.wan.check import GOODPUT_RTT_MS, LEAST_GOODPUT, LOSS_TOLERANCE, RTT_TOLERANCE_MS, Row
from analysis.words import answer, in_short, machine_drift, reproduction, results_table, time_to_accuracy
from recipe.run_folder import make_writable, write_json

_TEMPLATE = Path(__file__).parent / "report.jinja"


@dataclass
class Section:
    """A part of the report; `tables` and `figures` come with a title each."""

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[tuple[str, pd.DataFrame]] = field(default_factory=list)
    figures: list[tuple[str, Path]] = field(default_factory=list)


def write_report(sources: Sequence[Path], output: Path, earlier: Sequence[Path] = ()) -> Path:
    """The report about experiments; returns the HTML page.

    Args:
        sources: folders of experiments, or files that earlier reports kept of them; of one experiment there may be
            several, the last of which counts where both have a cell.
        output: where the report goes, and a `NAME.jsonl` of each experiment.
        earlier: runs of the same experiments that have to agree with these.

    Raises:
        InputError: one of them holds no finished cells, or the output cannot be written.
    """
    found, before = _by_name(sources), _by_name(earlier)
    make_writable(output)
    for name, records in found.items():
        records.write(output / f"{name}.jsonl")
    experiments = [experiment for records in found.values() for experiment in experiments_in(records)]
    sections, models = [short_section(experiments)], []
    for experiment in experiments:
        sections.append(experiment_section(experiment, output))
        if experiment.asked in before:
            sections.append(agreement_section(experiment, Experiment(before[experiment.asked])))
        models += model_sections(experiment, output, [other for other in experiments if other is not experiment])
    sections += models
    soaks = {whom: _beside(sources, name) for name, whom in SOAKS.items()}
    for whom, soak in soaks.items():
        if soak is not None:
            sections.append(Section(f"A night in minutes: what faults cost {whom}", **soak_section(soak, output)))
    if None not in soaks.values():
        sections.append(Section("The same night, side by side", **side_by_side([*soaks.values()])))
    if (memory := _beside(sources, "memory.json")) is not None:
        sections.append(Section("Does a peer's memory grow?", **memory_section(memory, output)))
    sections += [published_section(), machine_section([Experiment(records) for records in found.values()])]
    if (check := _beside(sources, "check.json")) is not None:
        sections.append(lab_section(check, output))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"inline": _inline, "html_table": _html_table}
    template = environment.from_string(_TEMPLATE.read_text())
    page = output / "index.html"
    page.write_text(template.render(sections=sections, title="What decentralised training costs"))
    (output / "report.md").write_text(_markdown(sections))
    return page


def _beside(sources: Sequence[Path], name: str) -> Path | None:
    """Something else that was measured and lies beside the experiments."""
    return next((file for file in (source.parent / name for source in sources) if file.exists()), None)


def _by_name(sources: Sequence[Path]) -> dict[str, Records]:
    found: dict[str, Records] = {}
    for records in map(read, sources):
        found.setdefault(records.grid["name"], records).update(records)
    return found


def short_section(experiments: Sequence[Experiment]) -> Section:
    """The answer before everything else, in a paragraph and a table."""
    section = Section("In short", list(filter(None, [in_short(experiment) for experiment in experiments[:1]])))
    section.text.append(
        "Samples per second of a swarm over those of DDP with the same samples per update: the means over the "
        "repetitions, from the least to the greatest setting of what was varied. Shown: the 95 % interval of the ratio "
        "leaves 1 out, which takes three repetitions. All ran on one machine, in an emulated network (last sections)."
    )
    if not (table := results_table(experiments)).empty:
        section.tables.append(("Times as fast as DDP", table))
    return section


def machine_section(experiments: Sequence[Experiment]) -> Section:
    """Where the cells ran, and when, with which commit."""
    known = [experiment for experiment in experiments if experiment.machine is not None]
    if not known:
        return Section("Machine", ["The first cell has no environment.json."])
    experiment, machine, backend = known[0], known[0].machine, backend_of(known)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    backend = "the kernel's netem" if backend == "netem" else "a router in user space"
    cores = experiment.grid.get("cores") or machine["cores"]  # a host may have seen only its own
    text = [
        f"{cores} cores of {machine['cpu']}, {machine['memory_gib']:g} GiB, {machine['os']}; {versions}.",
        *(f"{e.name}: begun {e.machine['started_at']}, commit {', '.join(commits(e))}." for e in known),
        f"All peers shared this machine. The network between them was emulated by {backend}; what it keeps to is "
        "measured by: python -m analysis.wan check",
    ]
    if (algorithm := experiment.grid.get("congestion_control")) is not None:
        text.append(f"TCP's congestion control was the kernel's {algorithm}.")
    return Section("Machine", text)


def backend_of(experiments: Sequence[Experiment]) -> str:
    """Of the first cell that says so."""
    said = (cell.get("backend") for experiment in experiments for _, cell in experiment.cells.iterrows())
    return next((backend for backend in said if isinstance(backend, str)), "router")


def commits(experiment: Experiment) -> list[str]:
    """That its cells ran with."""
    return experiment.machine.get("commits") or [experiment.machine["git_commit"]]


def lab_section(file: Path, output: Path) -> Section:
    """What `python -m analysis.wan check --output` measured, if it lies beside the experiments; the report keeps it."""
    found = json.loads(file.read_text())
    write_json(output / file.name, found)
    rows = pd.DataFrame(found["rows"]).dropna(axis="columns", how="all").round(4)
    rows["out of bounds"] = [", ".join(Row(**row).problems) or "nothing" for row in found["rows"]]
    text = [
        f"Backend {found['backend']}; how it was measured: python -m analysis.wan check --output {file.name}",
        f"Bounds: the median round trip within {RTT_TOLERANCE_MS:g} ms (and three standard errors, where it jitters), "
        f"TCP's goodput {LEAST_GOODPUT:.0%} of the rate or more (beyond {GOODPUT_RTT_MS} ms not at the highest), loss "
        f"within {LOSS_TOLERANCE:.0%} of its value.",
    ]
    return Section("The lab, set against measured", text, [("", rows)])


def experiment_section(experiment: Experiment, output: Path) -> Section:
    """Answer, throughput, parts of an update, bytes, quality, and what was left out."""
    section = Section(experiment.grid["question"] or experiment.name)
    section.text += filter(None, (time_to_accuracy(experiment), answer(experiment)))
    if paced := [rate for rate in experiment.cells["paced_samples_per_second"].unique() if rate and rate == rate]:
        rates = ", ".join(f"{rate:g}" for rate in paced)
        computed = "true gradients of all samples, then sleep"
        if experiment.computes_few_samples:
            computed = "true gradients of few samples, then sleep: speeds and traffic mean something, accuracies do not"
        section.text.append(
            f"PACED: each peer pretended to compute {rates} samples/s ({computed}). How long a backward pass takes is "
            "estimated: who does little else, such as a plain script, may be up to 5 % faster than the device."
        )
    if (drift := machine_drift(experiment)) is not None:
        section.text.append(drift)
    if any(SYSTEMS[system].local_steps > 1 for system in experiment.systems):
        section.text.append("Limits are those of an average per update; several local steps make it a rarer one.")
    section.text.append(reproduction(experiment))
    if not experiment.valid.empty:
        mark = ", paced" if paced else ""
        section.tables.append((f"Samples per second, valid cells alone{mark}", throughput_table(experiment)))
        section.figures = [
            (f"Samples per second (each run; mean, 95 % interval{mark})", figures.throughput(experiment, output)),
            (f"Where the time goes{mark}", figures.parts(experiment, output)),
        ]
        if (against := ratio_table(experiment)) is not None:
            title = "Times as fast as (ratios within a repetition: mean, 95 % interval, n)"
            section.tables.append((title, against))
        if (shares := kept_table(experiment)) is not None:
            title = "What is left of the speed at the shortest round trip (within a repetition: mean, 95 % interval, n)"
            section.tables.append((title, shares))
        section.tables.append(("Cost of communication", communication_table(experiment)))
    if "seconds_to_accuracy" in experiment.valid and experiment.valid["seconds_to_accuracy"].notna().any():
        section.figures.append(("Time to accuracy", figures.time_to_accuracy(experiment, output)))
    if (quality := quality_table(experiment)) is not None:
        section.tables.append(("Quality at the end", quality))
    if "earlier_problems" in experiment.cells:
        again = experiment.cells.dropna(subset=["earlier_problems"])
        rows = [{"cell": row["name"], "why": "; ".join(row["earlier_problems"])} for _, row in again.iterrows()]
        section.tables.append(("Were invalid and ran again", pd.DataFrame(rows)))
    if len(invalid := experiment.cells[experiment.cells["problems"].map(len) > 0]):
        rows = [{"cell": row["name"], "why": "; ".join(row["problems"])} for _, row in invalid.iterrows()]
        section.tables.append((f"Left out: {len(rows)} of {len(experiment.cells)} cells", pd.DataFrame(rows)))
    return section


def agreement_section(experiment: Experiment, earlier: Experiment) -> Section:
    """Whether an experiment can be repeated."""
    section = Section(f"{experiment.name}, run twice")
    if earlier.machine is not None:
        section.text.append(
            f"The earlier run began at {earlier.machine['started_at']} with commit {', '.join(commits(earlier))}; "
            f"rows of which both have at least two valid cells. They agree where the interval of the difference lies "
            f"within {AGREEMENT_PERCENT:g} %, and differ where it leaves zero out."
        )
    section.tables.append(("Samples per second of both", agreement_table(experiment, earlier)))
    return section


def model_sections(experiment: Experiment, output: Path, others: Sequence[Experiment] = ()) -> list[Section]:
    """Predicted against measured for each swarm with matchmaking times, here and elsewhere, and 1 to 1,000 peers."""
    sections = []
    for system in experiment.systems:
        found = experiment.valid[experiment.valid["system"] == system]
        if found.empty or found["meeting_seconds"].isna().all() or not (prediction := predict(experiment, system)):
            continue
        label = SYSTEMS[system].label
        section = Section(f"A model of {label}, fitted on {experiment.name}")
        section.text.append(
            f"Each of the {len(prediction.table)} settings was predicted by the model as fitted on the others: the "
            f"worst error is {prediction.worst_error:.1%} (asked for: {TRUST:.0%}). The mean of the others, as a "
            f"prediction, is wrong by up to {prediction.worst_of_mean:.1%}. "
            f"Costs in seconds: {', '.join(f'{name} {value:.2f}' for name, value in vars(prediction.costs).items())}."
        )
        name = f"{experiment.name}-{system}"
        file = figures.predictions(prediction.table, output / f"{name}-model.png")
        section.figures.append(("Predicted against measured", file))
        section.tables.append(("Predicted against measured, samples per second", prediction.table.round(3)))
        if experiment.axis == "rtt_ms" and not (elsewhere := transfers(prediction, others)).empty:
            section.tables.append(("In other experiments, of which the fit has seen nothing", elsewhere.round(3)))
            section.text.append(
                "For other experiments the cost `other` is taken over as it is. It belongs to this model and this "
                "pace: a smaller model, whose updates are shorter, costs less, and is predicted too slow."
            )
        if prediction.is_trusted:
            home = home_table(prediction)
            file = figures.scaling(home, int(found["peers"].max()), output / f"{name}-home.png")
            section.figures.append(("1 to 1,000 volunteers at home", file))
            section.text.append(
                f"Extrapolation: nothing beyond {int(found['peers'].max())} peers was measured. The figure takes 60 ms "
                "between homes, 10 Mbit/s up and 40 down, speeds that differ by 30 %, and an hour's stay on average; "
                "matchmaking is assumed to cost the same at any size, which large groups are likely to exceed. Nobody "
                "computes less than a micro-batch: from some number of peers on, updates have more samples than asked "
                "for."
            )
        else:
            section.text.append(
                "It errs by more than that, or no less than a constant does: it says nothing about more peers."
            )
        sections.append(section)
    return sections


def published_section() -> Section:
    """What others found."""
    return Section(
        "Published figures, on other hardware",
        tables=[("", pd.DataFrame([vars(figure) for figure in published.FIGURES]))],
    )


def _inline(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


def _html_table(table: pd.DataFrame) -> str:
    return table.to_html(index=False, na_rep="–", border=0)


def _markdown(sections: Sequence[Section]) -> str:
    lines = ["# What decentralised training costs", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        lines += [line for text in section.text for line in (text, "")]
        for title, file in section.figures:
            lines += [f"![{title}]({file.name})", ""]
        for title, table in section.tables:
            lines += [*([f"**{title}**", ""] if title else []), *_markdown_table(table), ""]
    return "\n".join(lines)


def _markdown_table(table: pd.DataFrame) -> list[str]:
    rows = [list(map(str, table.columns)), ["---"] * len(table.columns)]
    rows += [["–" if cell is None or cell != cell else str(cell) for cell in row] for row in table.to_numpy(object)]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
