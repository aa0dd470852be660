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
        """How many workers there are now; deaths and joins change it."""
        return self.world.size

    @property
    def is_main(self) -> bool:
        """Whether this worker is the one that prints and writes for all."""
        return self.rank == 0

    @property
    def world(self) -> World:
        """All workers as this one sees them: their hosts, and the launcher that started them."""
        return self.engine.world

    @property
    def model(self) -> nn.Module:
        """The model that the session was given; under a placement, with this worker's part of it."""
        return self.engine.training.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that the session was given; of a list, the one that runs them all."""
        return self.engine.training.optimizer

    @property
    def out(self) -> Path | None:
        """The run's directory; None where no launcher of ours made one."""
        return self.engine.settings.out

    @property
    def steps(self) -> int:
        """How many steps the run has made, those before a `resume` included."""
        return self.engine.progress.steps

    @property
    def pace(self) -> int:
        """How many steps the workers that the run began with would have made for the samples that it has used: what
        schedules go by. It is `steps` as long as no worker dies or joins."""
        return self.engine.progress.pace

    @property
    def epoch(self) -> int:
        """How many epochs are complete: `while session.epoch < 10:` also goes on after a `resume`."""
        return self.engine.progress.epoch

    @property
    def samples(self) -> int:
        """How many samples the steps of all workers have used."""
        return self.engine.progress.samples

    @property
    def position(self) -> int:
        """How many samples of this epoch the steps of all workers have used."""
        return self.engine.progress.position

    @property
    def measured(self) -> dict[str, float]:
        """The results of the last `evaluate`, by name."""
        return self.engine.progress.measured

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called: the model is the script's alone again."""
        return self.engine.is_closed
