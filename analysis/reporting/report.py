"""Writes the report on experiments: `index.html` (self-contained), `report.md` and PNG figures."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import jinja2
import pandas as pd

from analysis.campaigns.measure import failed_by_itself
from analysis.campaigns.systems import SYSTEMS
from analysis.endurance import footprint
from analysis.reporting import captions, figures
from analysis.reporting.archive import Records, read
from analysis.reporting.fault_sections import (
    SOAKS,
    exactness_section,
    footprint_section,
    memory_section,
    side_by_side,
    soak_section,
)
from analysis.reporting.opening import details_section, opening_section
from analysis.reporting.provenance import CHECKS, commits, lab_section, machine_section, published_section
from analysis.reporting.results import Experiment, experiments_in, same_cells, validated_over_trained
from analysis.reporting.scaling import TRUST, Prediction, predict, transfers
from analysis.reporting.section import Section
from analysis.reporting.tables import (
    AGREEMENT_PERCENT,
    COMMON,
    agreement_table,
    communication_table,
    compares_ratios,
    equivalence_table,
    kept_table,
    quality_table,
    ratio_table,
    survivors_table,
    throughput_table,
)
from analysis.reporting.words import (
    answer,
    beside_the_clock,
    lost_overlap,
    lost_warm_up,
    machine_drift,
    order_of_runs,
    paced_rates,
    reproduction,
    time_to_accuracy,
)
from recipe.run_folder import make_writable

_TEMPLATE = Path(__file__).parent / "report.jinja"
LINKS = (
    "How experiments are run: [analysis/README.md](../README.md). How a round works: "
    "[docs/explanation/round.md](../../docs/explanation/round.md). How to choose what a swarm averages: "
    "[docs/howto/choose-averaging.md](../../docs/howto/choose-averaging.md)."
)


def write_report(sources: Sequence[Path], output: Path, earlier: Sequence[Path] = ()) -> Path:
    """Writes the report on experiments; returns the path of the HTML page.

    Args:
        sources: folders of experiments, or files that earlier reports kept of them. There may be several of one
            experiment; where two have the same cell, the later one counts.
        output: folder for the report, and for a `NAME.jsonl` of each experiment.
        earlier: other runs of the same experiments, which are compared with these.

    Raises:
        InputError: a source holds no finished cells, or the output cannot be written.
    """
    found, before = _by_name(sources), _by_name(earlier)
    make_writable(output)
    found = {name: found[name] for name in sorted(found)}  # independent of the order of `sources`
    for name, records in found.items():
        records.write(output / f"{name}.jsonl")
    experiments = [experiment for records in found.values() for experiment in experiments_in(records)]
    sections, models = [opening_section(experiments, output), details_section(experiments)], []
    for experiment in experiments:
        sections.append(experiment_section(experiment, output))
        if experiment.asked in before and (same := same_cells(before[experiment.asked], experiment)).cells:
            sections.append(agreement_section(experiment, Experiment(same)))
        models += model_sections(experiment, output, [other for other in experiments if other is not experiment])
    sections += models
    soaks = {whom: _beside(sources, name) for name, whom in SOAKS.items()}
    for whom, soak in soaks.items():
        if soak is not None:
            sections.append(Section(f"What do faults cost {whom}?", **soak_section(soak, output)))
    if None not in soaks.values():
        sections.append(Section("What do faults cost both, side by side?", **side_by_side([*soaks.values()])))
    if (exact := _beside(sources, "exactness.json")) is not None:
        sections.append(Section("Do all peers hold the same weights?", **exactness_section(exact, output)))
    if (memory := _beside(sources, "memory.json")) is not None:
        sections.append(Section("Does a peer's memory grow?", **memory_section(memory, output)))
    for file in sorted({file for source in sources for file in source.parent.glob(footprint.FILES)}):
        title = f"What does a peer cost beside the training, with {file.stem.rpartition('-')[2]} in the swarm?"
        sections.append(Section(title, **footprint_section(file, output)))
    sections += [published_section(experiments), machine_section([Experiment(records) for records in found.values()])]
    for check in filter(None, (_beside(sources, name) for name in CHECKS)):
        sections.append(lab_section(check, output))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"inline": _inline, "html_table": _html_table}
    template = environment.from_string(_TEMPLATE.read_text())
    page = output / "index.html"
    page.write_text(template.render(sections=sections, title="What decentralised training costs"), encoding="utf-8")
    (output / "report.md").write_text(_markdown(sections), encoding="utf-8")
    return page


def _beside(sources: Sequence[Path], name: str) -> Path | None:
    """A file of this name beside the experiments, with another measurement; None if there is none."""
    return next((file for file in (source.parent / name for source in sources) if file.exists()), None)


def _by_name(sources: Sequence[Path]) -> dict[str, Records]:
    found: dict[str, Records] = {}
    for records in map(read, sources):
        found.setdefault(records.grid["name"], records).update(records)
    return found


def experiment_section(experiment: Experiment, output: Path) -> Section:
    """The section of an experiment: answer, throughput, parts of an update, bytes, quality, and what was left out."""
    section = Section(experiment.question, name=experiment.name)
    section.text += filter(None, [time_to_accuracy(experiment)])
    section.text += answer(experiment)
    section.text += _how_measured(experiment)
    if not experiment.valid.empty:
        mark = ", paced" if paced_rates(experiment) else ""
        section.tables.append((f"Samples per second, valid cells alone{mark}", throughput_table(experiment)))
        section.figures.append((captions.speeds(experiment, mark), figures.throughput(experiment, output)))
        if not figures.part_rows(experiment).empty:
            section.figures.append((captions.parts(experiment, mark), figures.parts(experiment, output)))
        if (against := ratio_table(experiment)) is not None:
            title = "Times as fast as (ratios within a repetition: mean, 95 % interval, n"
            title += "; updates/s where both were asked for equally large updates)"
            section.tables.append((f"{title}{mark}", against))
        if (shares := kept_table(experiment)) is not None:
            title = "What is left of the speed at the shortest round trip (within a repetition: mean, 95 % interval, n)"
            section.tables.append((f"{title}{mark}", shares))
        if (left := survivors_table(experiment)) is not None:
            section.tables.append((f"What a death costs the others{mark}", left))
        section.tables.append((f"Cost of communication{mark}", communication_table(experiment)))
        if "seconds_to_accuracy" in experiment.valid and experiment.valid["seconds_to_accuracy"].notna().any():
            section.figures.append((captions.times(experiment, mark), figures.time_to_accuracy(experiment, output)))
    _say_what_was_learnt(experiment, section)
    _say_what_was_left_out(experiment, section)
    return section


def _say_what_was_learnt(experiment: Experiment, section: Section) -> None:
    if (quality := quality_table(experiment)) is not None:
        section.tables.append(("Quality at the end", quality))
        section.text.append("Accuracies: n counts seeds (and folds); of runs with the same seed the mean counts once.")
        if not validated_over_trained(experiment):
            section.text.append(
                "All runs validate the same samples. So an interval of accuracies, and what is shown by pairs, is "
                "about other seeds, and not about other samples."
            )
    if (same := equivalence_table(experiment)) is not None:
        title = (
            "Does a system that sends less learn as well? (accuracy of pairs: mean, 90 % interval; two one-sided tests)"
        )
        section.tables.append((title, same))
        section.text.append(
            "A pair is two runs with the same seed, which begin with the same weights; where that ran several times, "
            "their means. Each peer of a swarm visits the samples in an order of its own, another one in each run. "
            "Tests are not corrected for their number."
        )
        if validated_over_trained(experiment):
            section.text.append(
                "Folds share most of their training samples, so intervals of pairs are wider than those of independent "
                "ones: Nadeau and Bengio 2003, Inference for the generalization error. Those of the quality at the end "
                "are not widened, and too narrow."
            )


def _say_what_was_left_out(experiment: Experiment, section: Section) -> None:
    if "earlier_problems" in experiment.cells:
        again = experiment.cells.dropna(subset=["earlier_problems"])
        rows = [{"cell": row["name"], "why": "; ".join(row["earlier_problems"])} for _, row in again.iterrows()]
        section.tables.append(("Were invalid and ran again", pd.DataFrame(rows)))
    invalid = experiment.cells[experiment.cells["problems"].map(len) > 0]
    alone = invalid["problems"].map(failed_by_itself).astype(bool)
    for what, cells in (("Failed by themselves", invalid[alone]), ("Left out", invalid[~alone])):
        if len(cells):
            rows = [{"cell": row["name"], "why": "; ".join(row["problems"])} for _, row in cells.iterrows()]
            section.tables.append((f"{what}: {len(rows)} of {len(experiment.cells)} cells", pd.DataFrame(rows)))


def _how_measured(experiment: Experiment) -> list[str]:
    """What a reader has to know about the measurement of the cells, and the command to repeat it."""
    text: list[str] = []
    if paced := paced_rates(experiment):
        rates = ", ".join(f"{rate:g}" for rate in paced)
        computed = "true gradients of all samples, then sleep"
        if experiment.computes_few_samples:
            computed = "true gradients of few samples, then sleep: speeds and traffic mean something, accuracies do not"
        text.append(
            f"PACED: each peer pretended to compute {rates} samples/s ({computed}). Before commit 49f6df3 a wrong "
            "guess of the backward pass was not made up for: a plain script could be 5 % faster than the device."
        )
        text += filter(None, [lost_overlap(experiment)])
    if any(system.startswith("hivemind") for system in experiment.systems):
        text.append(
            "Before commit 3acb784 Hivemind's Optimizer did not clip gradients as the recipe says, nor smooth labels: "
            "that concerns what it learnt and how soon, and not its speed."
        )
    text += filter(None, [lost_warm_up(experiment), machine_drift(experiment), order_of_runs(experiment)])
    text += filter(None, [beside_the_clock(experiment)])
    if any(SYSTEMS[system].local_steps > 1 for system in experiment.systems):
        text.append("Limits are those of an average per update; several local steps make it a rarer one.")
    if any(cell.least_peers < cell.peers for cell in experiment.cells["cell"]):
        text.append(
            "Where a peer is killed or joins late, neither an efficiency nor a limit is given: the number of peers "
            "changes."
        )
    if "bytes_sent" not in experiment.cells and experiment.cells["target_accuracy"].notna().any():
        text.append(
            "Bytes per sample are up to a tenth too low: the version that measured these cells did not count what "
            "crossed the network during validations."
        )
    text.append(reproduction(experiment))
    return text


def agreement_section(experiment: Experiment, earlier: Experiment) -> Section:
    """The section that compares two runs of an experiment."""
    section = Section(f"{experiment.name}, run twice")
    if earlier.machine is not None:
        section.text.append(
            f"The earlier run began at {earlier.machine['started_at']} with commit {', '.join(commits(earlier))}; "
            f"rows of which both have at least two valid cells. They agree where the interval of the difference lies "
            f"within {AGREEMENT_PERCENT:g} %, and differ where it leaves zero out."
        )
    if clock := beside_the_clock(earlier):
        section.text.append(f"Of the earlier run: {clock[0].lower()}{clock[1:]}")
    section.text.append(
        f"{reproduction(experiment)}; then: python -m analysis report … --earlier earlier/{experiment.name}.jsonl"
    )
    compared = "Samples per second of both"
    if compares_ratios(experiment):
        compared = f"Times as fast as {SYSTEMS[COMMON].label} in both, since machines differ"
    section.tables.append((compared, agreement_table(experiment, earlier)))
    return section


def model_sections(experiment: Experiment, output: Path, others: Sequence[Experiment] = ()) -> list[Section]:
    """Sections that compare prediction and measurement, for each swarm with matchmaking times, here and elsewhere."""
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
            f"Costs in seconds, and in round trips (_rtts): {_costs(prediction)}. A negative one corrects what the "
            "model takes for bytes and slow start. Get it again: with the report, from the same cells."
        )
        name = f"{experiment.name}-{system}"
        file = figures.predictions(prediction.table, output / f"{name}-model.png")
        section.figures.append(
            (
                f"Predicted against measured samples per second: each of the {len(prediction.table)} dots is a "
                "setting, predicted from the others; on the grey line both are equal.",
                file,
            )
        )
        section.tables.append(("Predicted against measured, samples per second", prediction.table.round(3)))
        elsewhere = transfers(prediction, others if experiment.axis == "rtt_ms" else ())
        if not elsewhere.empty:
            section.tables.append(("In other experiments, of which the fit has seen nothing", elsewhere.round(3)))
            section.text.append(
                "For other experiments the costs are taken over as they are. They belong to this model and this pace: "
                "a smaller model, whose updates are shorter, costs less, and is predicted too slow."
            )
        if prediction.is_trusted(elsewhere):
            section.text.append(
                "It keeps to that, and is nearer than a constant. It was not tested on more peers than were measured, "
                "nor on home lines: it says nothing about these."
            )
        else:
            section.text.append(
                "It errs by more than that, here or in another experiment with the same model, or no less than a "
                "constant does: it says nothing about more peers."
            )
        sections.append(section)
    return sections


def _costs(prediction: Prediction) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in vars(prediction.costs).items())


def _inline(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


def _html_table(table: pd.DataFrame) -> str:
    return table.to_html(index=False, na_rep="–", border=0)


def _markdown(sections: Sequence[Section]) -> str:
    lines = ["# What decentralised training costs", ""]
    for number, section in enumerate(sections):
        if number == 1:
            lines += ["## Contents", ""]
            names = (f" ({other.name})" if other.name else "" for other in sections[1:])
            lines += [
                f"- [{other.title}](#{other.anchor}){name}" for other, name in zip(sections[1:], names, strict=True)
            ]
            lines += [""]
            lines += [LINKS, ""]
        lines += [f"## {section.title}", ""]
        lines += [line for text in section.text for line in (text, "")]
        for title, file in section.figures:
            lines += [f"![{title.partition(':')[0]}]({file.name})", "", f"*{title}*", ""]
        for title, table in section.tables:
            lines += [*([f"**{title}**", ""] if title else []), *_markdown_table(table), ""]
    return "\n".join(lines)


def _markdown_table(table: pd.DataFrame) -> list[str]:
    rows = [list(map(str, table.columns)), ["---"] * len(table.columns)]
    rows += [["–" if cell is None or cell != cell else str(cell) for cell in row] for row in table.to_numpy(object)]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
