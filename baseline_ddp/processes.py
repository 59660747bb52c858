"""The processes of a run: the rank of this one, how they connect, and errors when that fails."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from recipe.errors import InputError, first_line
from recipe.training.launched import Launched, meet

T = TypeVar("T")


class RunFailed(RuntimeError):  # noqa: N818
    """The run cannot go on, for a reason other than the command line; the message is one sentence for a person."""


@dataclass(frozen=True)
class Processes(Launched):
    """This process among those of the run."""

    @contextlib.contextmanager
    def connected(self, device: torch.device, connect_timeout: float, collective_timeout: float) -> Iterator[None]:
        """Runs the block in a process group: gloo on CPUs, NCCL on GPUs; a single process is a group of its own.

        Args:
            device: the device of this process.
            connect_timeout: seconds within which all processes have to connect.
            collective_timeout: longest wait of a process for the others during the run, in seconds.

        Raises:
            RunFailed: the processes do not find each other in time, or one is lost during the run.
        """
        self._name_to_environment()
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._reach_master(address, connect_timeout)
        on_gpu = device.type == "cuda"
        try:
            store = meet(self.rank, self.size, connect_timeout)
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=collective_timeout),
                device_id=device if on_gpu else None,
            )
        except (dist.DistError, RuntimeError, ValueError, TimeoutError) as error:
            raise RunFailed(
                f"The {self.size} processes did not find each other at {address} within {connect_timeout:g} s "
                f"({first_line(error, 160)}): check that all nodes run and can reach that address."
            ) from error
        try:
            with _loss_of_others_told(self, collective_timeout):
                yield
        finally:
            with contextlib.suppress(Exception):  # a lost process may have broken the group already
                dist.destroy_process_group()

    def agree(self, value: T) -> T:
        """The first process's value, in all processes. If there are several, they have to be `connected`."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def first_does(self, task: Callable[[], T]) -> T:
        """Lets the first process run a task, and returns its result in all. If there are several, they have to be
        `connected`.

        Raises:
            InputError: in the first process, if the task raises it.
            SystemExit: then in the others, which have nothing to add.
        """
        result, error = None, None
        if self.is_first:
            try:
                result = task()
            except InputError as refused:
                error = refused
        result, failed = self.agree((result, error is not None))
        if error is not None:
            raise error
        if failed:
            raise SystemExit(2)
        return result

    def smallest(self, value: int) -> int:
        """The smallest of all processes' values. If there are several, they have to be `connected`."""
        if self.size == 1:
            return value
        values: list[int] = [value] * self.size
        dist.all_gather_object(values, value)
        return min(values)

    def run_began(self) -> float:
        """Unix seconds at which this run began: the start of torchrun, which outlives restarts of its workers, or
        now."""
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        return psutil.Process(os.getppid()).create_time() if under_torchrun else time.time()

    def _name_to_environment(self) -> None:
        """Set the variables of torchrun that are missing; Lightning reads them too."""
        if self.size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise InputError("Several processes have to know MASTER_ADDR and MASTER_PORT: let torchrun start them.")
        defaults = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.rank // self.local_size),
        }
        for name, value in defaults.items():
            os.environ.setdefault(name, value)

    def _reach_master(self, address: str, seconds: float) -> None:
        """Wait until the master address accepts a connection.

        If nothing answers there, torch itself waits for much longer than its timeout.
        """
        if self.is_first or "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agents have met there already
            return
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=max(0.1, deadline - time.monotonic())).close()
                return
            except OSError as error:
                if time.monotonic() >= deadline - 0.5:
                    raise RunFailed(
                        f"The master address {address} did not answer within {seconds:g} s ({error}): check "
                        "--master-addr and --master-port, and that the first node runs and its firewall lets others in."
                    ) from error
                time.sleep(0.5)


_SIGNS_OF_A_LOST_PROCESS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "connect timeout",
    "socket timeout",
    "nccl",
    "gloo",
    "wait timeout",
)


@contextlib.contextmanager
def _loss_of_others_told(processes: Processes, timeout: float) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except RuntimeError as error:  # gloo and NCCL have no exceptions of their own
        is_lost = isinstance(error, dist.DistError) or any(
            sign in str(error).lower() for sign in _SIGNS_OF_A_LOST_PROCESS
        )
        if isinstance(error, RunFailed) or processes.size == 1 or not is_lost:
            raise
        raise RunFailed(
            f"Process {processes.rank} lost another process of this run, or had no answer for {timeout:g} s "
            f"({first_line(error, 160)}): see what the other one said, then go on with --resume."
        ) from error


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
