"""How fast this peer computes."""

import time

SMOOTHING = 0.2


class Pace:
    """Samples per second of computing alone: waiting, validating and updating do not count."""

    def __init__(self):
        self.samples_per_second = 0.0
        self.resume()

    def resume(self) -> None:
        """Computing begins now, or begins again."""
        self._since = time.perf_counter()

    def note(self, samples: int) -> None:
        """So many have been computed since the last call or :meth:`resume`."""
        now = time.perf_counter()
        rate, self._since = samples / max(now - self._since, 1e-9), now
        before = self.samples_per_second
        self.samples_per_second = (1 - SMOOTHING) * before + SMOOTHING * rate if before else rate
