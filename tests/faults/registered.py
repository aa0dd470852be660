"""Everything that is registered, each thing once, and what a run of it needs.

All of it comes from the registries and from traits: a strategy, a preset, a topology or a placement that somebody
registers is killed like the others, with no edit here.
"""

from manyhands import placement as placements
from manyhands import strategies
from manyhands.comm.collectives import TOPOLOGIES
from manyhands.errors import UsageError
from tests.faults import training

MOST = 12  # workers of a run
OPTIMIZERS = {None: "momentum", "lbfgs": "LBFGS"}  # by the only one that a strategy trains with

# Settings under which other code survives than under the name alone. The registries are there without them.
DEFERRED = "parameter-server:sync,cache=true,every=2=3"  # by the worker that speaks for the host
SETTINGS = (
    "hierarchical-local-sgd:groups=2",
    "gossip:every=2",
    "ad-psgd:every=3",
    "parameter-server:async",
    "parameter-server:stale,bound=1",
    "parameter-server:sync,every=2=3",
    "parameter-server:sync,cache=true",
    DEFERRED,
    "downpour:fetch=2,push=3",
    "worker-groups:groups=2,server_groups=2",
)
PLACEMENT_SETTINGS = ("sharded:shards=2", "hybrid:pipeline=1")


def every_strategy() -> list[str]:
    texts = [*strategies.STRATEGIES, *strategies.PRESETS]
    texts += [f"{strategies.DEFAULT}:topology={name}" for name in TOPOLOGIES]
    by_meaning = {strategies.parse(text): text for text in reversed([*texts, *SETTINGS])}
    return [*reversed(by_meaning.values())]


def every_placement() -> list[str]:
    by_meaning = {placements.parse(text): text for text in [*placements.PLACEMENTS, *PLACEMENT_SETTINGS]}
    return [*by_meaning.values()]


def members(placement: str) -> int:
    """How many workers the smallest replica takes."""
    return next(number for number in range(1, MOST + 1) if _mesh(placement, number))


def servers(strategy: str, placement: str = placements.DEFAULT) -> int:
    """Two, or one for each part of a replica; none where the strategy uses none."""
    return max(2, members(placement)) if strategies.parse(strategy).traits.servers else 0


def optimizer(strategy: str) -> str:
    return OPTIMIZERS[strategies.tuning(strategies.parse(strategy)).only_optimizer]


def rate(strategy: str) -> float:
    """Late gradients, and an update from every worker's own, need a smaller learning rate to learn at all."""
    traits = strategies.parse(strategy).traits
    return training.LR if traits.pooled and not traits.late else training.LR / 5


def workers(
    strategy: str, placement: str = placements.DEFAULT, *, replicas: int, apart: bool = False
) -> int | None:
    """The fewest workers that make so many replicas or more, `apart` each on several workers, and are not refused;
    None where no number of workers does."""
    for number in range(replicas, MOST + 1):
        mesh = _mesh(placement, number)
        if not mesh or mesh.replicas < replicas or (apart and mesh.members == 1):
            continue
        if _is_admitted(strategy, placement, mesh):
            return number
    return None


def outlives(strategy: str, placement: str, number: int) -> bool:
    """Whether so many workers go on when one of them dies: another replica is whole, and servers can do without it; or
    a new worker takes over its part."""
    mesh, traits = placements.parse(placement).mesh(number), strategies.parse(strategy).traits
    if mesh.members == 1:
        return mesh.replicas > 1
    return traits.parts_outlive


def _mesh(placement: str, number: int) -> placements.Mesh | None:
    try:
        return placements.parse(placement).mesh(number)
    except UsageError:
        return None


def _is_admitted(strategy: str, placement: str, mesh: placements.Mesh) -> bool:
    asked = strategies.Asked(
        workers=mesh.replicas, servers=servers(strategy, placement), optimizer=optimizer(strategy).lower()
    )
    try:
        placements.admit(placements.parse(placement), mesh, strategies.parse(strategy), asked)
        strategies.admit(strategies.parse(strategy), asked)
    except UsageError:
        return False
    return True
