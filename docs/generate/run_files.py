"""docs/reference/run-folder.md and metrics.md: what a run leaves on the disk.

Meanings of files and of metrics are written here; whether the code knows the same ones is checked each time.
"""

from __future__ import annotations

import ast
import re

from generate.source import dataclass_fields, docstring, find, table, tree_of

FILES = {
    "recipe": ("all", "The [recipe](recipe.md) that is trained; `--recipe` reads it."),
    "environment": ("all", "Versions, hardware, commit and command line, without the machine's name and secrets."),
    "metrics": ("all", "One line of JSON per global update and per validation: [metrics](metrics.md)."),
    "rounds": (
        "peers",
        "One line of JSON per averaging round, failed ones included: [rounds](metrics.md#roundsjsonl).",
    ),
    "ledger": (
        "peers",
        "One line of JSON per update, signed by the peer: [what each member gave](../howto/ledger.md). It is public.",
    ),
    "tensorboard": ("all", "The values of `metrics.jsonl` with the same tags: `tensorboard --logdir runs`."),
    "checkpoints": ("all", "Weights with the optimizer's statistics; see below."),
    "status": ("peers", "What the peer does now, replaced twice a second: [status](metrics.md#statusjson)."),
    "peers": ("peers", "Addresses of peers that this one has met; a peer that comes back tries them."),
    "membership": (
        "peers",
        "In a run by invitation: the peer's certificate, the lists of removed members and of orders, the signed run "
        "manifest, and the join line without its invitation. Keep it with the identity: a peer that comes back needs "
        "both.",
    ),
    "evaluations": (
        "peers",
        "One line of JSON per pass over the test images, of a peer with `--evaluate-every-steps` or where it was "
        "ordered: `step`, `val_top1` of the same weights, `images`, `loss`, `top1`, `top5`, `seconds`.",
    ),
    "identity": ("peers of `swarm demo`", "The peer's private key."),
    "leftovers": (
        "peers",
        "Names of temporary files of this peer. If the peer was killed, its next start deletes them.",
    ),
    "summary": (
        "all",
        "How the run ended, written last: [summary](metrics.md#summaryjson). No file: it has not ended.",
    ),
}
"""Of each path of `RunFolder`: who writes it, and what it is."""

BASELINE_FILES = [
    ("`test.json`", "Accuracy and loss of the best checkpoint on the official test images."),
    ("`confusion.png`", "Confusion matrix on the test images: how often each class was taken for each other one."),
    ("`curves.png`", "Loss, accuracy, learning rate and speed over the updates."),
    ("`logbook.md`", "The run in one page: settings, results and pictures."),
]

CHECKPOINTS = [
    (
        "`last.ckpt`",
        "The last weights. A peer writes it when it leaves, the baseline every `--snapshot-every` updates.",
    ),
    ("`best.ckpt`", "The weights with the highest validation accuracy."),
    ("`step=N.ckpt`", "A peer's last three checkpoints, one per `--checkpoint-every-steps` updates."),
    ("`own-step-N.ckpt`", "What a peer had trained before it took over weights that are far from its own."),
]

