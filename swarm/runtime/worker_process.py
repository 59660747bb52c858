"""A process beside the trainer, which communicates with other peers while the trainer computes.

The trainer sends it commands, which are objects of small classes. Each is carried out as a task of its own. The process
asks the trainer for one thing only: the state, when another peer wants to have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import pickle
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import InvalidStateError
from dataclasses import dataclass
from typing import Any, Protocol

from hivemind import DHT
from hivemind.p2p import P2P
from hivemind.utils import MPFuture, get_logger, switch_to_uvloop

from recipe.errors import InputError
from swarm.runtime.pipes import WholePipe

logger = get_logger(__name__)

STOP_SECONDS = 2.0

GetState = Callable[[], Any]
"""Returns the state. It is called in the trainer process, and its result is sent to the worker process."""
AskForState = Callable[[], Awaitable[Any]]
"""Gets that result in the worker process."""


class Service(Protocol):
    """The work of a worker process."""

    async def start(self) -> None:
        """Start. Called once, before the first command."""

    async def do(self, command: Any) -> None:
        """Carry out a command."""

    async def stop(self) -> None:
        """Stop. Called once, after the last command."""


@dataclass(frozen=True)
class Stop:
    """The last command: the worker process ends."""


class WorkerProcess(mp.get_context("fork").Process):
    """The worker process, not started yet.

    Args:
        dht: DHT; the worker process uses its connection to the network
        make_service: makes the service in the worker process; gets that connection, and a function that asks the
            trainer for its state
        get_state: answers that in the trainer process
        prepare: called first in the worker process
    """

    def __init__(
        self,
        dht: DHT,
        make_service: Callable[[P2P, AskForState], Service],
        get_state: GetState,
        prepare: Callable[[], None],
    ):
        super().__init__(daemon=True)
        self._dht, self._make_service, self._get_state, self._prepare = dht, make_service, get_state, prepare
        inner, outer = mp.Pipe(duplex=True)
        self._inner, self._outer = WholePipe(inner), WholePipe(outer)
        self._is_ready = MPFuture()

    # ---- in the trainer process -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process, and answer its requests for the state in a thread until it ends."""
        super().start()
        self._inner.close()  # otherwise the thread would never notice that the process has died
        threading.Thread(target=_answer_for_state, args=(self._outer, self._get_state), daemon=True).start()

    def start_and_wait(self) -> None:
        """Start the process, and wait until it answers other peers.

        Raises:
            InputError: it died while it started
            Exception: what its service raised while it started
        """
        self.start()
        while not self._is_ready.done():
            was_alive = self.is_alive()  # asked first: what a process says before it ends arrives a little later
            with contextlib.suppress(TimeoutError):
                self._is_ready.exception(timeout=0.5)
            if not was_alive and not self._is_ready.done():
                raise InputError("The averaging process died while it started: is there enough memory? Start again.")
        self._is_ready.result()

    def send(self, command: Any) -> None:
        """Let the process carry out a command. It begins commands in the order in which they were sent.

        A process that has died gets none.
        """
        if self.is_alive():
            with contextlib.suppress(ConnectionError):  # it has died meanwhile
                self._outer.send(command)

    def stop(self) -> None:
        """Let the process end by itself, or kill it after `STOP_SECONDS`."""
        if self.is_alive():
            self.send(Stop())
            self.join(STOP_SECONDS)
        if self.is_alive():
            logger.debug("the averaging process does not end by itself")
            self.kill()  # not SIGTERM: the handler that it has inherited asks a trainer to leave, and ends no process
            self.join(STOP_SECONDS)

    # ---- in the worker process ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the process. It works in another thread: in a forked process's main thread, torch's OpenMP may hang."""
        self._outer.close()  # otherwise this process would never notice that the trainer has died
        self._prepare()
        thread = threading.Thread(target=self._run_loop, daemon=True)
        thread.start()
        thread.join()

    def _run_loop(self) -> None:
        switch_to_uvloop().run_until_complete(self._serve())

    async def _serve(self) -> None:
        loop, commands = asyncio.get_running_loop(), asyncio.Queue()
        loop.set_exception_handler(_tell_once)
        try:
            p2p = await self._dht.replicate_p2p()
            service = self._make_service(p2p, self._ask_for_state)
            await service.start()
        except Exception as error:
            self._is_ready.set_exception(error)
            return
        loop.add_reader(self._inner.fileno(), self._take_in, commands)
        self._is_ready.set_result(None)
        tasks = set()
        while not isinstance(command := await commands.get(), Stop):
            task = asyncio.create_task(service.do(command))
            tasks.add(task)  # without a reference, it could be collected before its end
            task.add_done_callback(tasks.discard)
        loop.remove_reader(self._inner.fileno())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.stop(), STOP_SECONDS / 2)

    def _take_in(self, commands: asyncio.Queue) -> None:
        try:
            while self._inner.poll():
                message = self._inner.recv_bytes()
                try:
                    commands.put_nowait(pickle.loads(message))
                except Exception:  # for example at the limit of open files: a future's connection needs one more
                    logger.exception("the trainer's command could not be read")
        except (EOFError, OSError):  # the trainer has died
            commands.put_nowait(Stop())

    async def _ask_for_state(self) -> Any:
        future = MPFuture()
        self._inner.send(future)
        try:
            return await future
        finally:
            future.cancel()  # if it has not come in time, the trainer need not begin with it any more


def _answer_for_state(pipe: WholePipe, get_state: GetState) -> None:
    """Answer the worker process's requests for the state, in a thread of the trainer process, until it ends."""
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):  # the worker process has ended
            return
        future = None
        try:
            future = pickle.loads(message)
            if not future.done():
                future.set_result(get_state())
        except InvalidStateError:  # it was cancelled meanwhile
            pass
        except Exception as error:
            logger.warning(f"This peer cannot hand over its state: {error}")
            with contextlib.suppress(Exception):  # if that fails, too, the worker process gives up after a while
                future.set_exception(error)


def _tell_once(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log only unexpected errors of the event loop, as its exception handler.

    The end of a round is told by its future. For each stream that broke with it, asyncio would print a traceback as
    well. It would also report tasks that still waited when the process ended, which is of no interest.
    """
    is_unfinished = str(context.get("message", "")).startswith("Task was destroyed but it is pending")
    broke = isinstance(context.get("exception"), (ConnectionError, asyncio.CancelledError))
    if broke or is_unfinished:
        logger.debug(context)
    else:
        loop.default_exception_handler(context)
