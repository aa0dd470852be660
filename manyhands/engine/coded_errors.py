"""What codecs have left out of gradients, in checkpoints.

Each host has its own, and all that training depends on is their sum: the gradients that are still to come. So the sum
is saved, and when a run saves or resumes, the first host takes over all of it. The run that goes on and the one that
resumes are the same, and a run may resume on another number of hosts.
"""

from collections.abc import Mapping

from torch import Tensor

from manyhands.comm.coded import CodedHosts
from manyhands.engine.engine import Engine
from manyhands.replica.replica import Replica

PREFIX = "error/"


def collect(engine: Engine) -> dict[str, Tensor]:
    """By parameter, for worker 0; all workers must ask."""
    errors, world = engine.replica.errors, engine.placed.peers
    if errors is None:
        return {}
    if isinstance(engine.comm, CodedHosts):
        engine.comm.forget()
    found: dict[str, Tensor] = {}
    if engine.replica.leads:
        whole = errors.whole(engine.progress.steps_here)
        engine.comm.sum_(whole)
        errors.become(whole if world.rank in world.hosts[0] else None)
        found = {f"{PREFIX}{name}": value for name, value in errors.by_name(whole).items()}
    world.host.barrier()
    return found if world.rank == 0 else {}


def distribute(engine: Engine, tensors: Mapping[str, Tensor]) -> None:
    """The inverse: worker 0 has the tensors."""
    errors, world = engine.replica.errors, engine.placed.peers
    if errors is None:
        return
    if engine.replica.leads:
        saved = {n.removeprefix(PREFIX): value for n, value in tensors.items() if n.startswith(PREFIX)}
        errors.become(errors.from_names(saved) if world.rank == 0 and saved else None)
    world.host.barrier()


def inherit(engine: Engine, replica: Replica, old: Replica | None) -> None:
    """A host that has had errors in the generation before keeps them; all workers of the host must ask."""
    if replica.errors is None:
        return
    if replica.leads and old is not None and old.errors:
        replica.errors.inherit(old.errors, engine.progress.steps_here)
    engine.placed.peers.host.barrier()
