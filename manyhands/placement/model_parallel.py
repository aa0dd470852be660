"""The part of a worker in a model-parallel group: the tensors that it holds, and what the group agrees on."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.comm import Comm
from manyhands.errors import UsageError
from manyhands.placement.absent import Lack
from manyhands.placement.presence import Phase, Presence
from manyhands.placement.process_groups import ProcessGroups
from manyhands.placement.tensor.alterations import Alterations
from manyhands.placement.tensor.crossing import PutTogether
from manyhands.placement.tensor.divided import DividedPass
from manyhands.replica.optimizer.abilities import is_element_wise
from manyhands.replica.parameters import trained
from manyhands.replica.part import Loss, Part, Passing
from manyhands.replica.share import Share
from manyhands.replica.state import buffers
from manyhands.replica.state.slice_of import TensorSlice


@dataclass
class MemberGroup:
    """The tensor-parallel group of this worker; passes outlive a generation, and find the present group here."""

    groups: ProcessGroups

    @property
    def comm(self) -> Comm:
        return self.groups.tensor_parallel.comm


@dataclass(frozen=True)
class Sliced:
    """Which pieces of the parameters this worker has, and the passes that exchange the rest."""

    members: MemberGroup
    alterations: Alterations | None = None
    pieces: dict[int, TensorSlice] = field(default_factory=dict)
    alone: set[int] = field(default_factory=set)  # tensors that only this worker of the group has
    elsewhere: set[int] = field(default_factory=set)  # tensors of which this worker has nothing
    passes: list[DividedPass] = field(default_factory=list)
    """Those of the modules that compute with what is here of their tensors; to all others these are absent."""


class ModelParallelPart(Part):
    """Some of a model's tensors, whole or in pieces; the others are given up."""

    spread = True
    division: tuple[int, ...] = ()
    """What a new worker needs, beside the placement, to divide the model in the same way."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        groups: ProcessGroups,
        *,
        held: set[int],
        sliced: Sliced | None = None,
    ) -> None:
        super().__init__(model, loss)
        self.groups = groups
        self._held = set(held)  # the ids of the parameters and buffers that are here
        sliced = sliced or Sliced(MemberGroup(groups))
        self._members, self._alterations = sliced.members, sliced.alterations
        self._pieces = sliced.pieces  # of those that are cut
        self._alone = sliced.alone
        self._divided = {*sliced.pieces, *sliced.alone, *sliced.elsewhere}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._ids: dict[str, int] = {}
        names: dict[int, str] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            names.setdefault(id(value), name)
            for saved, part in buffers.to_saved({name: value}).items():
                self._shapes[saved], self._ids[saved] = tuple(part.shape), id(value)
        # Every worker keeps the buffers that no checkpoint holds, which are constants, and the sparse ones.
        self._held |= {
            id(buffer)
            for buffer in model.buffers()
            if id(buffer) not in names or buffer.layout != torch.strided
        }
        self._own_buffers = {
            name for name, buffer in model.named_buffers(remove_duplicate=False) if id(buffer) in self._held
        }
        self.whole_shapes = [(tensor, tensor.shape) for tensor in (*model.parameters(), *model.buffers())]
        self.presence = Presence(model)
        self._give_up(names)
        self.presence.attach(sliced.passes)
        for each in sliced.passes:
            each.bind(self.presence)
        inside = {id(each.module) for each in sliced.passes}
        for module in model.modules() if self.presence.lacks else ():
            # A script may call a part of the model, whose layers hand slices on to each other.
            if module is model or (id(module) not in inside and inside & {id(e) for e in module.modules()}):
                self.presence.watch(module)

    def _give_up(self, names: Mapping[int, str]) -> None:
        """Keep the pieces that are this worker's."""
        presence = self.presence
        with torch.no_grad():
            for tensor, _ in self.whole_shapes:
                key = id(tensor)
                is_held, piece = key in self._held, self._pieces.get(key)
                if is_held and piece is None and key not in self._alone:
                    continue
                lack = Lack(tensor, names[key], self)
                presence.add(lack, comes=is_held)
                if not self._reaches(lack):
                    presence.out_of_reach = lack
                if not is_held:
                    tensor.data = lack.stand_in
                    lack.leave()
                elif piece:
                    tensor.data = piece.of(tensor.data).clone()

    def move(self, groups: ProcessGroups) -> None:
        """Go on with the same part among the workers of another generation."""
        self.groups = self._members.groups = groups
        if self._alterations:
            self._alterations.move(groups)
        draw_alike(groups)  # a worker may have drawn more of them in a step that is made again

    def release(self) -> None:
        """Give the part up: the model has its whole shape again, without values, and can be divided anew."""
        self.presence.take_off()
        for tensor, shape in self.whole_shapes:
            tensor.data = tensor.new_zeros(shape)

    def work(self) -> None:
        """The session has control from here on."""
        self.presence.work()

    def rest(self) -> None:
        """The script has control from here on."""
        self.presence.rest()

    def trained(self, optimizer: Optimizer) -> tuple[list[str], list[nn.Parameter]]:
        names, params = trained(self.model, optimizer)
        here = [(name, param) for name, param in zip(names, params, strict=True) if id(param) in self._held]
        return [name for name, _ in here], [param for _, param in here]

    def frozen(self, known: set[int]) -> list[nn.Parameter]:
        return [param for param in super().frozen(known) if id(param) in self._held]

    def buffers(self) -> list[Tensor]:
        return [buffer for name, buffer in self.model.named_buffers() if self._is_here(name, buffer)]

    def _is_here(self, name: str, tensor: Tensor) -> bool:
        """A module's code may put another tensor in the place of a buffer."""
        return id(tensor) in self._held or name in self._own_buffers

    def tensors(self) -> dict[str, Tensor]:
        values = self.model.state_dict(keep_vars=True)
        with torch._C.DisableTorchFunctionSubclass():  # the session or the script has control
            return buffers.to_saved(
                {name: value.detach() for name, value in values.items() if self._is_here(name, value)}
            )

    def load(self, saved: Mapping[str, Tensor]) -> None:
        own = self.tensors()
        if missing := sorted(own.keys() - saved.keys()):
            raise RuntimeError(f"missing: {', '.join(missing)}")
        for name, value in own.items():
            if value.shape != saved[name].shape:
                raise RuntimeError(
                    f"{name} has the shape {tuple(saved[name].shape)}, not {tuple(value.shape)}"
                )
            buffers.write(saved[name], value)

    def become_whole(self, tensors: Mapping[str, Tensor]) -> None:
        self.presence.take_off()
        own = self.model.state_dict(keep_vars=True)
        found = buffers.from_saved(tensors, own)
        for name, value in own.items():
            value.data = found[name].data

    # The script has the whole model for a while

    def opened(self, values: dict[str, Tensor]) -> AbstractContextManager[None]:
        """While the model has these values, in memory of its own; then `values` are what the script has made of them.

        Buffers that are here stay what they are.
        """
        return self._opened(values)

    @contextmanager
    def _opened(self, values: dict[str, Tensor]) -> Iterator[None]:
        tensors = self._wanted()
        with self.presence.whole([(tensor, values[name]) for name, tensor in tensors.items()]):
            yield
            values.update({name: tensor.data for name, tensor in tensors.items()})
            if {name: id(tensor) for name, tensor in self._wanted().items()} != {
                name: id(tensor) for name, tensor in tensors.items()
            }:
                raise UsageError(
                    "a parameter of the model was replaced by another inside of session.whole_model(); change its "
                    "values instead (load_state_dict without assign=True, copy_)"
                )

    def _wanted(self) -> dict[str, Tensor]:
        """The parameters, and what else is not here, by their first names."""
        found: dict[int, tuple[str, Tensor]] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter) or id(value) in self.presence.lacks:
                found.setdefault(id(value), (name, value))
        return dict(found.values())

    def keep(self, values: Mapping[str, Tensor]) -> None:
        """Take over what is this worker's of parameters that the script has changed."""
        names = {name for name, _ in self.model.named_parameters()}
        with torch.no_grad():
            for name, own in self.tensors().items():
                if name in names:
                    own.copy_(self._piece_of(name).of(values[name]))

    # What a script, or the loss, asks of tensors that are not here

    def value(self, lack: Lack) -> Tensor:
        if self.presence.phase is not Phase.PASS or not self._reaches(lack):
            lack.refuse()
        return self._fetched(lack)

    def _reaches(self, lack: Lack) -> bool:
        """Whether workers that compute the same have all of it among them."""
        return id(lack.tensor) in self._divided

    def _fetched(self, lack: Lack) -> Tensor:
        tensor, comm = lack.tensor, self._members.comm
        is_here = id(tensor) in self._held
        piece = self._pieces.get(id(tensor), TensorSlice(shape=tuple(lack.stand_in.shape)))
        lack.come()
        try:
            whole: Tensor = PutTogether.apply(tensor if is_here else None, piece, comm, tensor.dtype)  # type: ignore[no-untyped-call]
        finally:
            lack.leave()
        return whole

    def refusal(self, lack: Lack) -> str:
        workers = self.groups.mesh.members
        if self.presence.phase is not Phase.PASS:
            return (
                f"the placement spreads the model over {workers} workers, and this one has no more than a part of "
                f"{lack.name}; call session.model_state() on all workers, or use the model inside "
                "`with session.whole_model() as model:`"
            )
        if self._reaches(lack):
            return (
                f"{lack.name} lies in parts on {workers} workers, and the loss can read it but not change it; change "
                "it between steps, on all workers, inside `with session.whole_model() as model:`"
            )
        return (
            f"{lack.name} is in another stage of the pipeline, so the loss cannot use it; give a penalty on parameters "
            "to the optimizer (weight_decay), or use the placement sharded or tensor"
        )

    # Passes

    def backward(self, share: Share, passing: Passing) -> tuple[float, int]:
        with self.presence.passing():
            return super().backward(share, passing)

    def evaluate(self, measure: Loss, batch: Any, samples: int) -> float:
        with self.presence.passing():
            return super().evaluate(measure, batch, samples)

    # Where things lie

    def piece(self, name: str, value: Tensor) -> TensorSlice:
        return self._piece_of(name)

    def _piece_of(self, name: str) -> TensorSlice:
        """Where a tensor that is here lies in the whole one; its name says it."""
        return self._pieces.get(self._ids[name], TensorSlice(shape=self._shapes[name]))

    def counts(self, name: str) -> bool:
        """Every worker counts its piece of a tensor that is cut; the first worker counts a tensor that several have."""
        position = self.groups.position
        is_first = position.way == 0 and position.shard == 0
        return is_first or self._ids[name] in self._alone or self._piece_of(name).cut

    def whole_norm(self, norm: Tensor) -> Tensor:
        rows = self.groups.model_parallel.exchange([float(norm) ** 2])
        return norm.new_tensor(sum(row[0] for row in rows) ** 0.5)


def draw_alike(groups: ProcessGroups) -> None:
    """Workers that compute the same draw the same dropout masks: from the first one's random state."""
    if groups.mesh.ways > 1:
        state = groups.tensor_parallel.gather(torch.get_rng_state().numpy().tobytes())[0]
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def require_element_wise(optimizer: Optimizer, name: str) -> None:
    """A parameter in pieces can be updated piece by piece only where no element needs another."""
    if not is_element_wise(optimizer):
        raise UsageError(
            f"{name} cuts parameters into pieces, and {type(optimizer).__name__} may need them whole; "
            f"use sgd, adam or another "
            "optimizer of torch.optim that works element by element"
        )
