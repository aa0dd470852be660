"""What is wrong with a run, as a sentence with numbers and the same as fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a run, and what to do."""

    kind: str
    """One of `KINDS`."""
    text: str
    """What is wrong, with its numbers: one sentence without a full stop."""
    advice: str
    """What to do: one sentence without a full stop."""
    share: float
    """Which part of the workers' time it costs, 0 to 1; 0 where it costs the result and not time."""
    processes: tuple[str, ...] = ()
    """Which processes or hosts it is about, as "worker 3", "server 0", "host 1"."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the sentence by name; names carry units."""

    @property
    def sentence(self) -> str:
        """Both, for a terminal."""
        return f"{self.text}; {self.advice}"


KINDS = {
    "slow-worker": "one worker is slower than the others, which wait for it",
    "uneven-hosts": "the workers of one host are slower than those of another",
    "input-bound": "workers wait for their data",
    "network-bound": "workers wait for the network between hosts",
    "update-bound": "the optimizer takes most of the time that is no computation",
    "server-bound": "workers wait for a server that is busy or slow",
    "short-steps": "steps are so short that what every step costs is most of them",
    "script-bound": "the script spends its time between steps",
    "busy-host": "something else uses the processor",
    "diverging-loss": "the loss is no number, or rises",
    "rate-too-high": "the loss jumps or does not fall, and the learning rate is the likely reason",
    "stale": "gradients are older than the learning rate allows",
    "dying-worker": "workers have died and were replaced",
}
"""What a finding can be about."""
