"""How replicas agree. Adding a strategy is one file and one line in this table."""

from collections.abc import Sequence

from manyhands import spec
from manyhands.errors import UnknownName, UsageError
from manyhands.strategies import layers
from manyhands.strategies.ad_psgd import ADPSGD
from manyhands.strategies.all_reduce import AllReduce
from manyhands.strategies.block_momentum import BlockMomentum
from manyhands.strategies.coding import admit_codec, admit_momentum
from manyhands.strategies.diloco import DiLoCo
from manyhands.strategies.double_buffer import DoubleBuffer
from manyhands.strategies.downpour import Downpour
from manyhands.strategies.elastic_averaging import ElasticAveraging
from manyhands.strategies.gossip import Gossip
from manyhands.strategies.hierarchical_local_sgd import HierarchicalLocalSGD
from manyhands.strategies.hogwild import Hogwild
from manyhands.strategies.interface import Asked, Strategy
from manyhands.strategies.known_elsewhere import KNOWN_ELSEWHERE
from manyhands.strategies.local_sgd import LocalSGD
from manyhands.strategies.parameter_server import ParameterServer
from manyhands.strategies.presets import PRESETS
from manyhands.strategies.sandblaster import Sandblaster
from manyhands.strategies.single import Single
from manyhands.strategies.tournament import Tournament
from manyhands.strategies.traits import Traits
from manyhands.strategies.tuning import Tuning, tuning
from manyhands.strategies.worker_groups import WorkerGroups

__all__ = [
    "DEFAULT",
    "PRESETS",
    "STRATEGIES",
    "Asked",
    "Strategy",
    "Traits",
    "Tuning",
    "admit",
    "admit_codec",
    "admit_model",
    "admit_momentum",
    "describe",
    "parse",
    "tuning",
]

STRATEGIES: dict[str, type[Strategy]] = {
    "single": Single,
    "all-reduce": AllReduce,
    "double-buffer": DoubleBuffer,
    "local-sgd": LocalSGD,
    "hierarchical-local-sgd": HierarchicalLocalSGD,
    "block-momentum": BlockMomentum,
    "elastic-averaging": ElasticAveraging,
    "diloco": DiLoCo,
    "hogwild": Hogwild,
    "gossip": Gossip,
    "ad-psgd": ADPSGD,
    "tournament": Tournament,
    "parameter-server": ParameterServer,
    "worker-groups": WorkerGroups,
    "downpour": Downpour,
    "sandblaster": Sandblaster,
}

DEFAULT = "all-reduce"


def parse(text: str) -> Strategy:
    """`all-reduce:topology=ring` → the strategy with its settings; so does the preset `ring`."""
    name, colon, settings = text.partition(":")
    preset = PRESETS.get(name.strip())
    if preset:
        text = preset.strategy + (("," if ":" in preset.strategy else ":") + settings if colon else "")
    elif name.strip() not in STRATEGIES:
        raise UnknownName("strategy", name.strip(), [*STRATEGIES, *PRESETS], KNOWN_ELSEWHERE)
    return spec.parse(text, STRATEGIES, "strategy")


def describe(strategy: Strategy) -> str:
    """The text that `parse` turns back into this strategy."""
    name = next(name for name, kind in STRATEGIES.items() if type(strategy) is kind)
    return spec.describe(strategy, name)


def admit(strategy: Strategy, asked: Asked) -> None:
    """Refuse, before any process starts, what cannot run as asked."""
    name = describe(strategy)
    if asked.servers < 0:
        raise UsageError(f"servers={asked.servers}: it must be 0 or more")
    if strategy.traits.servers is not None and not asked.servers:
        raise UsageError(f"{name} needs --servers 1 or more")
    if strategy.traits.servers is None and asked.servers:
        raise UsageError(
            f"{name} uses no servers, and {asked.servers} were asked for; leave --servers out, or choose a strategy "
            "with servers"
        )
    only = tuning(strategy).only_optimizer
    if only and asked.optimizer not in (None, only):
        raise UsageError(
            f"{name} trains with the optimizer {only} alone, not with {asked.optimizer}; use {only}, or another "
            "strategy"
        )
    strategy.check(asked)


def admit_copies(strategy: Strategy, *, have_hosts: bool) -> None:
    """Refuse copies where they would be of no use: other hosts that may come and go are all that they are for."""
    service = strategy.traits.servers
    if service and service.copies and not have_hosts:
        raise UsageError(
            f"copies={service.copies} is for `launch --hosts`: on one host, what a dead server had is in the host's "
            "memory anyway, and under torchrun, MPI and Slurm a run ends with its first death; leave copies out"
        )


def admit_model(strategy: Strategy, parameters: Sequence[str]) -> None:
    """Refuse a model, by the names of its parameters, that lacks a layer which the settings name."""
    service = strategy.traits.servers
    for layer, _ in service.every if service else ():
        layers.check(layer, parameters)
