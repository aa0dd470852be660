"""The placement of a session: the mesh that its workers form, and this worker's process groups and part in it."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import placement as placements
from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from manyhands.placement.assembly import Assembly
from manyhands.placement.model_parallel import ModelParallelPart
from manyhands.placement.presence import Phase
from manyhands.placement.process_groups import ProcessGroups
from manyhands.replica.barrier_group import BarrierGroup
from manyhands.replica.layout import SPAN_BYTES, Layout
from manyhands.replica.parameters import lay_out_model
from manyhands.replica.part import Loss
from manyhands.replica.replica import Replica
from manyhands.replica.state import buffers
from manyhands.replica.state.state import (
    States,
    begin_alike,
    give_back_state,
    give_whole_state,
    model_tensors,
)

MODEL = "model/"  # how the names of the model's own tensors begin in a checkpoint


def _compile(stance: str) -> None:
    """Compiled code (`torch.compile`) does not ask for tensors that are elsewhere; what it was made of does."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance(stance)


class PlacedModel:
    """What a session has to know of its placement; with the model whole on every worker there is nothing to do.

    `example` is a batch on which a placement may measure the model.
    """

    def __init__(self, text: str, workers: int, rank: int, example: Any = None) -> None:
        self.placement = placements.parse(text)
        self.mesh = self.placement.mesh(workers)
        self.is_whole = (
            self.mesh.members == 1
        )  # whether every worker has all of the model, whatever their number
        self.example = example
        self._rank = rank
        self._groups: ProcessGroups | None = None
        self._assembly: Assembly | None = None
        self._part: ModelParallelPart | None = None
        self._layout: Layout | None = None  # of the whole model
        self._shapes: list[Any] = []  # of the whole model's parameters
        self._is_at_work = False
        self.on_use: Callable[[Any], None] = lambda inputs: None
        """Told of the inputs with which a script uses a model in parts outside of a step."""

    @property
    def awaits_batch(self) -> bool:
        """Whether the model is to be divided by what a batch shows, and there is none yet."""
        return not self.is_whole and self.placement.by_batch and self.example is None

    @property
    def feed(self) -> int:
        """Which of the step's batches is this worker's."""
        return self.mesh.feed(self._rank)

    @property
    def replica(self) -> int:
        """Which of the replicas this worker has a part of."""
        return self.mesh.at(self._rank).replica

    @property
    def part_number(self) -> int:
        """Which of a replica's parts this worker has."""
        return self._rank % self.mesh.members

    @property
    def counts(self) -> bool:
        """Of the workers that compute the same samples, one counts them."""
        return self._rank % self.mesh.copies == 0

    @property
    def leads(self) -> bool:
        """Whether this worker assembles the state of its replica."""
        return self._assembly is None or self._assembly.leads

    def shapes(self, model: nn.Module) -> list[Any]:
        """What the model's parameters are, whatever of them is here now."""
        if not self._shapes:
            self._shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
        return self._shapes

    # Between steps the script has control, and finds no part that it could take for the whole

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While the session has control."""
        if self._is_at_work:
            yield
            return
        if self._part:
            self._part.work()
        self._is_at_work = True
        _compile("force_eager")
        try:
            yield
        finally:
            self._is_at_work = False
            if self._part:
                self._part.rest()

    def lend(self, tensor: Tensor) -> None:
        """Before the script loads whole values into a tensor."""
        if self._part:
            self._part.presence.lend(tensor)

    def take_back(self, tensor: Tensor) -> None:
        """After the values have been taken out of it again."""
        if self._part:
            self._part.presence.take_back(tensor)

    def model(self, replica: Replica, *, everywhere: bool) -> dict[str, Tensor]:
        """A copy of the whole model's state, on every worker or on those that lead their replicas; all ask."""
        found = model_tensors(replica)
        if self._assembly:
            found = self._assembly.whole(found)
            if everywhere:
                found = self._assembly.everywhere(found)
        tensors = replica.model.state_dict(keep_vars=True)
        sparse = {name: own for name, own in tensors.items() if own.layout != torch.strided}
        values = buffers.from_saved(
            {name.removeprefix(MODEL): value for name, value in found.items()}, sparse
        )
        copies: dict[int, Tensor] = {}
        return {  # names that are tied stay so
            name: copies.setdefault(id(own), values[name].detach().clone())
            for name, own in tensors.items()
            if name in values
        }

    @property
    def is_opened(self) -> bool:
        """Whether the script has the whole of a model that is in parts."""
        return self._part is not None and self._part.presence.phase is Phase.WHOLE

    def opened(self, values: dict[str, Tensor]) -> AbstractContextManager[None]:
        """While the script has the whole model, with these values."""
        return self._part.opened(values) if self._part else nullcontext()

    def keep(self, values: Mapping[str, Tensor]) -> None:
        """Take over a whole model that the script has changed."""
        if self._part:
            self._part.keep(values)

    # The beginning of a generation

    def enter(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        world: World,
        *,
        has_begun: bool = False,
        keeps: bool = False,
    ) -> ModelParallelPart | None:
        """Take a place among the workers of a world; returns this worker's part, or None where it has everything.

        `has_begun` is whether the model is divided already; a worker that `keeps` its part goes on with it, and the
        others get one whose values they have to take over.
        """
        self.mesh = self.placement.mesh(world.size)
        self._rank = world.rank
        # The workers with the same part of other replicas: the world of the strategy.
        self.peers = world
        # The workers whose statistics may differ: workers of a replica see the same samples, unless each has its own.
        self.observers = world
        if self.is_whole:
            return None
        if next(model.parameters()).device.type != "cpu":
            raise UsageError(
                "models are laid over workers in the memory of hosts; use --device cpu, or no --placement"
            )
        division = self._told(world, keeps=keeps) if has_begun else ()
        self._groups = groups = ProcessGroups(world, self.mesh, division)
        self.peers = groups.peers
        self.observers = world if self.mesh.shards > 1 else self.peers
        if keeps and self._part:
            self._part.move(groups)
            return self._part
        if self._part:
            self._part.release()
        if self._layout is None:
            self._layout = lay_out_model(model, optimizer, span_bytes=SPAN_BYTES, lanes=1)
        if not has_begun:
            begin_alike(model, world)
        self._part = self.placement.place(model, optimizer, loss, groups, self.example)
        self._part.presence.on_use = self.on_use
        return self._part

    def barrier_group(self, world: World) -> BarrierGroup | None:
        """The workers that pass the gate of a step together, where replicas are in parts."""
        if self.is_whole:
            return None
        return BarrierGroup(world.host, self.peer_ranks)

    @property
    def peer_ranks(self) -> tuple[int, ...]:
        """The ranks, in the world, of the workers with the same part."""
        return next(ranks for ranks in self.mesh.peers() if self._rank in ranks)

    def _told(self, world: World, *, keeps: bool) -> tuple[int, ...]:
        """How the model is divided, as the workers that have a part of it say."""
        said = world.gather(msgspec.json.encode(self._part.division if keeps and self._part else None))
        known = [msgspec.json.decode(row, type=tuple[int, ...] | None) for row in said]
        return next(division for division in known if division is not None)

    def settle(self, replica: Replica) -> None:
        """The replica is made."""
        if self._groups and self._layout:
            self._assembly = Assembly(self._groups, replica, self._layout)

    # The state of a replica, whatever its placement

    def whole(
        self, replica: Replica, own: Mapping[str, Tensor], states: States
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], States]:
        """The state and the model, whole on the worker that leads, and what is known of the optimizer's state."""
        model = model_tensors(replica)
        if self._assembly is None:
            return dict(own), model, states
        everything = self._assembly.whole({**own, **model})
        model = {name: value for name, value in everything.items() if name.startswith(MODEL)}
        rest = {name: value for name, value in everything.items() if name not in model}
        return rest, model, self._assembly.states(states)

    def parts(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse, from the worker that leads: what of it is this worker's."""
        return self._assembly.own(whole) if self._assembly else whole

    def everywhere(self, own: dict[str, Tensor], states: States) -> tuple[dict[str, Tensor], States]:
        """Some of a replica's state, whole on all of its workers."""
        if self._assembly is None:
            return own, states
        return self._assembly.everywhere(self._assembly.whole(own)), self._assembly.states(states)

    def give_back(self, replica: Replica, own: Mapping[str, Tensor], states: States) -> dict[str, Tensor]:
        """The optimizer as plain PyTorch has it; returns the tensors of a model that was in parts, on every worker."""
        if self._assembly is None:
            give_back_state(replica, own, states)
            return {}
        _compile("default")
        rest, model, states = self.whole(replica, own, states)
        everything = self._assembly.everywhere({**rest, **model})
        give_whole_state(dict(replica.model.named_parameters()), replica.optimizer, everything, states)
        return {
            name.removeprefix(MODEL): value for name, value in everything.items() if name.startswith(MODEL)
        }
