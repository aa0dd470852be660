"""How often a session saves by itself: every so many epochs, steps or seconds, written as a person says it."""

import re
import time
from dataclasses import dataclass

from manyhands.errors import UsageError

NEVER = "never"

# What a person may write, and how much of which measure it is.
_UNITS = {
    "epoch": ("epochs", 1),
    "epochs": ("epochs", 1),
    "step": ("steps", 1),
    "steps": ("steps", 1),
    "s": ("seconds", 1),
    "second": ("seconds", 1),
    "seconds": ("seconds", 1),
    "min": ("seconds", 60),
    "minute": ("seconds", 60),
    "minutes": ("seconds", 60),
    "h": ("seconds", 3600),
    "hour": ("seconds", 3600),
    "hours": ("seconds", 3600),
}


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Every so many `epochs`, `steps` or `seconds`."""

    every: int
    measure: str


def parse(text: str) -> Interval | None:
    """`epoch`, `2 epochs`, `500 steps`, `30s`, `10 min`, `2h`; None for `never`.

    >>> parse("10 min")
    Interval(every=600, measure='seconds')
    """
    if text.strip() == NEVER:
        return None
    found = re.fullmatch(r"\s*(\d*)\s*([a-z]+)\s*", text)
    if not found or found[2] not in _UNITS or int(found[1] or 1) < 1:
        raise UsageError(
            f"save_every={text!r}: write how often to save as epoch, 2 epochs, 500 steps, 30s, 10min, 2h or {NEVER}"
        )
    measure, factor = _UNITS[found[2]]
    return Interval(every=int(found[1] or 1) * factor, measure=measure)


class Cadence:
    """Whether it is time to save again."""

    def __init__(self, interval: Interval | None) -> None:
        self.interval = interval
        self.mark(steps=0, epochs=0)

    def mark(self, *, steps: int, epochs: int) -> None:
        """What is there now is saved, or came from a checkpoint."""
        self.saved_steps, self.saved_epochs = steps, epochs
        self._saved_s = time.monotonic()

    def is_due(self, *, steps: int, epochs: int) -> bool:
        """Whether a multiple of the interval was reached since the last mark."""
        if self.interval is None:
            return False
        every, measure = self.interval.every, self.interval.measure
        if measure == "seconds":
            return time.monotonic() - self._saved_s >= every
        reached, saved = (steps, self.saved_steps) if measure == "steps" else (epochs, self.saved_epochs)
        return reached // every > saved // every

    def is_due_at_the_end_of(self, epoch: int) -> bool:
        """Whether all workers, without asking each other, save after so many epochs."""
        is_by_epoch = self.interval is not None and self.interval.measure == "epochs"
        return is_by_epoch and self.is_due(steps=0, epochs=epoch)

    def is_behind(self, steps: int) -> bool:
        """Whether, where one saves at all, there were steps since."""
        return self.interval is not None and steps != self.saved_steps
