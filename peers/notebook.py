"""Join a swarm from any notebook: `from peers import join; join("/ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1...")`.

The peer is a separate process, `python -m swarm.peer`. A notebook's kernel has threads and an event loop, which
Hivemind's forks do not survive. Interrupting the cell makes the peer leave the swarm properly.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from peers.display import Display, LineDisplay, make_display
from peers.platforms import Platform, detect
from recipe.errors import InputError
from recipe.run_folder import check_name, make_writable
from swarm.enrolment.join_line import is_join_line, whom_to_join
from swarm.network.addresses import VARIABLE
from swarm.peer.options import UPLOAD_SECONDS
from swarm.peer.status import Status
from swarm.runtime.processes import die_with_parent

POLL_SECONDS = 0.5
LEAVE_SECONDS = 20.0
INTERRUPTED = (130, -signal.SIGINT)  # the second while Python itself starts
SPARE_SECONDS = 600.0  # a peer that ends with its session could not sign off
LEAST_SECONDS = 300.0  # for less, joining is not worth it: starting takes a minute or two of it


class CannotJoin(InputError):  # noqa: N818 (reads as what happened)
    """Raised if the peer cannot join; a notebook shows only the message."""

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows in place of a traceback."""
        return [f"error: {self}"]


def preview(address: str | Sequence[str] = "", *, device: str = "auto", data_dir: str | Path = "data") -> bool:
    """Show what joining takes and gives, and whether it would work: device, memory, micro-batch, traffic, time left.

    Args:
        address: addresses of running peers, or a join line; if empty, those in the variable INITIAL_PEERS

    Returns:
        whether joining would work

    Raises:
        CannotJoin: there is no address, it is malformed, or the check itself failed
    """
    platform, addresses = detect(), _addresses(address)
    command = [sys.executable, "-m", "swarm", "doctor", "--json", "--device", device, "--data-dir", str(data_dir)]
    command += ["--output-dir", str(platform.storage)]
    environment = _environment(addresses)
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        raise CannotJoin(f"The check of this machine failed: {done.stderr.strip()[-500:]}") from None
    for check in report["checks"]:
        print(f"{check['name']:>14}  {check['found']}{' → ' + check['fix'] if check['fix'] else ''}")
    left = platform.seconds_left()
    print(f"{'session':>14}  {'no limit known' if left is None else f'{left / 3600:.1f} h left'} on {platform.name}")
    print(f"{'storage':>14}  {platform.storage}: {platform.hint}")
    if is_join_line(addresses[0]):
        print(f"{'invitation':>14}  a new name uses up one more use of it: come back under the name that you have")
    return report["can_join"]


def join(
    address: str | Sequence[str] = "",
    *,
    public_name: str | None = None,
    device: str = "auto",
    data_dir: str | Path = "data",
    output_dir: str | Path | None = None,
    max_time: str | None = None,
    options: Sequence[str] = (),
) -> dict:
    """Train with a swarm until the run ends, the session is about to end, or the cell is interrupted.

    Args:
        address: addresses of running peers, or a join line; if empty, those in the variable INITIAL_PEERS
        public_name: name shown to others; by default that of last time, or else a random one
        device: auto, cpu or cuda
        data_dir: folder of the data set
        output_dir: folder for runs, name and identity; by default one that outlives the session on this platform
        max_time: leave after HH:MM:SS; by default ten minutes before the longest possible session ends
        options: further options of `python -m swarm.peer`

    Returns:
        the content of summary.json; empty if the cell was interrupted before the peer had a summary to write

    Raises:
        CannotJoin: says in one sentence why, and what to do
    """
    platform = detect()
    try:
        folder = Path(output_dir or platform.storage).expanduser()
        make_writable(folder)
        name = _kept_name(folder, public_name)
    except InputError as error:
        raise CannotJoin(str(error)) from None
    addresses = _addresses(address)
    arguments = ["--public-name", name, "--output-dir", str(folder), "--device", device]
    arguments += ["--data-dir", str(data_dir), *options]
    if limit := max_time or _before_the_end(platform):
        arguments += ["--max-time", limit]
    return _Volunteer(folder, name, addresses, arguments).run()