METRICS = {
    "train/loss": ("mean", "Training loss of this process since the last update."),
    "train/top1": ("0 to 1", "Training accuracy of this process since the last update."),
    "train/top5": ("0 to 1", "The same, with the right class among the first five."),
    "train/lr": ("", "Learning rate of this update."),
    "val/loss": ("mean", "Validation loss, without label smoothing."),
    "val/top1": ("0 to 1", "Validation accuracy."),
    "val/top5": ("0 to 1", "The same, with the right class among the first five."),
    "val/macro_f1": ("0 to 1", "F1 score, a mean over classes."),
    "val/precision": ("0 to 1", "Precision, a mean over classes."),
    "val/recall": ("0 to 1", "Recall, a mean over classes."),
    "perf/samples_per_second": (
        "samples/s",
        "Training samples of this peer (of all DDP processes) over the time of the update.",
    ),
    "perf/step_seconds": ("s", "Time of the update, validation excluded."),
    "perf/swarm_samples_per_second": (
        "samples/s",
        "Samples of the whole swarm's update over its time, validation excluded.",
    ),
    "swarm/peers": ("peers", "Peers in the group that made the update."),
    "swarm/samples": ("samples", "Samples of all peers in the update."),
    "swarm/own_samples": ("samples", "Samples of this peer in the update."),
    "swarm/loss": ("mean", "Training loss over all samples of the update, as the peers reported it."),
    "round/compute_seconds": ("s", "From micro-batch to micro-batch; waiting and validation do not count."),
    "round/blocked_seconds": ("s", "Nothing was computed, because the round had to end first."),
    "round/meeting_seconds": ("s", "From entering the round to a closed group."),
    "round/exchange_seconds": ("s", "From a closed group to the complete average."),
    "round/granularity": (
        "ratio",
        "Computing over exchange: below 1, devices wait for lines, or would if they did not compute on.",
    ),
    "round/parts_received_fraction": ("0 to 1", "Share of the expected parts that arrived; 1 is a complete average."),
    "perf/data_seconds": ("s", "Waiting for batches."),
    "perf/compute_seconds": ("s", "What is left of the update: computing, and Lightning's own work."),
    "perf/communication_seconds": ("s", "Averaging gradients, or gathering shards."),
    "resources/cpu_percent": ("% of one core", "Processor use of the process since the last update."),
    "resources/memory_gib": ("GiB", "Resident memory of the process."),
    "resources/gpu_percent": ("%", "Use of the whole GPU."),
    "resources/gpu_memory_gib": ("GiB", "Memory of the whole GPU that is in use."),
}
"""Unit and meaning of each tag. A tag of `resources/` is written as `resources/rank0/cpu_percent` and so on."""

WRITERS = {
    "Peers and baseline": ("recipe.training.callbacks", "recipe.training.task"),
    "Peers alone": ("swarm.peer.callbacks.swarm_metrics",),
    "Baseline alone": ("baseline_ddp.measuring.timing", "baseline_ddp.measuring.resources"),
}
"""Where the tags are written; the first section also has those of `ClassificationTask` and `StepMetrics`."""

SUMMARY = {
    "run_id": "The run.",
    "recipe": "Name of the recipe.",
    "fingerprint": "Of the recipe; equal on all peers of a run.",
    "outcome": 'Why the training ended, such as "completed", "target accuracy" or "interrupted".',
    "steps": "Global updates.",
    "samples": "This peer's training samples in all updates; of the baseline, those of all processes.",
    "seconds": "Wall time of the training; of a baseline that was resumed, since then.",
    "max_num_peers": "Most peers in one update, this one included.",
    "val_accuracy": "Last validation accuracy, 0 to 1; null without a validation.",
    "train_loss": "Last training loss of this peer; null if it gave no samples.",
    "name": "Public name of the peer.",
    "swarm_samples": "Samples of all peers in the updates that this peer took part in.",
    "updates": "Updates that this peer took part in.",
    "complete_updates": "Updates of these whose average arrived without a missing part.",
    "micro_batch": "Samples that the device computed at once.",
    "traffic_bytes": "Sent and received for rounds and states; headers, calls and records are not counted.",
    "start_seconds": "Seconds of each phase of the start, from the command to the first contribution.",
    "tested": "The line of evaluations.jsonl whose weights had the highest validation accuracy; null without one.",
    "upload_to": "Where checkpoints were copied to; null if nowhere.",
    "strategy": "single, ddp or fsdp.",
    "processes": "Training processes.",
    "nodes": "Machines.",
    "precision": "Number format of the computation.",
    "global_batch": "Samples per update, over all processes.",
    "accumulation": "Micro-batches per process and update.",
    "largest_batch": "Largest micro-batch that fits into memory, where it was measured.",
    "learning_rate": "Highest learning rate, after scaling.",
    "steps_per_epoch": "Updates for one pass over the training images.",
    "best_val_accuracy": "Highest validation accuracy.",
    "best_val_loss": "Lowest validation loss.",
    "samples_per_second": "Samples over the time of the updates, since the run was resumed if it was.",
    "step_time_seconds": "Seconds of these updates: data, compute, communication.",
    "resources": "Mean and highest value of each process's resources.",
    "resumed_step": "Step of the snapshot that this run went on from; null if it began anew.",
    "best_checkpoint": "Where the best checkpoint was copied to, with its SHA-256; null without a copy.",
    "test_accuracy": "Accuracy of the best checkpoint on the test images; null without such images.",
    "test_problem": "Why there is no test accuracy; null if there is one.",
}


