"""What is watched in every step: how fast training goes, and whether the loss goes wrong.

A loss that is no number ends the run. Losses of single steps jump about, so rising is a matter of
windows: the mean of one is compared with the lowest mean so far. What counts is that half of what had
been gained is lost again, by more than the noise can explain.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from manyhands.errors import Diverged

WINDOW_STEPS = 32
NOISE = 6.0  # standard errors of a window's mean: the lowest of many means is itself chance
HIGH_WINDOWS = 2  # in a row, before the worker warns
LEAST_RISE = 0.3  # of the lowest mean: a plateau that creeps up is no divergence
STALE = 1.0  # updates that other workers made in between, on average: from here on staleness is a suspect


@dataclass(frozen=True, kw_only=True)
class Suspects:
    """What may be to blame, as the run stands."""

    rate: float
    staleness: float = 0.0
    """Updates by other workers between computing a gradient and applying it, on average: as servers have measured
    it, or as many as the strategy expects."""
    period: int = 1
    """Steps between two times that replicas agree."""

    def text(self) -> str:
        """The likely cause, and what to change."""
        if not self.rate:
            return (
                "the data differ from before, or something beside the optimizer changes the model: the learning rate "
                "is 0"
            )
        if self.staleness >= STALE:
            return (
                f"gradients were about {self.staleness:.1f} updates old when they were applied, at the learning "
                f"rate {self.rate:g}; bound the staleness, use a synchronous strategy, "
                f"or try the rate {self.rate / (1 + self.staleness):.2g}"
            )
        if self.period > 1:
            return (
                f"replicas agree only every {self.period} steps, at the learning rate {self.rate:g}; "
                f"let them agree more often, or try the rate {self.rate / 10:.2g}"
            )
        return f"the learning rate {self.rate:g} is too high; try {self.rate / 10:.2g}, or limit clip_norm"


class LossWatch:
    """Sees the loss of every step of one worker; `suspects` is asked only when something is wrong."""

    def __init__(self, rank: int, suspects: Callable[[], Suspects]) -> None:
        self._rank = rank
        self._suspects = suspects
        self._seen = 0
        self._sum = 0.0
        self._squares = 0.0
        self._last = math.nan
        self._first_mean: float | None = None
        self._lowest_mean = math.inf
        self._noise = 0.0  # of that lowest mean
        self._high_windows = 0  # in a row
        self._has_warned = False

    def see(self, step: int, loss: float) -> str | None:
        """Raise `Diverged` where the loss is no finite number; a warning, once, where it has been rising."""
        self._seen += 1
        if not math.isfinite(loss):
            raise Diverged(f"step {step} on worker {self._rank}: {self._end(loss)}")
        self._last = loss
        self._sum += loss
        self._squares += loss * loss
        return self._window() if self._seen % WINDOW_STEPS == 0 else None

    def _end(self, loss: float) -> str:
        if self._seen == 1:
            return (
                f"the very first loss is {loss}, before any update; "
                "look for such numbers in the data, or for a logarithm or a division in the model"
            )
        return f"the loss is {loss}, after {self._last:.4g} the step before: {self._suspects().text()}"

    def _window(self) -> str | None:
        mean = self._sum / WINDOW_STEPS
        variance = max(self._squares / WINDOW_STEPS - mean * mean, 0.0)
        self._sum = self._squares = 0.0
        if self._first_mean is None:
            self._first_mean = mean
        if mean < self._lowest_mean:
            self._lowest_mean = mean
            self._noise = NOISE * math.sqrt(variance / WINDOW_STEPS)
        lowest = self._lowest_mean
        gained = self._first_mean - lowest
        is_high = mean - lowest > max(gained / 2, LEAST_RISE * abs(lowest), self._noise)
        self._high_windows = self._high_windows + 1 if is_high else 0
        if self._has_warned or self._high_windows < HIGH_WINDOWS:
            return None
        self._has_warned = True
        return (
            f"the loss is rising: {mean:.4g} over the last {WINDOW_STEPS} steps, {lowest:.4g} at its lowest; "
            f"perhaps {self._suspects().text()}"
        )


class Stopwatch:
    """Samples per second of training: the time between steps counts, evaluation, saving and the first step do not."""

    def __init__(self) -> None:
        self._born = time.perf_counter()
        self.is_running = False
        self._last = 0.0
        self._laps = 0
        self._seconds = 0.0
        self._samples = 0

    def start(self) -> None:
        if not self.is_running:
            self.is_running, self._last = True, time.perf_counter()

    def stop(self) -> None:
        self.is_running = False

    def lap(self, samples: int) -> None:
        now = time.perf_counter()
        if self._laps and self.is_running:
            self._seconds += now - self._last
            self._samples += samples
        self._laps += 1
        self.is_running, self._last = True, now

    def add(self, samples: int) -> None:
        """Samples that other workers used in the time that was counted here."""
        if self._seconds:
            self._samples += samples

    def rate(self) -> float:
        return self._samples / self._seconds if self._seconds else 0.0

    def wall_s(self) -> float:
        return time.perf_counter() - self._born
