"""How one replica is laid over workers: a table of placements, and how their names are read."""

from manyhands import spec
from manyhands.errors import UsageError
from manyhands.placement.hybrid import Hybrid
from manyhands.placement.mesh import Mesh
from manyhands.placement.pipeline.pipeline import Pipeline
from manyhands.placement.placement import Placement
from manyhands.placement.sharded.sharded import Sharded
from manyhands.placement.tensor.tensor import Tensor
from manyhands.placement.whole import Whole
from manyhands.servers.protocol.service import Service
from manyhands.strategies.interface import Asked, Strategy

__all__ = ["DEFAULT", "PLACEMENTS", "Mesh", "Placement", "admit", "describe", "parse"]

PLACEMENTS: dict[str, type[Placement]] = {
    "single": Whole,
    "pipeline": Pipeline,
    "tensor": Tensor,
    "sharded": Sharded,
    "hybrid": Hybrid,
}

DEFAULT = "single"

_KNOWN_ELSEWHERE = {
    **dict.fromkeys(("fsdp", "fsdp2", "fully-sharded", "zero", "zero1", "zero2", "zero3"), "sharded"),
    **dict.fromkeys(("deepspeed", "zero-1", "zero-2", "zero-3"), "sharded"),
    **dict.fromkeys(("tp", "megatron", "tensor-parallel"), "tensor"),
    **dict.fromkeys(("pp", "gpipe", "pipedream", "model-parallel"), "pipeline"),
    **dict.fromkeys(("3d", "megatron-3d"), "hybrid"),
    **dict.fromkeys(("ddp", "replicated", "whole", "none", "data-parallel"), "single"),
}


def parse(text: str) -> Placement:
    """`pipeline:stages=2,microbatches=4` → the placement with its settings."""
    return spec.parse(text, PLACEMENTS, "placement", _KNOWN_ELSEWHERE)


def admit(placement: Placement, mesh: Mesh, strategy: Strategy, asked: Asked) -> None:
    """Refuse, before any process starts, what a placement and a strategy cannot do together."""
    if mesh.members == 1:
        return
    name = describe(placement)
    traits = strategy.traits
    if not traits.lockstep or traits.replica == "open":
        raise UsageError(
            f"the workers of {name} take every step together, and under this strategy workers step alone; "
            "choose a strategy that waits for all workers in every step"
        )
    if traits.servers is not None:
        _admit_servers(name, mesh, traits.servers, asked.servers)
    if asked.optimizer == "lbfgs":
        raise UsageError(
            f"lbfgs needs the whole gradient on one worker, and {name} spreads it; use another optimizer"
        )
    placement.check(asked)


def _admit_servers(name: str, mesh: Mesh, service: Service, servers: int) -> None:
    """Each part of a replica has servers of its own."""
    if mesh.shards > 1:
        raise UsageError(
            f"{name} spreads parameters and optimizer state over the workers, and servers would have them once more; "
            "choose a strategy without servers"
        )
    rule = service.rule
    if service.cached or rule.teams * rule.server_groups > 1:
        raise UsageError(
            f"{name} has servers for each of the {mesh.members} parts of a replica, which serve their workers "
            "one by one; choose a strategy without groups and caches"
        )
    each, left = divmod(servers, mesh.members)
    if servers and (left or not each):
        fits = sorted({max(each, 1) * mesh.members, (each + 1) * mesh.members})
        raise UsageError(
            f"{servers} servers cannot serve the {mesh.members} parts of a replica of {name}, each with servers of its "
            f"own: {servers} = {each} × {mesh.members} + {left}; use --servers {' or '.join(map(str, fits))}"
        )


def describe(placement: Placement) -> str:
    """The text that `parse` turns back into this placement."""
    name = next(name for name, kind in PLACEMENTS.items() if type(placement) is kind)
    return spec.describe(placement, name)
