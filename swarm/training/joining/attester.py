"""How a peer attests what state it holds after an update, as often as that costs next to nothing.

A digest reads the whole state once with one CPU core, even if the state is on a GPU: at 1 to 2 GB/s. A thread does
that, since the state does not change until the next update. An update that comes earlier waits.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from hivemind.utils import get_logger

from swarm.protocol.attestation import Attestation
from swarm.runtime.once import Once
from swarm.state_sync.state_version import SKETCH_EVERY, StateVersion

logger = get_logger(__name__)

MAX_SHARE = 0.005
"""Largest share of a peer's time that digests may cost."""
MAX_EVERY = 2**16
"""Most updates from one digest to the next."""
SMOOTHING = 0.3
"""Weight of the newest update in the mean time from one update to the next."""


class Attester:
    """Attests what state this peer holds: with a sketch of the weights, and a digest of all bytes.

    There is a sketch at least every `SKETCH_EVERY` updates, and a digest as often as it costs 0.5 % of the time.
    Each peer takes digests at multiples of a power of two, so all peers have some of these steps in common.

    Args:
        version: the state of this peer
        device: the device that the state is on
    """

    def __init__(self, version: StateVersion, device: torch.device):
        self._version = version
        self.tell: Callable[[Attestation], None] = lambda attestation: None
        """Called with each attestation, from any thread, while that holds the lock of the version."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cost_seconds, self._update_seconds = math.inf, math.inf
        self._updated_at: float | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="attester")
        self._running: Future | None = None
        self._complaints = Once()

    @property
    def digest_every(self) -> int:
        """The number of updates from one digest to the next."""
        every = 1
        if math.isinf(self._cost_seconds):
            return every  # the cost of a digest is not known yet
        while every < MAX_EVERY and self._cost_seconds > MAX_SHARE * every * self._update_seconds:
            every *= 2
        return every

    def attest_now(self) -> Attestation:
        """Take a sketch, and a digest if one is due, at once. The caller holds the lock of the version."""
        if self._version.step % self.digest_every:
            return self._version.attest(with_digest=False)
        began = time.perf_counter()
        attestation = self._version.attest()
        self._cost_seconds = time.perf_counter() - began
        return attestation

    def begin(self) -> None:
        """Attest for the first time, when this peer begins to train; this also measures the cost of a digest."""
        self._submit()

    def note_update(self) -> None:
        """Note an update. The caller still holds the lock, so the thread attests only after the update is complete."""
        now = time.monotonic()
        if self._updated_at is not None:
            seconds, before = now - self._updated_at, self._update_seconds
            self._update_seconds = seconds if math.isinf(before) else before + SMOOTHING * (seconds - before)
        self._updated_at = now
        is_due = self._version.step % min(SKETCH_EVERY, self.digest_every) == 0
        if is_due and (self._running is None or self._running.done()):
            self._submit()

    def _submit(self) -> None:
        ready = self._stream and torch.cuda.current_stream(self._stream.device).record_event()
        self._running = self._executor.submit(self._attest, self._version.lineage, ready)

    def _attest(self, lineage: bytes, ready: torch.cuda.Event | None) -> None:
        try:
            with self._version.lock, self._beside_training(ready):
                if self._version.lineage != lineage:
                    return  # another update came first
                self.tell(self.attest_now())
        except Exception as error:
            if self._complaints.first():
                logger.warning(f"This peer cannot report what state it holds: {error!r} (said once)")

    @contextlib.contextmanager
    def _beside_training(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """A context that computes on a GPU in a stream of its own, beside the next micro-batch."""
        if ready is None:
            yield
            return
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Wait until an attestation that has begun is done."""
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        """Attest nothing any more."""
        self._executor.shutdown(wait=True, cancel_futures=True)
