"""How fast this peer computes."""

import time

SMOOTHING = 0.2


class Pace:
    """Samples per second of computing alone: waiting, validating and updating do not count."""

    def __init__(self):
        self.samples_per_second = 0.0
        self.seconds = 0.0
        """Of computing for the present step."""
        self.resume()

    def take_seconds(self) -> float:
        """Of computing for the present step, which ends; the next one has none yet."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def resume(self) -> None:
        """Computing begins now, or begins again."""
        self._since = time.perf_counter()

    def note(self, samples: int) -> None:
        """So many have been computed since the last call or :meth:`resume`."""
        now = time.perf_counter()
        seconds, self._since = max(now - self._since, 1e-9), now
        self.seconds += seconds
        rate = samples / seconds
        before = self.samples_per_second
        self.samples_per_second = (1 - SMOOTHING) * before + SMOOTHING * rate if before else rate
