"""How a replica of a new generation takes over the state of those before it; and how a step is taken back.

The flat vectors of all generations are alike, since places depend on the model alone, so most of it is copying. What
only the owner of a span knew (numbers, odd-shaped tensors) is gathered from the owners that are left.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor
from torch.optim import Optimizer

from manyhands.cluster.worker.world import World
from manyhands.comm.comm import Comm
from manyhands.replica.optimizer.twins import bare_step, settings_of, twin
from manyhands.replica.replica import Replica
from manyhands.replica.state import whole_optimizer
from manyhands.replica.state.buffers import dense, home, put
from manyhands.replica.state.state import from_first
from manyhands.replica.state.transcoding import (
    States,
    put_together,
    take_apart,
)


def inherit(replica: Replica, old: Replica | None, comm: Comm, world: World, have: Sequence[bool]) -> None:
    """Take over what `old` was, or, where there is none, what the first worker that has something has.

    A worker that shares a replica gets all from the others of its host, or, where none of them has it, from another
    host; a worker with its own replica goes on with that. Workers that share one without waiting for each other have
    optimizer state of their own: those that are left keep it, and a new one begins with that of `source`.
    """
    source = list(have).index(True)
    is_new, some_new = old is None, not all(have)
    vectors, states = [replica.params, replica.constants], list(replica.updates.vectors.values())
    has_own_state = not replica.steps_together
    if not has_own_state or not replica.is_shared:
        vectors += states
    if old is not None and (replica.leads or has_own_state):
        for name, vector in replica.updates.vectors.items():
            vector.copy_(old.updates.vectors[name])
    if replica.is_shared:
        host = next(index for index, ranks in enumerate(world.hosts) if source in ranks)
        if not all(have[ranks[0]] for ranks in world.hosts):
            for vector in vectors:
                from_first(vector, replica, comm, host)
        world.host.barrier()
        for vector in states if has_own_state and some_new else ():
            _take(vector, world, source, is_new)
    elif some_new:
        for vector in vectors:
            _take(vector, world, source, is_new)
    if some_new:
        for buffer in dense(replica.part.buffers()):
            _take(buffer, world, source, is_new)
        if replica.runs_whole:
            whole_optimizer.hand_on(replica.optimizer, world, source, is_new=is_new)
    _inherit_states(replica, old, world, source)
    _inherit_kept(replica, old, world, source, some_new)


def _take(vector: Tensor, world: World, source: int, is_new: bool) -> None:
    """One worker's vector to those who are new."""
    if not vector.numel():
        return
    values = home(vector.detach())
    world.comm.copy_(values, source)
    if is_new:
        put(values, vector)


def _inherit_states(replica: Replica, old: Replica | None, world: World, source: int) -> None:
    if old is not None and old.is_logged:
        old.updates.take_from_others(old.spans)
    states, loose = take_apart(old.updates.export() if old is not None else {})
    everyone: list[States] = [
        msgspec.json.decode(row, type=States) for row in world.gather(msgspec.json.encode(states))
    ]
    blobs = world.gather(tensors_to_bytes(loose) if loose else b"")
    if replica.steps_together:
        states = {name: state for part in everyone for name, state in part.items()}
        loose = {name: value for blob in blobs if blob for name, value in tensors_from_bytes(blob).items()}
        _fill_in(states, loose, replica, old.steps if old is not None else 0)
    elif old is None:
        states, loose = everyone[source], tensors_from_bytes(blobs[source]) if blobs[source] else {}
    replica.updates.restore(replica.owned, put_together(states, loose))


def _after(optimizer: Optimizer, steps: int) -> dict[str, Any]:
    """The state that an optimizer has for a parameter after so many steps, found by making them on a toy."""
    trial, step = twin(optimizer), bare_step(optimizer)
    toy = torch.ones(2, 2)
    trial.param_groups = [{**settings_of(optimizer.param_groups[0]), "params": [toy]}]
    with torch.no_grad():
        for _ in range(steps):
            toy.grad = torch.full_like(toy, 0.5)
            step(trial)
    return {
        name: None if isinstance(value, Tensor) and value.numel() > 1 else value
        for name, value in trial.state[toy].items()
    }


