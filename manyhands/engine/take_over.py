"""All workers take over what their scripts have put into model or optimizer (`script_state.py`)."""

import struct
import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from manyhands.engine import pause, save
from manyhands.engine.engine import Engine
from manyhands.engine.handshake import LOAD, STATE
from manyhands.engine.script_state import ScriptChange
from manyhands.engine.snapshot import adopt_settings
from manyhands.engine.step import survive
from manyhands.errors import UsageError
from manyhands.replica.state import buffers
from manyhands.replica.state.state import give_whole_state
from manyhands.servers.worker import joining, saved_state


def take_over(engine: Engine, trains: bool) -> None:
    """Where no step follows, the model may have other values for a while: then only the optimizer's state is taken."""
    script = engine.script
    if script.is_late:
        script.drop()
        if engine.joined_with is not None:
            adopt_settings(engine, *engine.joined_with)
        return
    change = script.take(trains=trains or not engine.placed.is_whole)
    if change is not None:
        survive(engine, lambda: _adopt(engine, change))


def _adopt(engine: Engine, change: ScriptChange) -> None:
    """Every worker has a change; the replicas become what it says."""
    engine.clock.stop()
    if engine.served:
        pause.pause(engine, LOAD)
    else:
        pause.gather(engine, LOAD)
    _check_alike(engine, change)
    if change.values:
        _adopt_values(engine, change)
    if change.state is not None:
        _adopt_state(engine, change.state)
    engine.keep_copies()
    engine.world.exchange(
        []
    )  # a worker that does not wait for the others must not train on before they have it
    engine.script.settle()


def _adopt_values(engine: Engine, change: ScriptChange) -> None:
    replica, part, peers = engine.replica, engine.replica.part, engine.placed.peers
    speaks = peers.rank == 0 if engine.served else replica.leads or not replica.is_shared
    own = dict(part.model.named_parameters()) if engine.placed.is_whole else part.tensors()
    for name, value in change.values.items() if speaks else ():
        if name in own:
            home = own[name].detach()
            buffers.write(part.piece(name, home).of(value), home)
    if engine.served:
        joining.begin(engine.generation.servers, replica, peers)
    if change.is_whole:
        replica.kept.clear()  # what the strategy knows of the parameters that were there
    engine.progress.parted = True


def _adopt_state(engine: Engine, state: Mapping[Any, Mapping[str, Any]]) -> None:
    replica, peers = engine.replica, engine.placed.peers
    if replica.needs_closure and engine.served:
        raise UsageError(
            f"under {engine.settings.strategy} the servers have {type(replica.optimizer).__name__}'s history in parts: "
            "go on from what session.save() has written, with session.resume()"
        )
    if replica.runs_whole:
        return  # it is where it has to be
    given = replica.flat.given_states(state)
    if engine.served:
        saved_state.give(engine.generation.servers, replica, given)
        peers.comm.sum_of(0.0)
    else:
        replica.updates.restore(replica.owned, {})
        replica.updates.take_over(replica.owned, given)


def _check_alike(engine: Engine, change: ScriptChange) -> None:
    """Replicas that are the same must become the same; others may have states of their own, of the same kind."""
    kind = zlib.crc32(repr((sorted(change.values), change.state is None)).encode())
    values = 0
    for name in sorted(change.values):
        values = _digest(change.values[name], values)
    if change.state is not None:
        params = [param for group in engine.training.optimizer.param_groups for param in group["params"]]
        values = _digest([change.state.get(param, {}) for param in params], values)
    own = engine.generation.is_own and not engine.traits.synchronous
    rows = engine.world.exchange([float(kind), float(values)])
    for rank, row in enumerate(rows):
        if row[0] != rows[0][0] or (row[1] != rows[0][1] and not own):
            what = "parameters or optimizer state" if row[0] == rows[0][0] else "parts of the model"
            raise UsageError(
                f"workers 0 and {rank} have loaded different {what}; load the same file on every worker"
            )


def _digest(value: Any, before: int) -> int:
    if isinstance(value, Tensor):
        plain = value.detach().to("cpu").contiguous().reshape(-1)
        return zlib.crc32(plain.view(torch.uint8).numpy().data, before)
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            before = _digest(value[name], zlib.crc32(str(name).encode(), before))
        return before
    if isinstance(value, (list, tuple)):
        for one in value:
            before = _digest(one, before)
        return before
    if isinstance(value, float):
        return zlib.crc32(struct.pack("d", value), before)
    return zlib.crc32(repr(value).encode(), before)


def optimizer_state(engine: Engine) -> dict[str, Any]:
    """The state of the replica's optimizer as plain PyTorch has it, whole on every worker."""
    pause.pause(engine, STATE)
    optimizer, replica, world = engine.training.optimizer, engine.replica, engine.world
    if replica.runs_whole and not engine.served:
        return optimizer.state_dict()
    own, states = save.collect(engine)
    own = {name: value for name, value in own.items() if name.startswith("optimizer/")}
    own, states = engine.placed.everywhere(own, states)
    if engine.served and engine.placed.is_whole:
        own, states = saved_state.told_by_first(own, states, world)
    try:
        optimizer.state = defaultdict(dict)
        give_whole_state(dict(replica.model.named_parameters()), optimizer, own, states)
        return optimizer.state_dict()
    finally:
        engine.script.settle()
