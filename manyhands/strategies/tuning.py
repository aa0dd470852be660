"""What goes into an update under each strategy, and what it trains with where the person has not said.

The rule for the learning rate (`job/learning_rate.py`) works on these facts. A strategy that is not named here has the
first rule: an update from all workers' batches where gradients are pooled, else from one, and none late.
"""

from dataclasses import dataclass
from functools import singledispatch

from manyhands.strategies.double_buffer import DoubleBuffer
from manyhands.strategies.downpour import Downpour
from manyhands.strategies.hogwild import Hogwild
from manyhands.strategies.interface import Strategy
from manyhands.strategies.local_sgd import LocalSGD
from manyhands.strategies.parameter_server import ParameterServer
from manyhands.strategies.sandblaster import Sandblaster
from manyhands.strategies.worker_groups import WorkerGroups


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Facts for the learning rate, and defaults."""

    batches: int = 1
    """How many workers' batches go into one update."""
    late: int = 0
    """How many updates of other workers usually come between a gradient and its own update."""
    batch: int = 32
    """Samples per worker and step."""
    optimizer: str | None = None
    """None: what fits the model."""
    only_optimizer: str | None = None
    """The one optimizer that the strategy can train with, by its name in small letters; None: any."""


@singledispatch
def tuning(strategy: Strategy, workers: int = 1, hosts: int = 1) -> Tuning:
    """The facts for so many workers on so many hosts."""
    return Tuning(batches=workers if strategy.traits.pooled else 1)


@tuning.register
def _(strategy: DoubleBuffer, workers: int = 1, hosts: int = 1) -> Tuning:
    return Tuning(batches=workers, late=1)


@tuning.register
def _(strategy: LocalSGD, workers: int = 1, hosts: int = 1) -> Tuning:
    """Averaging after every step is an update from all workers' batches; otherwise each is made from one."""
    return Tuning(batches=workers if strategy.period == 1 else 1)


@tuning.register
def _(strategy: Hogwild, workers: int = 1, hosts: int = 1) -> Tuning:
    return Tuning(late=-(-workers // hosts) - 1)  # every host has its own replica


@tuning.register
def _(strategy: ParameterServer, workers: int = 1, hosts: int = 1) -> Tuning:
    if strategy.traits.pooled:
        return Tuning(batches=workers)
    pushing = hosts if strategy.cache else workers
    return Tuning(batches=workers // pushing, late=pushing - 1)


@tuning.register
def _(strategy: WorkerGroups, workers: int = 1, hosts: int = 1) -> Tuning:
    beside = strategy.groups // strategy.server_groups - 1
    # Of `exchange_every` updates that are told together the first waits for all others, the last for none.
    told = (strategy.server_groups - 1) * (strategy.exchange_every - 1) // 2
    # Asked also of plans that `check` refuses.
    return Tuning(batches=max(1, workers // strategy.groups), late=beside + told)


@tuning.register
def _(strategy: Downpour, workers: int = 1, hosts: int = 1) -> Tuning:
    """A gradient's parameters are (fetch − 1) / 2 steps old, and it waits (push − 1) / 2 steps for its push; each of
    the other workers makes an update in every `push` steps."""
    late = -(-(workers - 1) * (strategy.fetch + strategy.push) // (2 * strategy.push))
    return Tuning(batches=strategy.push, late=late, optimizer="adagrad:lr=0.02")


@tuning.register
def _(strategy: Sandblaster, workers: int = 1, hosts: int = 1) -> Tuning:
    return Tuning(
        batches=workers,
        batch=512,  # steps learn the curvature from each other: their gradients must be alike
        optimizer="lbfgs:max_iter=20,history_size=10,line_search_fn=strong_wolfe",
        only_optimizer="lbfgs",
    )
