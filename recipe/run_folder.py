"""The run folder, with a peer's recipe, environment, metrics and summary, and functions that write files safely."""

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from recipe.config import Recipe
from recipe.errors import InputError

OWN_PREFIX = "own-step-"
"""Begins the names of checkpoints with a peer's own weights, made before it took over weights that are far from them. A
peer never goes on from such a checkpoint by itself."""


class RunFolder:
    """The paths in a run folder `output_dir/run_id/peer_name`. `create` makes the folder; the constructor only names
    it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.json"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.rounds = self.path / "rounds.jsonl"
        self.ledger = self.path / "ledger.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.json"
        self.status = self.path / "status.json"
        self.peers = self.path / "peers.json"
        self.leftovers = self.path / "leftovers.json"
        self.membership = self.path / "membership.json"
        self.evaluations = self.path / "evaluations.jsonl"
        self.identity = self.path / "identity.key"
        """Private key of a peer of `swarm demo`. Other peers keep theirs in OUTPUT_DIR/identities."""

    @classmethod
    def create(cls, output_dir: str | Path, run_id: str, peer_name: str) -> "RunFolder":
        """Makes the run folder and its folder of checkpoints; an existing one is used again.

        Raises:
            InputError: a name is no plain file name, or the folder is not writable.
        """
        path = Path(output_dir).expanduser() / check_name(run_id, "--run-id") / check_name(peer_name, "--public-name")
        folder = cls(path)
        make_writable(folder.checkpoints)
        return folder

    def write_recipe(self, recipe: Recipe) -> None:
        """Writes `recipe.json`, which `Recipe.from_json` reads."""
        with whole_file(self.recipe) as file:
            file.write(f"{recipe.to_json()}\n".encode())

    def write_environment(self) -> None:
        """Writes `environment.json`: versions, hardware, commit and command line; not the machine's name."""
        from recipe.training.environment import (
            describe_environment,  # torch takes seconds, and readers need only the paths
        )

        write_json(self.environment, describe_environment())

    def write_summary(
        self,
        recipe: Recipe,
        *,
        run_id: str,
        outcome: str,
        steps: int,
        samples: int,
        seconds: float,
        val_accuracy: float | None,
        train_loss: float | None,
        max_num_peers: int = 1,
        **more: Any,
    ) -> None:
        """Writes `summary.json`. It is written last, because its existence says that the run has ended.

        Args:
            recipe: the recipe; its name and fingerprint are written.
            run_id: the run that this peer took part in.
            outcome: why the training ended, such as "completed", "target accuracy" or "interrupted".
            steps: global updates.
            samples: this peer's training samples.
            seconds: wall time of the training.
            val_accuracy: last `val/top1`, 0 to 1, or None without any validation.
            train_loss: last training loss of this peer or process, or None if it gave no samples.
            max_num_peers: most peers seen at once, including this one.
            more: further entries.
        """
        summary = {"run_id": run_id, "recipe": recipe.name, "fingerprint": recipe.fingerprint, "outcome": outcome}
        counts = {"steps": steps, "samples": samples, "seconds": seconds, "max_num_peers": max_num_peers}
        write_json(self.summary, summary | counts | {"val_accuracy": val_accuracy, "train_loss": train_loss} | more)


def make_writable(path: str | Path, option: str = "--output-dir") -> None:
    """Makes the folder if it is missing, and checks that a file can be written there.

    Args:
        option: with which a person can name another folder

    Raises:
        InputError: the folder cannot be made or written to.
    """
    path = Path(path).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"The folder {path} cannot be written ({error.strerror}): name another {option}.") from error


def resumable(checkpoints: Path) -> list[Path]:
    """Return the checkpoints in this folder that a training may go on from by itself; a half-written one is none."""
    return [path for path in checkpoints.glob("[!.]*.ckpt") if not path.name.startswith(OWN_PREFIX)]


def check_name(name: str, option: str) -> str:
    """Returns the name if it can name a folder on every system.

    Raises:
        InputError: it is not 1 to 64 characters of A-Z, a-z, 0-9, dot, underscore and dash, or starts with a dot.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", name):
        raise InputError(
            f"{ascii(name)[:80]} cannot name a folder: give {option} 1 to 64 letters, digits, dots, underscores or "
            "dashes, not starting with a dot."
        )
    return name


def write_json(path: str | Path, data: Any, durable: bool = True) -> None:
    """Writes JSON as a `whole_file`; NaN and infinities become null."""
    text = json.dumps(finite_or_null(data), indent=2, allow_nan=False)
    with whole_file(Path(path), durable) as file:
        file.write(f"{text}\n".encode())


@contextlib.contextmanager
def whole_file(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Yields a file that takes the place of `path` when the block ends without an error.

    A reader sees either the old file or the new one.

    Args:
        path: the target, which may exist, in a folder that exists.
        durable: whether the file outlives a power failure, at a cost in disk time and wear. Without it, the file may be
            empty after one.

    Raises:
        OSError: the file cannot be written; an old one stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # the folder has become unwritable
            temporary.unlink(missing_ok=True)


def write_private(path: Path, content: bytes, overwrite: bool = False) -> None:
    """Writes a file that only its owner can read, and the folders above it.

    Args:
        overwrite: whether an existing file may be replaced. Then a kill leaves the old file or the new one. Without it,
            a kill can leave a partial file.

    Raises:
        OSError: the file exists and may not be replaced, or cannot be written.
    """
    written = path.with_name(f".{path.name}.{os.getpid()}.tmp") if overwrite else path
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if overwrite else os.O_EXCL)
    descriptor = os.open(written, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def finite_or_null(data: Any) -> Any:
    """The data with None in place of NaN and infinities, which JSON cannot express."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite_or_null(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite_or_null(value) for value in data]
    return data


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, oldest first; lines torn by a crash or a full disk are skipped.

    If the file does not exist, the list is empty.
    """
    try:
        content = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = []
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines
