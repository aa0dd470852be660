"""How often a session saves by itself: every so many epochs, steps or seconds, as a person says it."""

import re
import time
from dataclasses import dataclass

from manyhands.engine.progress import Progress
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

    def is_due(self, progress: Progress, *, steps: int) -> bool:
        """Whether, after so many steps, a multiple of the interval was reached since the last save."""
        if self.measure == "seconds":
            return time.monotonic() - progress.saved_s >= self.every
        if self.measure == "steps":
            return steps // self.every > progress.saved_steps // self.every
        return progress.epoch // self.every > progress.saved_epochs // self.every

    def is_due_after_epoch(self, progress: Progress) -> bool:
        """Whether all workers, without asking each other, save at the end of an epoch."""
        return self.measure == "epochs" and self.is_due(progress, steps=0)


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
