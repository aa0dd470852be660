"""The part of a worker in a model-parallel group: the tensors that it holds, and what the group agrees on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.comm import Comm
from manyhands.errors import UsageError
from manyhands.placement.process_groups import ProcessGroups
from manyhands.replica.optimizer.abilities import is_element_wise
from manyhands.replica.parameters import trained
from manyhands.replica.part import Loss, Part
from manyhands.replica.state.slice_of import TensorSlice


@dataclass
class MemberGroup:
    """The tensor-parallel group of this worker; hooks outlive a generation, and find the present group here."""

    groups: ProcessGroups

    @property
    def comm(self) -> Comm:
        return self.groups.tensor_parallel.comm


@dataclass(frozen=True)
class Sliced:
    """Which pieces of the parameters this worker has, and the hooks that exchange the rest."""

    members: MemberGroup
    pieces: dict[int, TensorSlice] = field(default_factory=dict)
    alone: set[int] = field(default_factory=set)  # tensors that only this worker of the group has
    elsewhere: set[int] = field(default_factory=set)  # tensors of which this worker has nothing
    hooks: list[Any] = field(default_factory=list)


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
        self._held = held  # the ids of the parameters and buffers that are here
        sliced = sliced or Sliced(MemberGroup(groups))
        self._members = sliced.members
        self._pieces = sliced.pieces  # of those that are cut
        self._alone = sliced.alone
        self._hooks = list(sliced.hooks)  # that are on the model until the session ends
        self._shapes = {name: tuple(value.shape) for name, value in model.state_dict(keep_vars=True).items()}
        self._ids = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
        tensors = [*model.parameters(), *model.buffers()]
        self._whole_shapes = [(tensor, tensor.shape) for tensor in tensors]
        with torch.no_grad():
            for tensor in tensors:
                if id(tensor) not in held:
                    tensor.data = tensor.new_empty(0)
                elif id(tensor) in self._pieces:
                    tensor.data = self._pieces[id(tensor)].of(tensor.data).clone()

    def move(self, groups: ProcessGroups) -> None:
        """Go on with the same part among the workers of another generation."""
        self.groups = self._members.groups = groups
        draw_alike(groups)  # a worker may have drawn more of them in a step that is made again

    def release(self) -> None:
        """Give the part up: the model has its whole shape again, without values, and can be divided anew."""
        for hook in self._hooks:
            hook.remove()
        for tensor, shape in self._whole_shapes:
            tensor.data = tensor.new_zeros(shape)

    def trained(self, optimizer: Optimizer) -> tuple[list[str], list[nn.Parameter]]:
        names, params = trained(self.model, optimizer)
        here = [(name, param) for name, param in zip(names, params, strict=True) if id(param) in self._held]
        return [name for name, _ in here], [param for _, param in here]

    def frozen(self, known: set[int]) -> list[nn.Parameter]:
        return [param for param in super().frozen(known) if id(param) in self._held]

    def buffers(self) -> list[Tensor]:
        return [buffer for buffer in super().buffers() if id(buffer) in self._held]

    def tensors(self) -> dict[str, Tensor]:
        values = self.model.state_dict(keep_vars=True)
        return {name: value.detach() for name, value in values.items() if id(value) in self._held}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        own = self.tensors()
        if missing := sorted(own.keys() - saved.keys()):
            raise RuntimeError(f"missing: {', '.join(missing)}")
        for name, value in own.items():
            if value.shape != saved[name].shape:
                raise RuntimeError(
                    f"{name} has the shape {tuple(saved[name].shape)}, not {tuple(value.shape)}"
                )
            value.copy_(saved[name])

    def become_whole(self, tensors: Mapping[str, Tensor]) -> None:
        for hook in self._hooks:
            hook.remove()
        for name, value in self.model.state_dict(keep_vars=True).items():
            value.data = tensors[name]

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