def _fill_in(states: States, loose: dict[str, Tensor], replica: Replica, steps: int) -> None:
    """What a dead owner alone knew of its parameters: as another one of the same group has it, where that is a number.

    Such numbers count steps, and are the same for all parameters that get a gradient in every step. Where no owner is
    left at all, they are what so many steps make of them.
    """
    if not states and steps:
        first = replica.layout.places[0].name
        found, tensors = take_apart({first: _after(replica.optimizer, steps)})
        states |= found
        loose |= tensors
    for place in replica.layout.places:
        like = next(
            (p.name for p in replica.layout.places if p.group == place.group and p.name in states), None
        )
        if place.name in states or like is None:
            continue
        states[place.name] = dict(states[like])
        for name in states[like]:
            value = loose.get(f"{like}/{name}")
            if value is not None and value.numel() == 1:
                loose[f"{place.name}/{name}"] = value
            elif value is not None:
                del states[place.name][name]


def _inherit_kept(replica: Replica, old: Replica | None, world: World, source: int, some_new: bool) -> None:
    """What the strategy keeps is each worker's own; new workers begin with that of another."""
    if old is not None:
        replica.kept.update(old.kept)
        replica.eval_batch = old.eval_batch
    if some_new:
        kept = {name: value.contiguous() for name, value in replica.kept.items()}
        blob = world.gather(tensors_to_bytes(kept) if kept and world.rank == source else b"")[source]
        if old is None and blob:
            replica.kept.update(tensors_from_bytes(blob))
    steps = [int(row[0]) for row in world.exchange([float(old.steps if old else 0)])]
    if replica.steps_together:
        replica.steps = max(steps)  # a worker may have died before all had got out of the last one
    else:
        replica.steps = old.steps if old is not None else steps[source]


class _Copied:
    """Parameters, and what optimizer and strategy keep beside them, in this worker's own memory."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._vectors = [vector.clone() for vector in self._torn()]
        self._states = {
            param: {name: _copied(value) for name, value in values.items()}
            for param, values in replica.updates.export().items()
        }
        self._whole = whole_optimizer.Captured(replica.optimizer) if replica.runs_whole else None
        self._kept = {name: value.clone() for name, value in replica.kept.items()}

    def _torn(self) -> list[Tensor]:
        return [self._replica.params, *self._replica.updates.vectors.values()]

    def put_back(self) -> None:
        replica = self._replica
        with torch.no_grad():
            for vector, copy in zip(self._torn(), self._vectors, strict=True):
                vector.copy_(copy)
        replica.updates.restore(replica.owned, self._states)
        if self._whole:
            self._whole.restore()
        replica.kept.clear()
        replica.kept.update(self._kept)


class Undo:
    """How a worker's own replica becomes again what it is now, before a step in which it may be torn."""

    def __init__(self, replica: Replica, put_back: Callable[[], None] | None = None) -> None:
        """`put_back` does that for the large vectors, where there is a copy of them already."""
        self._replica = replica
        self._steps = replica.steps
        self._put_back = put_back or _Copied(replica).put_back
        self._buffers = [buffer.clone() for buffer in dense(replica.part.buffers())]
        self._settings = replica.settings
        self._eval_batch = replica.eval_batch
        self._random = torch.get_rng_state()

    def restore(self) -> None:
        replica = self._replica
        self._put_back()
        replica.steps = self._steps
        with torch.no_grad():
            for buffer, copy in zip(dense(replica.part.buffers()), self._buffers, strict=True):
                buffer.copy_(copy)
        replica.settings = self._settings
        replica.eval_batch = self._eval_batch
        torch.set_rng_state(self._random)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
