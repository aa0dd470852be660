"""How far a session has come: all of its counters, in one place.

A worker that joins adopts the progress of another worker, and a run that resumes adopts that of a
checkpoint: both through `Progress.adopt`.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A worker's own: no other worker adopts these.
_OWN = {
    "steps_here",
    "most_steps",
    "rates",
    "alone_until",
    "uncounted",
    "last_loss",
    "last_result",
    "caught_up_at",
    "outside_before",
    "takeovers",
    "saved_s",
}


@dataclass(kw_only=True)
class Progress:
    """The counters of one worker's session."""

    seed: int
    full: int
    """Batches that make a round of data, however many workers there are later."""

    # Steps
    steps: int = 0
    steps_here: int = 0
    """Of those, in this generation."""
    most_steps: int = 0
    """Where each worker makes steps of its own, those of the worker with most: after an epoch all count so many."""
    pace: int = 0
    """Steps that the workers with whom the run began would have made by now: schedules go by it (`pace.py`)."""
    commits: int = 0
    """Steps, and agreements of replicas, that all workers have committed."""
    alone_until: int = 0
    """Commits up to which the other workers are ahead, by steps that need no other worker."""
    has_regrouped: bool = False
    """Whether workers have died or joined."""
    rates: tuple[int, list[float]] | None = None
    """Since then: the optimizer's, after the last step, with the place in the script."""
    parted: bool = False
    """Whether there were steps since the replicas last agreed."""

    # Data
    epoch: int = 0
    position: int = 0
    """Samples of this epoch that steps have used."""
    samples: int = 0
    samples_before: int = 0
    """Of those, before this epoch."""
    skipped: int = 0
    """Steps that were left out because their gradient was not finite."""
    uncounted: int = 0
    """Samples of this worker that the other workers have not heard of."""

    # Calls of the script
    calls: int = 0
    """Of what all scripts do equally often: loops, evaluations, checkpoints."""
    caught_up_at: int = 0
    """Calls that the other workers made before this worker joined; it skips them."""
    outside: int = 0
    """Steps that the script has made outside of loops."""
    outside_before: int = 0
    """Of those, the ones that the other workers made before this worker joined."""
    takeovers: int = 0
    """How often this worker has adopted the progress of another worker."""

    # Results
    last_loss: float = math.nan
    last_result: Any = None
    """What the last step of this worker with data returned to the script."""
    measured: dict[str, float] = field(default_factory=dict)

    # Checkpoints
    resumed: dict[str, Any] | None = None
    """What `resume` returned."""
    directory: Path | None = None
    """Where checkpoints were last saved or looked for."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the script last put into one."""
    saved_steps: int = 0
    saved_epochs: int = 0
    saved_s: float = field(default_factory=time.monotonic)

    @property
    def is_early(self) -> bool:
        """Whether the step to come is one of the first, and seldom a later one."""
        return not self.steps & (self.steps + 1)

    def begin_epoch(self) -> None:
        """The samples before those of this epoch stay counted, whichever worker dies in it."""
        self.samples_before = self.samples - self.position

    def end_epoch(self, samples: int | None) -> None:
        """All scripts have ended their loop; the epoch had so many samples, where they can be counted."""
        if samples is not None:
            self.samples = self.samples_before + samples  # what dead workers had used does not count
        self.calls += 1
        self.epoch += 1
        self.position = 0

    def mark_saved(self) -> None:
        """The state of this moment is in a checkpoint."""
        self.saved_steps, self.saved_epochs = self.steps, self.epoch
        self.saved_s = time.monotonic()

    def encode(self) -> dict[str, Any]:
        """What another worker adopts, as plain values."""
        values = {name: value for name, value in vars(self).items() if name not in _OWN}
        return {**values, "directory": str(self.directory) if self.directory else None}

    def adopt(self, values: Mapping[str, Any]) -> None:
        """Take over what `encode` gave, or some of it; this worker skips the calls that it counts."""
        shared = dict(values)
        self.caught_up_at = shared.pop("calls", self.caught_up_at)
        self.outside_before = shared.pop("outside", self.outside_before)
        if "directory" in shared:
            shared["directory"] = Path(shared["directory"]) if shared["directory"] else None
        if "measured" in shared:  # JSON has no NaN
            shared["measured"] = {
                name: math.nan if value is None else value for name, value in shared["measured"].items()
            }
        for name, value in shared.items():
            setattr(self, name, value)
        self.saved_s = time.monotonic()