def folder_page() -> str:
    """docs/reference/run-folder.md"""
    paths = _run_folder_paths()
    _same(FILES, paths, "files of RunFolder")
    rows = [(f"`{paths[name]}`", writer, meaning) for name, (writer, meaning) in FILES.items()]
    for file, _ in BASELINE_FILES + CHECKPOINTS[:2]:
        _check_written(file.strip("`"))
    return "\n".join(
        [
            "# Run folder\n",
            "A peer writes to `OUTPUT_DIR/RUN_ID/PUBLIC_NAME`, by default below `runs/`. The baseline writes to",
            "`OUTPUT_DIR/RUN_ID/NAME`. A peer's private key is in `OUTPUT_DIR/identities/`; never share it.",
            "`swarm demo` instead keeps each peer's key, and its output (`peer.log`), in its run folder.\n",
            "In Python, [`RunFolder`](python-api.md#runfolder) has these paths.\n",
            "## Files\n",
            table(("file", "written by", "what it is"), rows),
            "Files of JSON lines grow by whole lines; a line that a crash has torn is left out by `read_metrics`.",
            "Other JSON files are replaced as a whole. When the disk is full, a peer trains on without them.\n",
            "The baseline also writes:\n",
            table(("file", "what it is"), BASELINE_FILES),
            "## Checkpoints\n",
            "Each checkpoint is a file of `torch.save`, in Lightning's form: `state_dict`, `optimizer_states`,",
            "`global_step`, and the recipe as JSON under `recipe`. With AdamW it has three times the bytes of the",
            "model. It is a pickle: load only your own.\n",
            table(("file", "what it is"), CHECKPOINTS),
        ]
    )


def metrics_page() -> str:
    """docs/reference/metrics.md"""
    tags = {section: sorted(_tags(modules)) for section, modules in WRITERS.items()}
    _same(METRICS, [tag for found in tags.values() for tag in found], "tags of metrics.jsonl")
    lines = [
        "# Metrics\n",
        "## metrics.jsonl\n",
        "Each line is a JSON object with `time` (Unix seconds), `step` (global updates so far) and some of these tags.",
        "A number that is not finite is `null`. TensorBoard has the same tags.\n",
        "For a peer, `train/*` are of its own samples since the last update, and `swarm/*` are of all peers. A peer",
        "that takes over a state instead of taking part in an update has no line of `swarm/*` for it.\n",
    ]
    for section, found in tags.items():
        rows = [(f"`{_shown(tag)}`", *METRICS[tag]) for tag in METRICS if tag in found]
        lines.append(f"### {section}\n\n{table(('tag', 'unit', 'meaning'), rows)}")
    lines += ["## rounds.jsonl\n", _described("swarm.protocol.round_report", "RoundEvent")]
    lines += ["## status.json\n", _described("swarm.peer.status", "Status"), "## summary.json\n", _summary()]
    return "\n".join(lines)


def _shown(tag: str) -> str:
    return tag.replace("resources/", "resources/rankN/")


def _run_folder_paths() -> dict[str, str]:
    """The attributes of `RunFolder` that are paths within it."""
    found = {}
    for node in ast.walk(find("recipe.run_folder", "RunFolder.__init__")):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            found[node.targets[0].attr] = node.value.right.value
    return {name: path if "." in path else f"{path}/" for name, path in found.items()}