class _Volunteer:
    """A peer process, with the display of its status."""

    def __init__(self, folder: Path, name: str, addresses: list[str], arguments: list[str]):
        self._folder, self._name = folder, name
        self._log = folder / f"{name}.log"
        self._began = time.time()
        self._end: str | None = None
        """How the peer ended, in words, if this process asked it to leave; shown if it could not write its summary."""
        parent = os.getpid()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "swarm.peer", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt reaches only this process, which asks the peer to leave
                preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent),
                env={**_environment(addresses), "PYTHONUNBUFFERED": "1"},
            )

    def run(self) -> dict:
        display: Display = LineDisplay()
        try:
            display = make_display()
            while self._process.poll() is None:
                display.show(self._status())
                self._wait(POLL_SECONDS)
        except KeyboardInterrupt:
            self._leave()
        except BaseException:  # after it, nobody could stop the peer
            self._leave()
            raise
        if self._end is not None and self._process.returncode in (*INTERRUPTED, -signal.SIGKILL):
            display.close(self._end)
            return self._summary() or {}
        if self._process.returncode:
            sentence = self._last_words()
            display.close(sentence)
            raise CannotJoin(sentence)
        display.close(self._farewell())
        if (summary := self._summary()) is None:
            raise CannotJoin(f"The peer has left and could not write its summary: is the disk full? See {self._log}.")
        return summary

    def _wait(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _leave(self) -> None:
        """Ask the peer to leave, as Ctrl-C does in a terminal, and end it by force if it does not.

        A peer that has written its summary may still be uploading, which takes longer.
        """
        self._end = "Left before the training began."
        self._process.send_signal(signal.SIGINT)
        seconds = LEAVE_SECONDS
        try:
            has_left = self._wait(LEAVE_SECONDS)
            if not has_left and (self._summary() or {}).get("upload_to"):
                print(f"Uploading what is left, for {UPLOAD_SECONDS:g} s at most; interrupt again to end this at once.")
                seconds += UPLOAD_SECONDS
                has_left = self._wait(UPLOAD_SECONDS)
            if not has_left:
                self._end = f"Ended by force after {seconds:g} s. The others train on."
        except KeyboardInterrupt:  # interrupted twice
            self._end = "Ended by force. The others train on."
        finally:
            self._process.kill()  # does nothing if it has ended
            self._process.wait()

    def _newest(self, file: str) -> Path | None:
        """This session's newest file of that name in OUTPUT_DIR/RUN_ID/NAME; RUN_ID is known only to the swarm.

        None also if the folder cannot be read now, as with a Drive that is not there for a while.
        """
        try:
            times = {path: path.stat().st_mtime for path in self._folder.glob(f"*/{self._name}/{file}")}
        except OSError:
            return None
        return max((path for path in times if times[path] >= self._began), key=times.get, default=None)

    def _summary(self) -> dict | None:
        path = self._newest("summary.json")
        return None if path is None else json.loads(path.read_text())

    def _status(self) -> Status:
        path = self._newest("status.json")
        return (Status.read(path) if path else None) or Status(self._name, "", "starting, which takes a few seconds")

    def _farewell(self) -> str:
        return self._log.read_text(errors="replace").rstrip().rsplit("\n\n", 1)[-1]

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return errors[-1] if errors else "\n".join([f"the peer ended unexpectedly, see {self._log}:", *lines[-5:]])


def _addresses(address: str | Sequence[str]) -> list[str]:
    values = [address] if isinstance(address, str) else list(address)
    try:
        found, line = whom_to_join([value for value in values if value.strip()] or None)
    except InputError as error:
        raise CannotJoin(str(error)) from None
    if not found:
        raise CannotJoin(
            "There is no join line yet: ask the organiser for one, it looks like swarm://… or /ip4/…/tcp/…/p2p/…."
        )
    return found if line is None else [str(line)]


def _environment(addresses: list[str]) -> dict[str, str]:
    """The environment of a child process, with the addresses to join. Unlike a command line, other users cannot read
    it."""
    return os.environ | {VARIABLE: " ".join(addresses)}


def _kept_name(folder: Path, public_name: str | None) -> str:
    """The given name, or that of last time, or else a new one; it is kept for the next time.

    Raises:
        InputError: the name cannot name a folder
    """
    kept = folder / "public-name.txt"
    name = (public_name or "").strip() or (kept.read_text().strip() if kept.exists() else "")
    name = check_name(re.sub(r"\s+", "-", name) or f"volunteer-{secrets.token_hex(3)}", "public_name")
    kept.write_text(name + "\n")
    return name


def _before_the_end(platform: Platform) -> str | None:
    """Time limit that lets the peer leave before the session ends, as HH:MM:SS.

    None without a known limit, or if the longest session is nearly over.
    """
    left = platform.seconds_left()
    if left is None:
        return None
    if left < SPARE_SECONDS + LEAST_SECONDS:
        print(
            f"A session on {platform.name} lasts {platform.session_hours:g} h at most, and {left / 60:.0f} min of them "
            "are left. So no limit is set: interrupt this cell to leave in order."
        )
        return None
    minutes, seconds = divmod(int(left - SPARE_SECONDS), 60)
    limit = f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
    print(
        f"This peer leaves after {limit}, ten minutes before the longest session on {platform.name} ends; "
        "max_time sets another limit."
    )
    return limit
