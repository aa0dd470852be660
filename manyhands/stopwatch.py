"""How fast training goes, without what is not training."""

import time


class Stopwatch:
    """Samples per second of training: the time between steps counts, evaluation, saving and the first step do not."""

    def __init__(self) -> None:
        self._born = time.perf_counter()
        self._last: float | None = None
        self._laps = 0
        self._seconds = 0.0
        self._samples = 0

    def start(self) -> None:
        if self._last is None:
            self._last = time.perf_counter()

    def stop(self) -> None:
        self._last = None

    def lap(self, samples: int) -> None:
        now = time.perf_counter()
        if self._laps and self._last is not None:
            self._seconds += now - self._last
            self._samples += samples
        self._laps += 1
        self._last = now

    def add(self, samples: int) -> None:
        """Samples of others, in the time that was counted here."""
        if self._seconds:
            self._samples += samples

    def rate(self) -> float:
        return self._samples / self._seconds if self._seconds else 0.0

    def wall_s(self) -> float:
        return time.perf_counter() - self._born