def _check_written(file: str) -> None:
    stems = (file, file.removesuffix(".ckpt"))
    baseline = ("results", "measuring.logbook", "session")
    for module in (*(f"baseline_ddp.{name}" for name in baseline), "recipe.training.checkpoint_io"):
        constants = {node.value for node in ast.walk(tree_of(module)) if isinstance(node, ast.Constant)}
        if constants & set(stems):
            return
    raise LookupError(f"baseline_ddp no longer writes {file}: correct docs/generate/run_files.py.")


def _tags(modules: tuple[str, ...]) -> set[str]:
    """The tags that these modules write: they are string constants, or are made of the names of metrics."""
    found: set[str] = set()
    for module in modules:
        for node in ast.walk(tree_of(module)):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if re.fullmatch(r"(train|val|perf|swarm|round|resources)/[a-z0-9_]+", text):
                found.add(text)
    if "recipe.training.task" in modules:
        found |= {f"train/{name}" for name in _keys(find("recipe.training.task", "_running_metrics"))}
        found |= {"val/loss"} | {f"val/{name}" for name in _keys(find("recipe.training.task", "evaluation_metrics"))}
    return found


def _keys(node: ast.AST) -> set[str]:
    """The text keys of the dictionaries that a function makes as arguments, options left out."""
    options = {"sync_on_compute", "ignore_index", "validate_args"}
    dictionaries = [item for item in ast.walk(node) if isinstance(item, ast.Dict)]
    return {key.value for item in dictionaries for key in item.keys if isinstance(key, ast.Constant)} - options


def _described(module: str, name: str) -> str:
    """A dataclass whose docstring says what its fields are."""
    node = find(module, name)
    says = docstring(node)
    rows = [(f"`{field}`", _json_type(kind), says.params[field]) for field, kind, _ in dataclass_fields(node)]
    if name == "RoundEvent":
        rows.insert(0, ("`time`", "number", "Unix seconds when the round ended for this peer"))
    return f"{says.text}\n\n{table(('field', 'type', 'meaning'), rows)}"


def _json_type(kind: str) -> str:
    if kind.startswith("tuple"):
        return "list"
    text = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}
    return text.get(kind.split(" | ")[0], kind) + (" or null" if "None" in kind else "")


def _summary() -> str:
    common = _dictionary_keys(find("recipe.run_folder", "RunFolder.write_summary"))
    call = next(node for node in ast.walk(tree_of("swarm.peer.session")) if _is_call(node, "write_summary"))
    peers = [keyword.arg for keyword in call.keywords if keyword.arg not in common]
    call = next(node for node in ast.walk(tree_of("baseline_ddp.results")) if _is_call(node, "write_summary"))
    baseline = [keyword.arg for keyword in call.keywords if keyword.arg]
    for function in ("_training", "_setting"):
        returned = [node for node in ast.walk(find("baseline_ddp.results", function)) if isinstance(node, ast.Return)]
        baseline += [key.value for key in returned[-1].value.keys]
    baseline = [name for name in baseline if name not in common]
    _same(SUMMARY, [*common, *peers, *baseline], "entries of summary.json")
    parts = {"Everywhere": common, "Peers": peers, "Baseline": baseline}
    return "\n".join(
        f"### {title}\n\n{table(('entry', 'meaning'), [(f'`{name}`', SUMMARY[name]) for name in names])}"
        for title, names in parts.items()
    )


def _dictionary_keys(node: ast.AST) -> list[str]:
    found = [item for item in ast.walk(node) if isinstance(item, ast.Dict)]
    return [key.value for item in found for key in item.keys]


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def _same(described: dict, found: dict | list, what: str) -> None:
    difference = set(described) ^ set(found)
    if difference:
        raise LookupError(f"The {what} and their descriptions differ in {sorted(difference)}: correct run_files.py.")
