"""What a session is asked to be, and what it trains."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhands import placement, strategies
from manyhands.checkpoint.publish import KEEP
from manyhands.comm import codecs
from manyhands.engine import intervals
from manyhands.replica.part import Loss


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the script trains: its own objects, as plain PyTorch has them."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    scheduler: Any = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a session trains."""

    strategy: str = strategies.DEFAULT
    placement: str = placement.DEFAULT
    codec: str = codecs.DEFAULT
    example: Any = None
    """A batch on which a placement may measure the model."""
    samples: Callable[[Any], int] | None = None
    """How many samples a batch has, where its first dimension does not say it."""
    clip_norm: float | None = None
    skip_nonfinite: int = 0
    """Steps that may be left out because their gradient is not finite, before one ends the run."""
    seed: int = 0
    random_seed: int | None = None
    """From which every worker derives random numbers of its own; None: it draws what the script has seeded."""
    save_every: str = intervals.NEVER
    keep: int = KEEP
    """How many checkpoints remain."""
    out: Path | None = None
    """The run's directory."""
    logged: bool = False
    """Whether workers log their updates, so that the others can finish them, also outside a run
    whose members may change."""
