"""Where a run is: what a script may ask its session at any time, without a word to another worker."""

from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from manyhands.cluster.worker.world import World
from manyhands.engine.engine import Engine


class Whereabouts:
    """The properties of a session that only read."""

    engine: Engine

    @property
    def rank(self) -> int:
        """Which worker this is, of `workers`; it may change when another worker dies."""
        return self.world.rank

    @property
    def workers(self) -> int:
        return self.world.size

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one that prints and writes for all."""
        return self.rank == 0

    @property
    def world(self) -> World:
        return self.engine.world

    @property
    def model(self) -> nn.Module:
        return self.engine.training.model

    @property
    def optimizer(self) -> Optimizer:
        return self.engine.training.optimizer

    @property
    def out(self) -> Path | None:
        """The run's directory."""
        return self.engine.settings.out

    @property
    def steps(self) -> int:
        return self.engine.progress.steps

    @property
    def epoch(self) -> int:
        return self.engine.progress.epoch

    @property
    def samples(self) -> int:
        """How many samples the steps of all workers have used."""
        return self.engine.progress.samples

    @property
    def position(self) -> int:
        """How many samples of this epoch."""
        return self.engine.progress.position

    @property
    def measured(self) -> dict[str, float]:
        """The results of the last evaluation."""
        return self.engine.progress.measured

    @property
    def is_closed(self) -> bool:
        return self.engine.is_closed
